import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from cpu_kernels import CPU_KERNELS, KERNELS_AND_DTYPES, needs_compiler
from kernel_numerics import assert_rows_close
from oracles import norm_reference
from weft.kernels.dispatch import Kernels
from weft.kernels.native import rows as rows_native

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SHAPES = [(1, 896), (33, 128), (5, 4, 64), (2, 2049), (3, 2, 24), (2, 7)]


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS_AND_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu_versions_equal_the_reference(shape: tuple[int, ...], kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight = randn(shape, dtype), randn(shape[-1:], dtype, 1)
    assert_rows_close(kernels.rms_norm(x, weight, 1e-6), norm_reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("kernels", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_are_those_of_transformers(dtype: torch.dtype, kernels: Kernels) -> None:
    x, weight = randn((16, 896), dtype), randn((896,), dtype, 1)
    module = LlamaRMSNorm(896, eps=1e-5).to(dtype)
    module.weight.data.copy_(weight)
    expected = module(x).detach()
    rtol, atol = (1e-6, 1e-6) if dtype == torch.float32 else (2**-7, 1e-3)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_strided_heads_of_a_fused_projection_are_accepted(kernels: Kernels) -> None:
    fused = randn((5, 8, 64), torch.float32)
    weight = randn((64,), torch.float32, 1)
    assert_rows_close(
        kernels.rms_norm(fused[:, 2:6], weight, 1e-6), norm_reference.rms_norm(fused[:, 2:6], weight, 1e-6)
    )


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS_AND_DTYPES)
def test_the_residual_is_added_first_and_inputs_stay(kernels: Kernels, dtype: torch.dtype) -> None:
    x, residual, weight = randn((7, 128), dtype), randn((7, 128), dtype, 1), randn((128,), dtype, 2)
    before = x.clone(), residual.clone()
    normed, stream = kernels.fused_add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_stream = norm_reference.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert_rows_close(normed, expected)
    assert torch.equal(stream, expected_stream)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_a_row_that_is_not_finite_stays_alone(kernels: Kernels) -> None:
    x, weight = randn((5, 100), torch.float32), randn((100,), torch.float32, 1)
    clean = kernels.rms_norm(x, weight, 1e-6)
    x[2, 50] = float("nan")
    out = kernels.rms_norm(x, weight, 1e-6)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_misfits_are_refused(kernels: Kernels) -> None:
    x = randn((3, 128), torch.float32)
    with pytest.raises(ValueError, match=r"weight: expected shape \[128\], got \[64\]"):
        kernels.rms_norm(x, torch.ones(64), 1e-6)
    with pytest.raises(ValueError, match=r"residual: expected shape \[3, 128\], got \[2, 128\]"):
        kernels.fused_add_rms_norm(x, x[1:], torch.ones(128), 1e-6)


@needs_compiler
def test_native_kernels_refuse_what_they_cannot_read() -> None:
    x, weight = randn((3, 128), torch.float32), torch.ones(128)
    with pytest.raises(ValueError, match=r"x: expected consecutive elements, got \(1, 3\)"):
        rows_native.rms_norm(x.T.contiguous().T, weight, 1e-6)
    with pytest.raises(ValueError, match=r"weight: expected dtype torch\.float32, got torch\.bfloat16"):
        rows_native.rms_norm(x, weight.bfloat16(), 1e-6)
    with pytest.raises(ValueError, match=r"expected one of torch\.float32, torch\.bfloat16, got torch\.float16"):
        rows_native.rms_norm(x.half(), weight.half(), 1e-6)


@needs_compiler
def test_the_native_sum_refuses_what_it_cannot_read() -> None:
    x, weight = randn((3, 128), torch.float32), torch.ones(128)
    with pytest.raises(ValueError, match=r"x: expected contiguous rows, got \(256, 1\)"):
        rows_native.fused_add_rms_norm(randn((3, 256), torch.float32)[:, :128], x, weight, 1e-6)
    with pytest.raises(ValueError, match=r"residual: expected dtype torch\.float32, got torch\.bfloat16"):
        rows_native.fused_add_rms_norm(x, x.bfloat16(), weight, 1e-6)
    with pytest.raises(ValueError, match=r"expected one of torch\.float32, torch\.bfloat16, got torch\.float16"):
        rows_native.fused_add_rms_norm(x.half(), x.half(), weight.half(), 1e-6)


@needs_compiler
def test_a_strided_residual_is_refused_by_its_own_name() -> None:
    x, weight = randn((3, 128), torch.float32), torch.ones(128)
    with pytest.raises(ValueError, match=r"residual: expected contiguous rows, got \(256, 1\)"):
        rows_native.fused_add_rms_norm(x, randn((3, 256), torch.float32)[:, :128], weight, 1e-6)


@needs_compiler
def test_a_weight_with_gaps_is_refused() -> None:
    x, weight = randn((3, 128), torch.float32), torch.ones(256)[::2]
    with pytest.raises(ValueError, match=r"weight: expected consecutive elements, got \(2,\)"):
        rows_native.rms_norm(x, weight, 1e-6)
    with pytest.raises(ValueError, match=r"weight: expected consecutive elements, got \(2,\)"):
        rows_native.fused_add_rms_norm(x, x, weight, 1e-6)


@needs_compiler
def test_more_dimensions_than_three_are_refused() -> None:
    # The second of four dimensions looks like the size of a vector.
    with pytest.raises(ValueError, match=r"x: expected two or three dimensions, got \[2, 8, 3, 4\]"):
        rows_native.rms_norm(randn((2, 8, 3, 4), torch.float32), torch.ones(8), 1e-6)
