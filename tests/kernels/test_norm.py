import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernel_numerics import assert_rows_close
from weft.kernels import norm_cpu, norm_reference

SHAPES = [(1, 896), (33, 128), (5, 4, 64), (2, 2049)]


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu_version_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(shape, dtype), randn(shape[-1:], dtype, 1)
    assert_rows_close(norm_cpu.rms_norm(x, weight, 1e-6), norm_reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_are_those_of_transformers(dtype: torch.dtype) -> None:
    x, weight = randn((16, 896), dtype), randn((896,), dtype, 1)
    module = LlamaRMSNorm(896, eps=1e-5).to(dtype)
    module.weight.data.copy_(weight)
    expected = module(x).detach()
    rtol, atol = (1e-6, 1e-6) if dtype == torch.float32 else (2**-7, 1e-3)
    torch.testing.assert_close(norm_cpu.rms_norm(x, weight, 1e-5), expected, rtol=rtol, atol=atol)


def test_strided_heads_of_a_fused_projection_are_accepted() -> None:
    fused = randn((5, 8, 64), torch.float32)
    weight = randn((64,), torch.float32, 1)
    assert_rows_close(
        norm_cpu.rms_norm(fused[:, 2:6], weight, 1e-6), norm_reference.rms_norm(fused[:, 2:6], weight, 1e-6)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_residual_is_added_first_and_inputs_stay(dtype: torch.dtype) -> None:
    x, residual, weight = randn((7, 128), dtype), randn((7, 128), dtype, 1), randn((128,), dtype, 2)
    before = x.clone(), residual.clone()
    normed, stream = norm_cpu.fused_add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_stream = norm_reference.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert_rows_close(normed, expected)
    assert torch.equal(stream, expected_stream)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_misfits_are_refused() -> None:
    x = randn((3, 128), torch.float32)
    with pytest.raises(ValueError, match=r"weight: expected shape \[128\], got \[64\]"):
        norm_cpu.rms_norm(x, torch.ones(64), 1e-6)
    with pytest.raises(ValueError, match=r"residual: expected shape \[3, 128\], got \[2, 128\]"):
        norm_cpu.fused_add_rms_norm(x, x[1:], torch.ones(128), 1e-6)
