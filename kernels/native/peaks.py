"""Bounds of all kernels on this CPU: the bytes that it reads and the products that it computes in a second at best."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Product = Literal["float32", "bfloat16", "int8", "int4"]
"""Kinds of products: by the fastest instruction that this CPU has for exact sums of them."""
PRODUCTS: tuple[Product, ...] = ("float32", "bfloat16", "int8", "int4")
READ_BYTES = 128 << 20
"""Bytes of the buffer that is read, many times what a cache holds."""
RUNS = 5
RUN_S = 0.02
SHORT_RUN_S = 0.002
FAST_SHARE = 0.75
"""Least share of the products of float32 for which bfloat16 is fast. Where a CPU runs the instruction itself, there are
as many or twice as many; a virtual machine with less than half of them came by."""
FIRST_STEPS = 1000


@dataclass(frozen=True, slots=True)
class CpuPeaks:
    """Best rates of this CPU with the threads that torch has."""

    bytes_per_s: float
    """Bytes read from memory."""
    multiply_adds_per_s: dict[Product, float]

    def seconds(self, num_bytes: float, multiply_adds: Mapping[Product, float]) -> float:
        """Time below which nothing reads these bytes and computes these products."""
        computed_s = sum(
            count / self.multiply_adds_per_s[product] for product, count in multiply_adds.items()
        )
        return max(num_bytes / self.bytes_per_s, computed_s)


class ReadMeter:
    """Measures how fast this CPU reads memory, with the threads that torch has.

    Args:
        library: Compiled kernels.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._data = torch.ones(READ_BYTES, dtype=torch.uint8)
        self._read = library.peak_read
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._read.restype = ctypes.c_int64

    def bytes_per_s(self) -> float:
        """Rate of one pass over more than a cache holds. Others on a shared machine change it within seconds."""
        return READ_BYTES / _seconds(self._read, self._data.data_ptr(), READ_BYTES)


def measure_peaks(library: ctypes.CDLL) -> CpuPeaks:
    """Measure this CPU in half a second, with the instructions of compiled kernels."""
    meter = ReadMeter(library)
    return CpuPeaks(max(meter.bytes_per_s() for _ in range(RUNS)), product_rates(library))


def product_rates(library: ctypes.CDLL) -> dict[Product, float]:
    """Multiply-adds per second of each kind."""
    return {name: product_rate(library, name, RUN_S) for name in PRODUCTS}


def multiplies_bfloat16_fast(library: ctypes.CDLL) -> bool:
    """True if products of bfloat16 are nearly as many as those of float32, or more.

    Measures for some milliseconds, on one thread and by its own time: what else runs here must not change the kernels.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wide, narrow = (
            product_rate(library, name, SHORT_RUN_S, time.thread_time)
            for name in ("float32", "bfloat16")
        )
    finally:
        torch.set_num_threads(num_threads)
    return narrow >= FAST_SHARE * wide


def product_rate(
    library: ctypes.CDLL,
    product: Product,
    run_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Multiply-adds per second: those of the best run of `run_s`, as other processes only make one slower."""
    multiply: Callable[[int], int] = getattr(library, f"peak_{product}")
    multiply.argtypes = [ctypes.c_int64]  # type: ignore[attr-defined]
    multiply.restype = ctypes.c_int64  # type: ignore[attr-defined]
    steps = FIRST_STEPS
    while _seconds(multiply, steps, clock=clock) < run_s:
        steps *= 2
    best_s = min(_seconds(multiply, steps, clock=clock) for _ in range(RUNS))
    return multiply(steps) / best_s


def _seconds(
    function: Callable[..., int], *arguments: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    started_s = clock()
    function(*arguments)
    return clock() - started_s
