"""The implementations of the kernels' operations, for the one contract suite in tests/kernels.

It runs over torch operators, C++ as compiled for this CPU and for lesser ones, Triton on a CUDA device, and, in a
process with TRITON_INTERPRET=1, over interpreted Triton alone (tests/kernels/test_interpreter.py).
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.config import environment
from manylora.kernels.dispatch import Kernels, native_kernels, torch_kernels, triton_kernels
from manylora.kernels.native.compilation import COMMON_FLAGS, NATIVE_FLAG, SOURCES, compiler_command
from manylora.kernels.native.levels import LEVELS, TILES, Level, usable_features
from manylora.kernels.native.library import native_library

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")
INTERPRETS = environment().get("TRITON_INTERPRET") == "1"
if INTERPRETS:
    from tuned_interpreter import tune_interpreter

    tune_interpreter()
needs_compiler = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")
LEVEL = {level.name: level for level in LEVELS}
BUILDS = {
    "native": Level("native", platform.machine(), frozenset(), (NATIVE_FLAG,)),
    "x86-64-v4": LEVEL["x86-64-v4"],  # no products of bfloat16
    "x86-64-v3": LEVEL["x86-64-v3"],  # no AVX-512
    "x86-64-v4-amx": LEVEL["x86-64-v4-amx"],
    "x86-64-v3-vnni": LEVEL["x86-64-v3-vnni"],  # as the one before it but for products of codes
}
"""What the tests compile for. Where the CPU has no AMX, `trap_tiles` stands for it."""
SOURCES_OF = {"x86-64-v3-vnni": ("quantised.cpp",)}
"""Sources of a build that only one module of tests takes. All are compiled for other builds."""


@dataclass(frozen=True)
class Implementation:
    """One implementation, and what it can compute."""

    name: str
    make: Callable[[], Kernels]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device = CPU
    build: str | None = None
    """One of `BUILDS`, for C++."""
    has_rounded_scores: bool = False
    """Whether attention rounds scores to the dtype of the keys before the softmax, as transformers does."""

    @property
    def kernels(self) -> Kernels:
        """Its operations; memory that they get uninitialised holds NaN."""
        kernels = self.make()
        return replace(
            kernels,
            **{field.name: _poisoned(getattr(kernels, field.name)) for field in fields(kernels)},
        )

    @property
    def is_bitwise(self) -> bool:
        """Whether a row's result has the same bits in every batch and in every chunk of its prompt."""
        return self.build is not None

    @property
    def is_interpreted(self) -> bool:
        """Whether it is too slow for large cases."""
        return INTERPRETS

    def leaves_out(self, window: int | None, dtype: torch.dtype) -> bool:
        """Whether it is too slow for each window with each dtype: the interpreter takes one with the other."""
        return self.is_interpreted and (window is None) == (dtype == F32)

    def tolerance(self, dtype: torch.dtype) -> float:
        """Of a product, relative to `ROW_TOLERANCES`."""
        return 0.25 if dtype == F32 and self.device == CPU and not self.is_interpreted else 1

    def randn(
        self, shape: tuple[int, ...], dtype: torch.dtype = F32, seed: int = 0
    ) -> torch.Tensor:
        """Random numbers, twice as large as usual, on its device."""
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(shape, generator=generator) * 2).to(dtype).to(self.device)


TORCH = Implementation("torch", torch_kernels, (F32, F16, BF16), has_rounded_scores=True)
NATIVE = [
    Implementation(build, native_kernels, (F32, BF16), build=build)
    for build in BUILDS
    if build not in SOURCES_OF
]
VNNI = Implementation("x86-64-v3-vnni", native_kernels, (F32, BF16), build="x86-64-v3-vnni")
"""For products of codes alone."""
TRITON = (
    Implementation(
        "triton", triton_kernels, (F32, BF16)
    )  # which computes in float32 whatever the dtype
    if INTERPRETS
    else Implementation("triton", triton_kernels, (F32, F16, BF16), torch.device("cuda"))
)


IMPLEMENTATIONS = [TRITON] if INTERPRETS else [TORCH, *NATIVE, TRITON]


def marks(impl: Implementation) -> list[pytest.MarkDecorator]:
    """Where its tests cannot run."""
    if impl.device.type == "cuda":
        return [
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ]
    if impl.build is None:
        return []
    reason = f"this CPU does not run what is compiled for {impl.build}"
    return [needs_compiler, pytest.mark.skipif(not _can_run(impl.build), reason=reason)]


def flags_for(build: str) -> tuple[str, ...]:
    """Flags that compile for a kind of CPU."""
    return (*COMMON_FLAGS, *BUILDS[build].flags)


def _can_run(build: str) -> bool:
    level = BUILDS[build]
    if build == "native" or (platform.system(), platform.machine()) != ("Linux", level.machine):
        return build == "native"
    return _cpu_features() >= level.features - TILES


def copy_sources(folder: Path, *names: str) -> None:
    """Copy some of the kernels' C++ files and all headers, for libraries that are soon compiled."""
    folder.mkdir()
    for source in [*(SOURCES / name for name in names), *SOURCES.glob("*.h")]:
        shutil.copy(source, folder)


def trap_tiles(folder: Path) -> None:
    """Let this process run AMX's instructions where it cannot; what does that is compiled into `folder`, once."""
    if _cpu_features() >= TILES:
        return
    source, library = Path(__file__).with_name("trapped_tiles.cpp"), folder / "trapped_tiles.so"
    flags = ("-std=c++17", "-O3", "-march=x86-64-v3", "-shared", "-fPIC")
    if not library.exists():
        subprocess.run([*compiler_command(), *flags, str(source), "-o", str(library)], check=True)
    ctypes.CDLL(str(library)).trap_tiles()


def _cpu_features() -> frozenset[str]:
    return usable_features(Path("/proc/cpuinfo").read_text())


def _poisoned(operation: Any) -> Any:
    """The operation, which finds NaN in memory that torch hands out uninitialised."""

    def call(*operands: Any, **named: Any) -> Any:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.zeros(1).new_empty(100).isnan().all()
            return operation(*operands, **named)
        finally:
            torch.use_deterministic_algorithms(before)

    return operation and call


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Compute with so many threads while it lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
