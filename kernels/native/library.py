"""The CPU kernels in C++: prebuilt in a wheel, or compiled on first use for the CPU at hand, and kept.

`compilation.py` compiles them. A library is linked with no OpenMP runtime: it finds the symbols in the runtime that
torch has loaded. So both share one pool of threads, and a wheel brings no second runtime. Where there is no library,
the kernels in torch operators serve; they are slower, and a warning says so once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manylora.kernels.native.compilation import (
    OTHER_FOLDER,
    SOURCES,
    NativeUnavailableError,
    compiled_library,
    cpu_features,
    flags_for,
    was_compiled,
)
from manylora.kernels.native.levels import BF16_FEATURES, BF16_LEVEL, level_for
from manylora.kernels.native.peaks import multiplies_bfloat16_fast
from manylora.user_cache import is_private

logger = logging.getLogger(__name__)

PREBUILT = SOURCES / "prebuilt"
"""Folder of a wheel for one platform, with a library for each level, `<level>.so`."""
NATIVE_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Dtypes that the kernels are compiled for, and the endings of their functions' names."""


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The kernels in C++, or None where there are none for this machine; the reason is logged once."""
    try:
        return find_library()
    except NativeUnavailableError as error:
        logger.warning("CPU kernels run as torch operators, which is slower: %s", error)
        return None


def find_library() -> ctypes.CDLL:
    """Load kernels: those that were compiled here before, else prebuilt ones, else those that are compiled now.

    They do without the instruction that multiplies bfloat16 where products of float32 are faster.

    Raises:
        NativeUnavailableError: No library is prebuilt for this CPU, and none can be compiled.
    """
    features = cpu_features()
    library = _library_with(features)
    if level_of(library) != BF16_LEVEL or multiplies_bfloat16_fast(library):
        return library
    return _library_with(features - BF16_FEATURES)


def _library_with(features: frozenset[str]) -> ctypes.CDLL:
    """Load kernels for these features."""
    flags = flags_for(features)
    level = level_for(platform.machine(), features)
    prebuilt = PREBUILT / f"{level.name}.so" if level else None
    if prebuilt is None or not prebuilt.exists() or was_compiled(flags):
        return load_library(flags)
    try:
        return _load(prebuilt)
    except OSError as error:
        raise NativeUnavailableError(
            f"{prebuilt} cannot be loaded: {error}; install Manylora again"
        ) from error


def load_library(flags: tuple[str, ...], folder: Path | None = None) -> ctypes.CDLL:
    """Compile the kernels, unless that was done before, and load them.

    Args:
        flags: Options for the compiler.
        folder: Where compiled libraries are kept; None is the user's cache folder.

    Raises:
        NativeUnavailableError: No compiler, a failed compilation, or no folder that only this user can write to.
    """
    target = compiled_library(flags, folder)
    try:
        if not is_private(target):  # code is loaded from there
            raise NativeUnavailableError(
                f"{target} is another user's or can be written by others; {OTHER_FOLDER}"
            )
        return _load(target)
    except OSError as error:
        target.unlink(missing_ok=True)  # damaged, perhaps: the next start compiles it again
        raise NativeUnavailableError(
            f"{target} cannot be loaded: {error}; {OTHER_FOLDER}, or CXX to a g++"
        ) from error


def describe(library: ctypes.CDLL) -> str:
    """Level of CPUs that a library is for, and its origin."""
    origin = "prebuilt" if Path(library._name).parent == PREBUILT else "compiled for this CPU"
    return f"{level_of(library)}, {origin}"


def level_of(library: ctypes.CDLL) -> str:
    """Level of CPUs that a library is for, as `LEVELS` names it."""
    library.level.restype = ctypes.c_char_p
    return str(library.level().decode())


def _load(path: Path) -> ctypes.CDLL:
    _share_openmp()
    return ctypes.CDLL(str(path))


@functools.cache
def _share_openmp() -> None:
    """Let libraries that are loaded from now on find the symbols of the OpenMP runtime that torch uses."""
    try:
        # The search includes the libraries that torch is linked with.
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except AttributeError as error:
        raise NativeUnavailableError(
            "torch is built without an OpenMP runtime that g++'s code can use; install a torch from PyPI"
        ) from error
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(word, 16) for word in line.split()[0].split("-"))
        if start <= address < end:
            ctypes.CDLL(line.split(maxsplit=5)[5], mode=ctypes.RTLD_GLOBAL)


def panel_columns(task_columns: int) -> int:
    """Outputs of a panel of weights, which depends on the CPU; at most `task_columns`, those of a task.

    Raises:
        NativeUnavailableError: There is no library.
    """
    library = _library()
    library.panel_columns.argtypes = [ctypes.c_int64]
    library.panel_columns.restype = ctypes.c_int64
    return int(library.panel_columns(task_columns))


@functools.cache
def native_function(
    name: str, dtype: torch.dtype, arguments: str, result: type[ctypes.c_bool] | None = None
) -> Callable[..., Any]:
    """The function `name` for tensors of `dtype`.

    Args:
        name: Its name without the ending for the dtype.
        dtype: Dtype of the tensors.
        arguments: One letter each: i for an integer or an address, f for a float.
        result: Type of its result; None if it returns nothing.

    Raises:
        ValueError: There is no function for this dtype.
    """
    if dtype not in NATIVE_DTYPES:
        raise ValueError(
            f"CPU kernels: expected one of {', '.join(map(str, NATIVE_DTYPES))}, got {dtype}"
        )
    library = _library()
    function: ctypes._NamedFuncPointer = getattr(library, f"{name}_{NATIVE_DTYPES[dtype]}")
    function.restype = result
    function.argtypes = [
        ctypes.c_int64 if letter == "i" else ctypes.c_float for letter in arguments
    ]
    return function


def _library() -> ctypes.CDLL:
    library = native_library()
    if library is None:
        raise NativeUnavailableError("there are no CPU kernels in C++ for this machine")
    return library
