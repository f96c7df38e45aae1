"""The CPU kernels in C++: compiled on first use for the machine at hand, and kept.

They are compiled here and not shipped, because the best code for a CPU is that for this very CPU, and one pure Python
wheel then serves all. The compiled library lies in the user's cache folder under a name that is the hash of all that
went into it: sources, compiler, flags and CPU. It must run on the OpenMP runtime that torch has loaded, so that both
share one pool of threads; what another runtime was linked to (clang links its own) is not used. Where there is no
library, the kernels in torch operators serve; they are slower, and that is logged once.
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
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.config import cache_folder, environment

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
NATIVE_FLAG = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
FLAGS = ("-std=c++17", "-O3", NATIVE_FLAG, "-fopenmp", "-fno-math-errno", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 300
OTHER_FOLDER = "set XDG_CACHE_HOME to another folder"
NATIVE_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Formats that the kernels are compiled for, and how their functions' names end."""


class NativeUnavailableError(RuntimeError):
    """The library is not available on this machine; the message says why."""


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be compiled; why is logged once."""
    try:
        return load_library(FLAGS)
    except NativeUnavailableError as error:
        logger.warning("CPU kernels run as torch operators, which is slower: %s", error)
        return None


def load_library(flags: tuple[str, ...], folder: Path | None = None) -> ctypes.CDLL:
    """Compile the kernels, unless that was done before, and load them.

    Args:
        flags: For the compiler.
        folder: Where compiled libraries are kept; the user's cache folder when None.

    Raises:
        NativeUnavailableError: No compiler, a failed compilation, or no folder that only this user can write to.
    """
    if platform.system() != "Linux":
        raise NativeUnavailableError(f"they are built on Linux only, not on {platform.system()}")
    compiler = _compiler()
    sources = sorted(SOURCES.glob("*.cpp"))
    target = (folder or _cache_folder()) / f"weft-{_key(compiler, flags, sources)}.so"
    if not target.exists():
        _compile(compiler, flags, sources, target)
    try:
        _check_owner(target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        target.unlink(missing_ok=True)  # damaged, perhaps: the next start compiles it again
        raise NativeUnavailableError(f"{target} cannot be loaded: {error}; {OTHER_FOLDER}") from error


def _compiler() -> list[str]:
    """The compiler's command, which may be two words, as in CXX="ccache g++"."""
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


def _key(compiler: list[str], flags: tuple[str, ...], sources: list[Path]) -> str:
    digest = hashlib.sha256()
    version = _run([*compiler, "--version"])
    for part in (
        " ".join(compiler).encode(),
        version.stdout.encode(),
        " ".join(flags).encode(),
        _cpu().encode(),
        *(path.name.encode() + path.read_bytes() for path in [*sources, *sorted(SOURCES.glob("*.h"))]),
    ):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _cpu() -> str:
    """What the CPU can do, which decides what `-march=native` means."""
    wanted = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError as error:
        raise NativeUnavailableError(f"what this CPU can do is not known: {error}") from error
    return platform.machine() + "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _cache_folder() -> Path:
    try:
        folder = cache_folder("kernels")
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
        raise NativeUnavailableError(f"no folder to keep them in: {error}; {OTHER_FOLDER}") from error
    _check_owner(folder)
    return folder


def _check_owner(path: Path) -> None:
    """Code is loaded from there, so no other user may write to it."""
    state = path.stat()
    if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeUnavailableError(f"{path} is another user's or can be written by others; {OTHER_FOLDER}")


def _compile(compiler: list[str], flags: tuple[str, ...], sources: list[Path], target: Path) -> None:
    logger.info("compiling the CPU kernels into %s", target.parent)
    started_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            done = _run([*compiler, *flags, *(str(path) for path in sources), "-o", str(built)])
            if done.returncode:
                raise NativeUnavailableError(f"{' '.join(compiler)} failed: {done.stderr.strip()[-2000:]}")
            _check_openmp(built, compiler)
            built.chmod(0o700)
            with built.open("rb") as file:
                os.fsync(file.fileno())  # a name must never lead to half a library, even after a power cut
            built.replace(target)  # atomic: complete or absent, also when another process compiles at the same time
    except OSError as error:
        raise NativeUnavailableError(f"{target} cannot be written: {error}; {OTHER_FOLDER}") from error
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - started_s)


def _check_openmp(library: Path, compiler: list[str]) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = {Path(line.split()[-1]).name for line in maps if "omp" in line}
    content = library.read_bytes()
    if not any(name.encode() + b"\0" in content for name in loaded):
        raise NativeUnavailableError(
            f"{' '.join(compiler)} links another OpenMP runtime than torch's ({', '.join(sorted(loaded)) or 'none'}); "
            "set CXX to a g++"
        )


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
        raise NativeUnavailableError("the CPU kernels are not compiled")
    function: ctypes._NamedFuncPointer = getattr(library, f"{name}_{NATIVE_DTYPES[dtype]}")
    function.restype = result
    function.argtypes = [ctypes.c_int64 if letter == "i" else ctypes.c_float for letter in arguments]
    return function
