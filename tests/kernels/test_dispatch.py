import sys
from dataclasses import asdict

import pytest
import torch

from implementations import BF16, CPU, F16, F32, needs_compiler
from manylora.engine.model.device import choose_device
from manylora.errors import ConfigError
from manylora.kernels import dispatch
from manylora.kernels.dispatch import (
    kernels_for,
    native_kernels,
    torch_kernels,
)
from manylora.kernels.native import sgmv as sgmv_native
from manylora.kernels.plain import sampling as sampling_cpu

TRITON_KERNELS = "manylora.kernels.triton"


@needs_compiler
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_cpu_gets_cpp_kernels(dtype: torch.dtype) -> None:
    kernels = kernels_for(CPU, dtype)
    assert kernels is native_kernels()
    assert kernels.sgmv is sgmv_native.sgmv
    operations = asdict(kernels)
    assert operations.pop("shrink") is None, "sgmv does both products"
    # Only where a CPU multiplies no bfloat16: test_widening_linear.py.
    operations.pop("widening_linear")
    in_torch = {
        name for name, operation in operations.items() if ".native." not in operation.__module__
    }
    assert in_torch == {"embed", "sample", "logprobs"}
    assert kernels.sample is sampling_cpu.sample


def test_float16_gets_torch_operators() -> None:
    assert kernels_for(CPU, F16) is torch_kernels()


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device: expected cpu or cuda, got meta"):
        kernels_for(torch.device("meta"), F32)


def test_a_gpu_without_triton_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [
        name
        for name in sys.modules
        if name.split(".")[0] == "triton" or name.startswith(TRITON_KERNELS)
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    dispatch.triton_kernels.cache_clear()
    for choose in (lambda: kernels_for(torch.device("cuda"), BF16), lambda: choose_device("auto")):
        with pytest.raises(ConfigError, match=r"pip install 'manylora\[triton\]'") as raised:
            choose()
        assert raised.value.param == "model.device"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_cuda_gets_triton(dtype: torch.dtype) -> None:
    from manylora.kernels.triton import sgmv as sgmv_triton

    assert kernels_for(torch.device("cuda"), dtype).sgmv is sgmv_triton.sgmv
