"""Where a model runs and in which number format: the choices behind `auto`, what a device cannot do, and its heap."""

from __future__ import annotations

import ctypes
import platform

import torch

from manylora.config import usable_cores
from manylora.engine.model.linear import has_native_bfloat16, has_native_float16
from manylora.errors import ConfigError
from manylora.kernels.dispatch import triton_kernels

SINGLE_THREAD_BELOW_BYTES = 64 << 20
"""Models with fewer bytes of weights are computed by one thread: their matrices are so small that a second one costs
more in waiting than it saves, and much more where the cores are shared."""

MMAP_THRESHOLD_BYTES = 256 << 20
"""Blocks up to this size come from the heap."""
TRIM_THRESHOLD_BYTES = 1 << 30
"""The heap shrinks when so much of its end is free."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(setting: str) -> torch.device:
    """The device for `model.device`; auto takes a CUDA device when there is one.

    Raises:
        ConfigError: cuda is asked for and there is none, or there is one and Triton is not installed.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "model.device: cuda is asked for, but torch finds no CUDA device", param="model.device"
        )
    triton_kernels()  # where Triton is missing, this fails before weights are read
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(setting: str, asked_by_model: str | None, device: torch.device) -> torch.dtype:
    """The number format for `model.dtype`; auto follows the model where the device computes its format natively.

    Args:
        setting: auto, float32, bfloat16 or float16.
        asked_by_model: The `dtype` of the checkpoint's config, None where it does not say.
        device: Where the model runs.

    Raises:
        ConfigError: The device does not compute the asked format.
    """
    on_cpu = device.type == "cpu"
    if setting == "auto":
        dtype = DTYPES.get(asked_by_model or "float32", torch.float32)
        if not on_cpu:
            return torch.bfloat16 if dtype == torch.float32 else dtype
        return dtype if dtype == torch.bfloat16 and has_native_bfloat16() else torch.float32
    if setting == "float16" and on_cpu and not has_native_float16():
        raise ConfigError(
            "model.dtype: float16 needs a CPU with avx512_fp16 or avx_ne_convert, which this one lacks; "
            "take auto, bfloat16 or float32",
            param="model.dtype",
        )
    return DTYPES[setting]


def choose_threads(setting: int, weight_bytes: int) -> int:
    """Intra-op threads on the CPU for `model.threads`; 0 takes one for a tiny model and all usable cores else."""
    return setting or (1 if weight_bytes < SINGLE_THREAD_BELOW_BYTES else usable_cores())


def has_idle_core() -> bool:
    """Whether steps of a CPU leave a core to others, by the threads that `choose_threads` gave to torch."""
    return torch.get_num_threads() < usable_cores()


def keep_freed_memory() -> bool:
    """Let this process keep blocks that a step frees for the next one; returns whether the C library can (glibc only).

    What was freed before, while weights were loaded and rounded, is given back first (100 MB of a 0.5B model).

    A step over a prompt allocates and frees large blocks in each layer. glibc gives blocks above 32 MiB back to the
    operating system at once, which hands them out again page by page, zeroed. On a virtual machine that takes longer
    than filling them: a step over 2,000 tokens of a 0.5B model spent a third of its time in it.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    libc.malloc_trim(ctypes.c_size_t(0))
    is_kept = bool(
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    )  # an older one refuses more than 32 MiB
    return is_kept and bool(libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
