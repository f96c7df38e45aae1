"""Best rates of this CPU, as bounds of its kernels."""

from __future__ import annotations

import ctypes

import torch

from implementations import needs_compiler
from manylora.kernels.native.library import find_library
from manylora.kernels.native.peaks import PRODUCTS, CpuPeaks, measure_peaks

pytestmark = needs_compiler


def test_a_bound_is_the_larger_of_bytes_and_products() -> None:
    peaks = CpuPeaks(100.0, dict.fromkeys(PRODUCTS, 10.0))
    assert peaks.seconds(200, {"int8": 5}) == 2.0
    assert peaks.seconds(200, {"int8": 30, "bfloat16": 20}) == 5.0


def test_this_cpu_is_measured() -> None:
    peaks = measure_peaks(find_library())
    assert set(peaks.multiply_adds_per_s) == set(PRODUCTS)
    assert all(rate > 1e6 for rate in (peaks.bytes_per_s, *peaks.multiply_adds_per_s.values()))


def test_the_functions_count_what_they_compute() -> None:
    library = find_library()
    for product in PRODUCTS:
        count = getattr(library, f"peak_{product}")
        count.argtypes = [ctypes.c_int64]
        count.restype = ctypes.c_int64
        assert count(20) == 2 * count(10) > 0
    library.peak_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.peak_read.restype = ctypes.c_int64
    data = torch.zeros(1 << 20, dtype=torch.uint8)
    assert library.peak_read(data.data_ptr(), data.numel()) == 0
    data[-64:] = 1
    assert library.peak_read(data.data_ptr(), data.numel()) != 0
