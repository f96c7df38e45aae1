"""Check that a wheel holds what the package table promises, and nothing else.

usage: wheel_contents.py WHEEL
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from manylora.kernels.native.levels import LEVELS

ROOT = Path(__file__).resolve().parent.parent


def expected_files() -> set[str]:
    """Wheel paths of every file that belongs into a package: tracked modules, and data."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    parts = tuple(f"{folder}/" for folder in settings["package-dir"].values())
    files = {f"manylora/{path}" for path in listed.stdout.splitlines() if path.startswith(parts)}
    files |= {path for path in listed.stdout.splitlines() if path.startswith("manylora/")}
    for name, patterns in settings["package-data"].items():
        folder = ROOT / name.replace(".", "/")  # through the link of the part
        held = (path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
        files |= {str(path.relative_to(ROOT)) for path in held}
    return {path for path in files if "__pycache__" not in path}


def expected_libraries(wheel: str) -> set[str]:
    """Wheel paths of the compiled kernels: none in a wheel for any platform."""
    names = (level.name for level in LEVELS if wheel.endswith(f"_{level.machine}.whl"))
    return {f"manylora/kernels/native/prebuilt/{name}.so" for name in names}


def main(wheel: str) -> int:
    """Compare; print what differs."""
    held = {
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if not name.split("/")[0].endswith(".dist-info")
    }
    libraries = expected_libraries(wheel)
    missing = sorted((expected_files() | libraries) - held)
    foreign = (name for name in held - libraries if name.endswith((".pth", ".so", ".pkl")))
    strange = sorted({*foreign, *(name for name in held if not name.startswith("manylora/"))})
    print(f"{Path(wheel).name}: {len(held)} files")
    for name in missing:
        print(f"missing from the wheel: {name}")
    for name in strange:
        print(f"does not belong into the wheel: {name}")
    return int(bool(missing or strange))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
