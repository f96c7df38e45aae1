"""Checks of settings without torch and weights, so that the error for a wrong setting comes at once.

The engine makes the checks that need torch.
"""

from __future__ import annotations

import ctypes

from manylora.config import Config
from manylora.engine.execution.memory_plan import check_max_model_len, free_memory, plan_memory
from manylora.engine.model.spec import (
    SPEC_FILES,
    base_shape,
    model_geometry,
    read_spec,
    resolve_model,
)
from manylora.engine.model.weight_bytes import choose_weights
from manylora.errors import ConfigError

CUDA_DRIVER = "libcuda.so.1"


def check_start(config: Config) -> None:
    """Refuse settings with which the engine cannot start.

    For a model on the Hugging Face hub, only the config is downloaded.

    Raises:
        ConfigError: There is no such model or it is not supported, `model.device` is cuda and there is no CUDA device,
            the device does not compute `model.weights`, `model.max_model_len` is more than the model's positions, or
            there is not enough memory.
    """
    on_cpu = config.model.device == "cpu" or count_cuda_devices() == 0
    if on_cpu and config.model.device == "cuda":
        raise ConfigError(
            "model.device: cuda is asked for, but this machine has no CUDA device that its driver shows "
            "(see nvidia-smi); take auto or cpu",
            param="model.device",
        )
    spec = read_spec(resolve_model(config.model.path, files=SPEC_FILES))
    check_max_model_len(config.model.max_model_len, spec)
    choose_weights(config.model.weights, spec, on_cpu=on_cpu)
    if on_cpu:
        # A CPU without native bfloat16 takes float32. Only torch knows, so the smaller of the two is checked.
        asked = spec.dtype if config.model.dtype == "auto" else config.model.dtype
        num_bytes = 2 if asked == "bfloat16" or config.model.dtype == "float16" else 4
        base = base_shape(spec, "")
        geometry = model_geometry(spec, base, num_bytes, config.memory.kv_dtype)
        plan_memory(config, spec, base, geometry, free_memory(), on_cpu=True)


def count_cuda_devices() -> int:
    """Number of CUDA devices that the driver shows to this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value
