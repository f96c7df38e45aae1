"""Compile the CPU kernels for every level of this machine's architecture, as a wheel for one platform carries them.

usage: prebuild.py FOLDER

Prints the wheel's platform: manylinux_2_28 where the libraries need nothing newer than it promises, else linux.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

from manylora.kernels.native.compilation import COMMON_FLAGS, build, compiler_command
from manylora.kernels.native.levels import LEVELS

LIBRARIES = {
    "libc.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libstdc++.so.6",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}
"""Libraries that a library may need. An OpenMP runtime is not among them, since torch brings one."""
PROMISED = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8,)}
"""The newest symbols that manylinux_2_28 promises (PEP 600; Debian 10 and RHEL 8)."""


def is_promised(library: Path) -> bool:
    """Return True if a library needs no newer symbols than manylinux_2_28 promises.

    Raises:
        SystemExit: It needs another library than it may.
    """
    headers = subprocess.run(
        ["objdump", "-p", str(library)], check=True, capture_output=True, text=True
    ).stdout
    if others := set(re.findall(r"NEEDED +(\S+)", headers)) - LIBRARIES:
        raise SystemExit(f"{library.name} must not need {', '.join(sorted(others))}")
    symbols = re.findall(r"\b([A-Z]+)_([\d.]+)$", headers, re.MULTILINE)
    newer = [f"{name}_{version}" for name, version in symbols if numbers(version) > PROMISED[name]]
    print(
        f"{library.name}: {library.stat().st_size >> 10} KiB, newer symbols: {', '.join(newer) or 'none'}",
        file=sys.stderr,
    )
    return not newer


def numbers(version: str) -> tuple[int, ...]:
    """A version for comparisons."""
    return tuple(map(int, version.split(".")))


def main(folder: Path) -> None:
    """Compile all, and print the platform."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = platform.machine()
    levels = {folder / f"{level.name}.so": level for level in LEVELS if level.machine == machine}
    for path, level in levels.items():
        build(compiler_command(), (*COMMON_FLAGS, *level.flags), path)
        path.chmod(0o755)  # those who did not install it must be able to load it
    promised = [is_promised(path) for path in levels]
    print(f"manylinux_2_28_{machine}" if all(promised) else f"linux_{machine}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
