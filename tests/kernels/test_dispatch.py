import subprocess
import sys

import pytest
import torch

from weft.kernels import attention_cpu, sampling_cpu
from weft.kernels.dispatch import kernels_for


def test_the_cpu_gets_torch_operators() -> None:
    kernels = kernels_for(torch.device("cpu"))
    assert kernels.paged_attention is attention_cpu.paged_attention
    assert kernels.sample is sampling_cpu.sample
    assert kernels_for(torch.device("cpu")) is kernels


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device: expected cpu or cuda, got meta"):
        kernels_for(torch.device("meta"))


def test_the_cpu_path_does_not_import_triton() -> None:
    program = (
        "import sys, torch\n"
        "before = 'triton' in sys.modules\n"
        "from weft.kernels.dispatch import kernels_for\n"
        "kernels_for(torch.device('cpu'))\n"
        "sys.exit('triton' in sys.modules and not before)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False, timeout=120).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gets_triton() -> None:
    from weft.kernels import sgmv_triton

    assert kernels_for(torch.device("cuda")).sgmv is sgmv_triton.sgmv
