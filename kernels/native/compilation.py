"""Compiling the CPU kernels in C++ for the CPU at hand.

Needs neither torch nor any other package, so `scripts/setup` compiles while those are installed:
`python -P -m manylora.kernels.native.compilation`. A compiled library lies in the user's cache folder. Its name is the
hash of sources, compiler, flags and CPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from manylora.config import environment, usable_cores
from manylora.kernels.native.levels import BF16, TILES, VNNI, usable_features
from manylora.user_cache import cache_folder

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
NATIVE_FLAG = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
COMMON_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fPIC")
FLAGS = (*COMMON_FLAGS, NATIVE_FLAG)
WITHOUT_BF16 = "-mno-avx512bf16"
WITHOUT_TILES = "-DMANYLORA_NO_TILES"
COMPILE_TIMEOUT_S = 300
OTHER_FOLDER = "set XDG_CACHE_HOME to another folder"


class NativeUnavailableError(RuntimeError):
    """The library is not available on this machine; the message says why."""


def compiled_library(flags: tuple[str, ...], folder: Path | None = None) -> Path:
    """Return the library that is compiled with these flags; compile it if it is missing.

    If another process is compiling it, this one waits.

    Args:
        flags: Options for the compiler.
        folder: Where compiled libraries are kept; None is the user's cache folder.

    Raises:
        NativeUnavailableError: No compiler, a failed compilation, or no folder that only this user can write to.
    """
    compiler = compiler_command()
    target = _target(compiler, flags, folder)
    if not target.exists():
        with _alone_for(target):
            if not target.exists():
                build(compiler, flags, target)
    return target


def was_compiled(flags: tuple[str, ...]) -> bool:
    """True if the user's cache folder has the library that is compiled with these flags."""
    try:
        return _target(compiler_command(), flags, None).exists()
    except NativeUnavailableError:  # there is no compiler, for example
        return False


def cpu_features() -> frozenset[str]:
    """Features of the CPU that this process may use.

    Raises:
        NativeUnavailableError: The features cannot be found out.
    """
    return usable_features(_cpuinfo())


def flags_for(features: Set[str]) -> tuple[str, ...]:
    """The compiler's flags for this very CPU.

    Args:
        features: Its features that the kernels use.
    """
    flags = FLAGS if features >= TILES else (*FLAGS, WITHOUT_TILES)
    return (*flags, WITHOUT_BF16) if features >= VNNI and not features >= BF16 else flags


def build(compiler: list[str], flags: tuple[str, ...], target: Path) -> None:
    """Compile the kernels into the library `target`, in a folder that exists.

    It is not linked with OpenMP, so it names no runtime.

    Raises:
        NativeUnavailableError: The compilation failed, or the folder cannot be written to.
    """
    logger.info("compiling the CPU kernels into %s", target.parent)
    started_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            sources = sorted(SOURCES.glob("*.cpp"))
            objects = [f"{folder}/{source.stem}.o" for source in sources]
            commands = [
                [*compiler, *flags, "-c", str(source), "-o", compiled]
                for source, compiled in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(usable_cores(), "compile") as threads:
                list(threads.map(_compile, commands))
            _compile([*compiler, "-shared", *objects, "-o", str(built)])
            built.chmod(0o700)
            with built.open("rb") as file:
                # The name must never lead to half a library, even after a power cut.
                os.fsync(file.fileno())
            built.replace(target)  # atomic: complete or absent
    except OSError as error:
        raise NativeUnavailableError(
            f"{target} cannot be written: {error}; {OTHER_FOLDER}"
        ) from error
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - started_s)


def _compile(command: list[str]) -> None:
    done = _run(command)
    if done.returncode:
        raise NativeUnavailableError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


@contextlib.contextmanager
def _alone_for(target: Path) -> Iterator[None]:
    """Hold the lock of the folder that the library goes to. The lock is freed however its holder ends.

    Raises:
        NativeUnavailableError: The folder cannot be locked.
    """
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(target.parent, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise NativeUnavailableError(
                f"{target} cannot be written: {error}; {OTHER_FOLDER}"
            ) from error
        yield


def _target(compiler: list[str], flags: tuple[str, ...], folder: Path | None) -> Path:
    return (folder or _cache_folder()) / f"manylora-{_key(compiler, flags)}.so"


def compiler_command() -> list[str]:
    """The compiler's command, which may be two words, as in CXX="ccache g++".

    Raises:
        NativeUnavailableError: There is no compiler, or CXX names no program.
    """
    named = environment().get("CXX")
    try:
        commands = [shlex.split(named)] if named else [[name] for name in COMPILERS]
    except ValueError as error:
        raise NativeUnavailableError(
            f"CXX={named} is no command: {error}; set CXX to a compiler"
        ) from error
    for command in commands:
        if command and (found := shutil.which(command[0])):
            return [found, *command[1:]]
    raise NativeUnavailableError(
        f"CXX={named} is no program; set CXX to a compiler"
        if named
        else "there is no C++ compiler; install g++, or set CXX"
    )


def _key(compiler: list[str], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    version = _run([*compiler, "--version"])
    for part in (
        " ".join(compiler).encode(),
        version.stdout.encode(),
        " ".join(flags).encode(),
        _cpu().encode(),
        *(
            path.name.encode() + path.read_bytes()
            for end in ("cpp", "h")
            for path in sorted(SOURCES.glob(f"*.{end}"))
        ),
    ):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _cpu() -> str:
    """The CPU's features, on which the meaning of `-march=native` depends."""
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = {line for line in _cpuinfo().splitlines() if line.startswith(wanted)}
    return platform.machine() + "\n".join(sorted(lines))


def _cpuinfo() -> str:
    if platform.system() != "Linux":
        raise NativeUnavailableError(f"they are built on Linux only, not on {platform.system()}")
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError as error:
        raise NativeUnavailableError(f"the features of this CPU cannot be read: {error}") from error


def _cache_folder() -> Path:
    try:
        return cache_folder("kernels")
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
        raise NativeUnavailableError(
            f"there is no folder to keep them in: {error}; {OTHER_FOLDER}"
        ) from error


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603 - the compiler is the user's own choice
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]} failed: {error}") from error


if __name__ == "__main__":
    try:
        compiled_library(flags_for(cpu_features()))
    except NativeUnavailableError as error:
        sys.exit(f"the CPU kernels cannot be compiled: {error}")
