"""Check that a wheel holds what the package table promises, and nothing else.

usage: wheel_contents.py WHEEL
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def expected_files() -> set[str]:
    """Wheel paths of every file that belongs into a package: tracked modules, and data."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {package: package.replace(".", "/") for package in settings["packages"]}
    for package, folder in settings["package-dir"].items():
        for name in folders:
            if name == package or name.startswith(package + "."):
                folders[name] = folder + folders[name].removeprefix(package.replace(".", "/"))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    files: set[str] = set()
    for name, folder in folders.items():
        files |= {
            f"{name.replace('.', '/')}/{Path(path).name}"
            for path in tracked
            if path.endswith(".py") and str(Path(path).parent) == folder
        }
    for name, patterns in settings["package-data"].items():
        for pattern in patterns:
            held = (path for path in (ROOT / folders[name]).glob(pattern) if path.is_file())
            files |= {f"{name.replace('.', '/')}/{path.relative_to(ROOT / folders[name])}" for path in held}
    return {path for path in files if "__pycache__" not in path}


def main(wheel: str) -> int:
    """Compare; print what differs."""
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    missing = sorted(expected_files() - held)
    strange = sorted(name for name in held if not name.startswith("weft/") or name.endswith((".pth", ".so", ".pkl")))
    print(f"{Path(wheel).name}: {len(held)} files")
    for name in missing:
        print(f"missing from the wheel: {name}")
    for name in strange:
        print(f"does not belong into the wheel: {name}")
    return int(bool(missing or strange))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
