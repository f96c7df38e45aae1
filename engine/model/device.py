"""Device, number format and threads of a model: the choices behind `auto`, the limits of a device, and the heap."""

from __future__ import annotations

import ctypes
import platform

import torch

from manylora.config import usable_cores
from manylora.engine.model.linear import has_fast_bfloat16, has_native_float16
from manylora.errors import ConfigError
from manylora.kernels.dispatch import triton_kernels

SINGLE_THREAD_BELOW_BYTES = 64 << 20
"""Models with fewer bytes of weights use one thread. Their matrices are so small that a second thread costs more in
waiting than it saves, and much more if the cores are shared."""

MMAP_THRESHOLD_BYTES = 256 << 20
"""Blocks up to this size come from the heap."""
TRIM_THRESHOLD_BYTES = 1 << 30
"""The heap shrinks when more than this is free at its end."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(setting: str) -> torch.device:
    """Choose the device for `model.device`; auto takes a CUDA device if there is one.

    Raises:
        ConfigError: cuda is asked for and there is none, or Triton is not installed.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "model.device: cuda is asked for, but torch finds no CUDA device; take auto or cpu",
            param="model.device",
        )
    triton_kernels()  # if Triton is missing, this fails before weights are read
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(setting: str, asked_by_model: str | None, device: torch.device) -> torch.dtype:
    """Choose the number format for `model.dtype`; auto takes 16 bits for a model in 16 bits.

    On a CPU those are bfloat16, also for a model in float16, where layers in it are as fast as in float32.

    Args:
        setting: auto, float32, bfloat16 or float16.
        asked_by_model: `dtype` of the checkpoint's config; None if it has none.
        device: Device of the model.

    Raises:
        ConfigError: The device does not compute the asked format.
    """
    on_cpu = device.type == "cpu"
    if setting == "auto":
        dtype = DTYPES.get(asked_by_model or "float32", torch.float32)
        if not on_cpu:
            return torch.bfloat16 if dtype == torch.float32 else dtype
        return torch.bfloat16 if dtype.itemsize == 2 and has_fast_bfloat16() else torch.float32
    if setting == "float16" and on_cpu and not has_native_float16():
        raise ConfigError(
            "model.dtype: float16 needs a CPU with avx512_fp16 or avx_ne_convert, which this one lacks; "
            "take auto, bfloat16 or float32",
            param="model.dtype",
        )
    return DTYPES[setting]


def choose_threads(setting: int, weight_bytes: int) -> int:
    """Choose the intra-op threads for `model.threads`; 0 takes one for a tiny model, all usable cores for others."""
    return setting or (1 if weight_bytes < SINGLE_THREAD_BELOW_BYTES else usable_cores())


def has_idle_core() -> bool:
    """True if steps on a CPU leave a core to others, with the threads that torch uses now."""
    return torch.get_num_threads() < usable_cores()


def keep_freed_memory() -> bool:
    """Let this process keep the blocks that a step frees, for the next step. Return False if glibc is not used.

    Memory that was freed while weights were loaded and rounded (100 MB for a 0.5B model) is given back first.

    A step over a prompt allocates and frees large blocks in each layer. glibc gives blocks above 32 MiB back to the
    operating system at once, which later hands them out page by page, zeroed. On a virtual machine that takes longer
    than the step's writes: a step over 2,000 tokens of a 0.5B model spent a third of its time in it.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    libc.malloc_trim(ctypes.c_size_t(0))
    is_kept = bool(
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    )  # an older glibc refuses more than 32 MiB
    return is_kept and bool(libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
