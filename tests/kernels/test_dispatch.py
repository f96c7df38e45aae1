import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from cpu_kernels import BF16, F16, F32, needs_compiler
from weft.kernels import dispatch
from weft.kernels.dispatch import kernels_for, native_kernels, torch_kernels
from weft.kernels.native import sgmv as sgmv_native
from weft.kernels.plain import sampling as sampling_cpu

CPU = torch.device("cpu")


@needs_compiler
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_cpu_gets_cpp_kernels(dtype: torch.dtype) -> None:
    kernels = kernels_for(CPU, dtype)
    assert kernels is native_kernels()
    assert kernels.sgmv is sgmv_native.sgmv
    in_torch = {name for name, operation in asdict(kernels).items() if ".native." not in operation.__module__}
    assert in_torch == {"sample", "logprobs", "apply_penalties"}
    assert kernels.sample is sampling_cpu.sample


def test_float16_gets_torch_operators() -> None:
    assert kernels_for(CPU, F16) is torch_kernels()


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_a_cpu_without_a_compiler_gets_torch_operators(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "native_library", lambda: None)
    assert kernels_for(CPU, dtype) is torch_kernels()


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device: expected cpu or cuda, got meta"):
        kernels_for(torch.device("meta"), F32)


def test_the_cpu_path_does_not_import_triton() -> None:
    program = (
        "import sys, torch\n"
        "before = 'triton' in sys.modules\n"
        "from weft.kernels.dispatch import kernels_for\n"
        "kernels_for(torch.device('cpu'), torch.float32)\n"
        "kernels_for(torch.device('cpu'), torch.float16)\n"
        "sys.exit('triton' in sys.modules and not before)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False, timeout=120).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_cuda_gets_triton(dtype: torch.dtype) -> None:
    from weft.kernels.triton import sgmv as sgmv_triton

    assert kernels_for(torch.device("cuda"), dtype).sgmv is sgmv_triton.sgmv
