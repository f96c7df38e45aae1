"""Where a model runs and in which number format: the choices behind `auto`, and what a device cannot do."""

from __future__ import annotations

import os

import torch

from weft.engine.model.linear import has_native_bfloat16, has_native_float16
from weft.errors import ConfigError
from weft.kernels.dispatch import triton_kernels

SINGLE_THREAD_BELOW_BYTES = 64 << 20
"""Models with fewer bytes of weights are computed by one thread: their matrices are so small that a second one costs
more in waiting than it saves, and much more where the cores are shared."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(setting: str) -> torch.device:
    """The device for `model.device`; auto takes a CUDA device when there is one.

    Raises:
        ConfigError: cuda is asked for and there is none, or there is one and Triton is not installed.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("model.device: cuda is asked for, but torch finds no CUDA device", param="model.device")
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


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_idle_core() -> bool:
    """Whether steps of a CPU leave a core to others, by the threads that `choose_threads` gave to torch."""
    return torch.get_num_threads() < usable_cores()
