"""Best rates of this CPU, as bounds of its kernels."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

from implementations import needs_compiler, num_threads
from manylora.kernels.native import peaks
from manylora.kernels.native.library import find_library
from manylora.kernels.native.peaks import PRODUCTS, CpuPeaks, Product, measure_peaks

pytestmark = needs_compiler


def test_a_bound_is_the_larger_of_bytes_and_products() -> None:
    slow = CpuPeaks(100.0, dict.fromkeys(PRODUCTS, 10.0))
    assert slow.seconds(200, {"int8": 5}) == 2.0
    assert slow.seconds(200, {"int8": 30, "bfloat16": 20}) == 5.0


def test_this_cpu_is_measured() -> None:
    found = measure_peaks(find_library())
    assert set(found.multiply_adds_per_s) == set(PRODUCTS)
    assert all(rate > 1e6 for rate in (found.bytes_per_s, *found.multiply_adds_per_s.values()))


def test_a_cpu_is_asked_on_one_thread_by_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"float32": 8.0, "bfloat16": 6.0}

    def rate(_library: ctypes.CDLL, product: Product, _run_s: float, clock: object) -> float:
        assert (torch.get_num_threads(), clock) == (1, time.thread_time)
        return rates[product]

    monkeypatch.setattr(peaks, "product_rate", rate)
    library = find_library()
    with num_threads(2):
        assert peaks.multiplies_bfloat16_fast(library)
        rates["bfloat16"] = 5.9
        assert not peaks.multiplies_bfloat16_fast(library)
        assert torch.get_num_threads() == 2


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
