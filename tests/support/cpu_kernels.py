"""The operations that a CPU has, as parameters of tests, and builds of the C++ ones for lesser CPUs than this one."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from oracles import reference_kernels
from weft.kernels.dispatch import native_kernels, torch_kernels
from weft.kernels.native.library import FLAGS, NATIVE_DTYPES, native_library

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
needs_compiler = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")
NATIVE = pytest.param(native_kernels(), id="native", marks=needs_compiler)
TORCH = pytest.param(torch_kernels(), id="torch")
REFERENCE = pytest.param(reference_kernels(), id="reference")
CPU_KERNELS = [NATIVE, TORCH]
ALL_KERNELS = [*CPU_KERNELS, REFERENCE]
KERNELS_AND_DTYPES = [
    *(pytest.param(native_kernels(), dtype, id=f"native-{dtype}", marks=needs_compiler) for dtype in NATIVE_DTYPES),
    *(pytest.param(torch_kernels(), dtype, id=f"torch-{dtype}") for dtype in (F32, F16, BF16)),
]
"""For tests of (kernels, dtype): every dtype that an implementation takes."""
BUILDS = {
    "native": (),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"),
}
"""What `-march` may say, and the features of a CPU that runs it: v4 has no products of bfloat16, v3 no AVX-512."""


def flags_for(build: str) -> tuple[str, ...]:
    """Flags that compile for a kind of CPU."""
    return tuple(f"-march={build}" if flag == "-march=native" else flag for flag in FLAGS)


def can_run(build: str) -> bool:
    """Whether this CPU runs what was compiled for a kind of CPU."""
    if build == "native":
        return True
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    features = {word for line in Path("/proc/cpuinfo").read_text().splitlines() for word in line.split()}
    return features.issuperset(BUILDS[build])


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Compute with so many threads while it lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
