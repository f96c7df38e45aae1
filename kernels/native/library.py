"""The CPU kernels in C++: prebuilt in a wheel, or compiled on first use for the CPU at hand, and kept.

What was compiled here lies in the user's cache folder under a name that is the hash of all that went into it: sources,
compiler, flags and CPU. No library names an OpenMP runtime that it needs: its symbols are found in the one that torch
has loaded, so that both share one pool of threads, and a wheel brings no second one along. Where there is no library,
the kernels in torch operators serve; they are slower, and that is logged once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manylora.config import environment
from manylora.kernels.native.levels import TILES, level_for, usable_features
from manylora.user_cache import cache_folder, is_private

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "prebuilt"
"""Of a wheel for one platform: a library for each level, `<level>.so`."""
COMPILERS = ("c++", "g++", "clang++")
NATIVE_FLAG = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
COMMON_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fPIC")
FLAGS = (*COMMON_FLAGS, NATIVE_FLAG)
WITHOUT_TILES = "-DMANYLORA_NO_TILES"
COMPILE_TIMEOUT_S = 300
OTHER_FOLDER = "set XDG_CACHE_HOME to another folder"
NATIVE_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Formats that the kernels are compiled for, and how their functions' names end."""


class NativeUnavailableError(RuntimeError):
    """The library is not available on this machine; the message says why."""


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The kernels in C++, or None where there are none for this machine; why is logged once."""
    try:
        return find_library()
    except NativeUnavailableError as error:
        logger.warning("CPU kernels run as torch operators, which is slower: %s", error)
        return None


def find_library() -> ctypes.CDLL:
    """Load the kernels that were compiled here before, else prebuilt ones, else compile them now.

    Raises:
        NativeUnavailableError: None is prebuilt for this CPU, and none can be compiled.
    """
    features = usable_features(_cpuinfo())
    flags = FLAGS if features >= TILES else (*FLAGS, WITHOUT_TILES)
    level = level_for(platform.machine(), features)
    prebuilt = PREBUILT / f"{level.name}.so" if level else None
    if prebuilt is None or not prebuilt.exists() or _was_compiled(flags):
        return load_library(flags)
    try:
        return _load(prebuilt)
    except OSError as error:
        raise NativeUnavailableError(f"{prebuilt} cannot be loaded: {error}; install Manylora again") from error


def load_library(flags: tuple[str, ...], folder: Path | None = None) -> ctypes.CDLL:
    """Compile the kernels, unless that was done before, and load them.

    Args:
        flags: For the compiler.
        folder: Where compiled libraries are kept; the user's cache folder when None.

    Raises:
        NativeUnavailableError: No compiler, a failed compilation, or no folder that only this user can write to.
    """
    compiler = compiler_command()
    target = _target(compiler, flags, folder)
    if not target.exists():
        build(compiler, flags, target)
    try:
        if not is_private(target):  # code is loaded from there
            raise NativeUnavailableError(f"{target} is another user's or can be written by others; {OTHER_FOLDER}")
        return _load(target)
    except OSError as error:
        target.unlink(missing_ok=True)  # damaged, perhaps: the next start compiles it again
        raise NativeUnavailableError(f"{target} cannot be loaded: {error}; {OTHER_FOLDER}, or CXX to a g++") from error


def describe(library: ctypes.CDLL) -> str:
    """The level of CPUs that a library is for, and where it comes from."""
    library.level.restype = ctypes.c_char_p
    origin = "prebuilt" if Path(library._name).parent == PREBUILT else "compiled for this CPU"
    return f"{library.level().decode()}, {origin}"


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
            for source, compiled in zip(sources, objects, strict=True):
                _compile([*compiler, *flags, "-c", str(source), "-o", compiled])
            _compile([*compiler, "-shared", *objects, "-o", str(built)])
            built.chmod(0o700)
            with built.open("rb") as file:
                os.fsync(file.fileno())  # a name must never lead to half a library, even after a power cut
            built.replace(target)  # atomic: complete or absent, also when another process compiles at the same time
    except OSError as error:
        raise NativeUnavailableError(f"{target} cannot be written: {error}; {OTHER_FOLDER}") from error
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - started_s)


def _compile(command: list[str]) -> None:
    done = _run(command)
    if done.returncode:
        raise NativeUnavailableError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


def _was_compiled(flags: tuple[str, ...]) -> bool:
    try:
        return _target(compiler_command(), flags, None).exists()
    except NativeUnavailableError:  # there is no compiler, for example
        return False


def _load(path: Path) -> ctypes.CDLL:
    _share_openmp()
    return ctypes.CDLL(str(path))


@functools.cache
def _share_openmp() -> None:
    """Let libraries that are loaded from now on find the symbols of the OpenMP runtime that torch uses."""
    try:
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel  # looks in what torch is linked with, too
    except AttributeError as error:
        raise NativeUnavailableError("torch is built without an OpenMP runtime that g++'s code can use") from error
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(word, 16) for word in line.split()[0].split("-"))
        if start <= address < end:
            ctypes.CDLL(line.split(maxsplit=5)[5], mode=ctypes.RTLD_GLOBAL)


def _target(compiler: list[str], flags: tuple[str, ...], folder: Path | None) -> Path:
    return (folder or _cache_folder()) / f"manylora-{_key(compiler, flags)}.so"


def compiler_command() -> list[str]:
    """The compiler's command, which may be two words, as in CXX="ccache g++".

    Raises:
        NativeUnavailableError: There is none, or CXX names none.
    """
    named = environment().get("CXX")
    try:
        commands = [shlex.split(named)] if named else [[name] for name in COMPILERS]
    except ValueError as error:
        raise NativeUnavailableError(f"CXX={named} is no command: {error}") from error
    for command in commands:
        if command and (found := shutil.which(command[0])):
            return [found, *command[1:]]
    raise NativeUnavailableError(
        f"CXX={named} is no program" if named else "there is no C++ compiler; install g++, or set CXX"
    )


def _key(compiler: list[str], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    version = _run([*compiler, "--version"])
    for part in (
        " ".join(compiler).encode(),
        version.stdout.encode(),
        " ".join(flags).encode(),
        _cpu().encode(),
        *(path.name.encode() + path.read_bytes() for end in ("cpp", "h") for path in sorted(SOURCES.glob(f"*.{end}"))),
    ):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _cpu() -> str:
    """What the CPU can do, which decides what `-march=native` means."""
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = {line for line in _cpuinfo().splitlines() if line.startswith(wanted)}
    return platform.machine() + "\n".join(sorted(lines))


def _cpuinfo() -> str:
    if platform.system() != "Linux":
        raise NativeUnavailableError(f"they are built on Linux only, not on {platform.system()}")
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError as error:
        raise NativeUnavailableError(f"what this CPU can do is not known: {error}") from error


def _cache_folder() -> Path:
    try:
        return cache_folder("kernels")
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
        raise NativeUnavailableError(f"no folder to keep them in: {error}; {OTHER_FOLDER}") from error


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


@functools.cache
def native_function(
    name: str, dtype: torch.dtype, arguments: str, result: type[ctypes.c_bool] | None = None
) -> Callable[..., Any]:
    """The function `name` for tensors of `dtype`.

    Args:
        name: Without the ending for the dtype.
        dtype: Of the tensors.
        arguments: One letter each: i for an integer or an address, f for a float.
        result: What it returns.

    Raises:
        ValueError: There is none for this dtype.
    """
    if dtype not in NATIVE_DTYPES:
        raise ValueError(f"CPU kernels: expected one of {', '.join(map(str, NATIVE_DTYPES))}, got {dtype}")
    library = native_library()
    if library is None:
        raise NativeUnavailableError("there are no CPU kernels in C++ for this machine")
    function: ctypes._NamedFuncPointer = getattr(library, f"{name}_{NATIVE_DTYPES[dtype]}")
    function.restype = result
    function.argtypes = [ctypes.c_int64 if letter == "i" else ctypes.c_float for letter in arguments]
    return function
