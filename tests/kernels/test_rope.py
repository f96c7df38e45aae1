import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cpu_kernels import CPU_KERNELS, KERNELS_AND_DTYPES, needs_compiler
from kernel_numerics import assert_rows_close
from oracles import rope_reference
from weft.kernels.dispatch import Kernels
from weft.kernels.native import rows as rows_native
from weft.kernels.plain import rows as rows_cpu

HEAD_DIM = 32
ANGLES = torch.arange(50.0)[:, None] * 10000 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
POSITIONS = torch.tensor([0, 7, 49, 7, 3])
COS, SIN = rows_cpu.both_halves(ANGLES.cos()[POSITIONS], ANGLES.sin()[POSITIONS])


def fused_projection(dtype: torch.dtype = torch.float32, head_dim: int = HEAD_DIM) -> torch.Tensor:
    return torch.randn(len(POSITIONS), 8, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS_AND_DTYPES)
@pytest.mark.parametrize("joined", [True, False], ids=["neighbours", "apart"])
def test_cpu_versions_equal_the_reference(joined: bool, kernels: Kernels, dtype: torch.dtype) -> None:
    fused = fused_projection(dtype)
    expected = fused.clone()
    k_heads = slice(4, 6) if joined else slice(5, 7)
    kernels.rope(fused[:, :4], fused[:, k_heads], COS, SIN)
    rope_reference.rope(expected[:, :4], expected[:, k_heads], COS, SIN)
    assert_rows_close(fused, expected)
    others = [head for head in range(4, 8) if head not in range(k_heads.start, k_heads.stop)]
    assert torch.equal(fused[:, others], fused_projection(dtype)[:, others])


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS_AND_DTYPES)
@pytest.mark.parametrize("head_dim", [2, 24, 48, 80, 128])
def test_heads_of_any_size_are_rotated(head_dim: int, kernels: Kernels, dtype: torch.dtype) -> None:
    angles = POSITIONS[:, None] * 10000 ** -(torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = rows_cpu.both_halves(angles.cos(), angles.sin())
    fused = fused_projection(dtype, head_dim)
    expected = fused.clone()
    kernels.rope(fused[:, 1:6], fused[:, 6:], cos, sin)
    rope_reference.rope(expected[:, 1:6], expected[:, 6:], cos, sin)
    assert_rows_close(fused, expected)
    assert torch.equal(fused[:, 0], fused_projection(dtype, head_dim)[:, 0])


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_separate_tensors_are_rotated_too(kernels: Kernels) -> None:
    q, k = fused_projection()[:, :4].clone(), fused_projection()[:, 4:6].clone()
    expected_q, expected_k = q.clone(), k.clone()
    kernels.rope(q, k, COS, SIN)
    rope_reference.rope(expected_q, expected_k, COS, SIN)
    assert_rows_close(q, expected_q)
    assert_rows_close(k, expected_k)


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_the_rotation_is_that_of_transformers(kernels: Kernels) -> None:
    fused = fused_projection()
    q, k = fused[:, :4].clone(), fused[:, 4:6].clone()
    cos, sin = (torch.cat((table, table), -1)[POSITIONS][None] for table in (ANGLES.cos(), ANGLES.sin()))
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    kernels.rope(q, k, COS, SIN)
    assert_rows_close(q, expected[0][0].transpose(0, 1).contiguous())
    assert_rows_close(k, expected[1][0].transpose(0, 1).contiguous())


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_misfits_are_refused(kernels: Kernels) -> None:
    fused = fused_projection()
    with pytest.raises(ValueError, match=r"cos: expected shape \[5, 32\], got \[4, 32\]"):
        kernels.rope(fused[:, :4], fused[:, 4:6], COS[1:], SIN[1:])
    with pytest.raises(ValueError, match=r"k: expected dtype torch\.float32, got torch\.bfloat16"):
        kernels.rope(fused[:, :4], fused[:, 4:6].bfloat16(), COS, SIN)
    with pytest.raises(ValueError, match=r"sin: expected dtype torch\.float32, got torch\.float64"):
        kernels.rope(fused[:, :4], fused[:, 4:6], COS, SIN.double())


@needs_compiler
def test_native_kernels_refuse_what_they_cannot_read() -> None:
    fused = fused_projection()
    turned = fused.transpose(1, 2).contiguous().transpose(1, 2)
    q, k = fused[:, :4], fused[:, 4:6]
    for operands in ((turned[:, :4], k), (q, turned[:, 4:6])):
        with pytest.raises(ValueError, match="expected consecutive elements, got"):
            rows_native.rope(*operands, COS, SIN)
    for tables in ((COS.repeat(1, 2)[:, :HEAD_DIM], SIN), (COS, SIN.repeat(1, 2)[:, :HEAD_DIM])):
        with pytest.raises(ValueError, match="expected contiguous rows, got"):
            rows_native.rope(q, k, *tables)
    with pytest.raises(ValueError, match=r"expected one of torch\.float32, torch\.bfloat16, got torch\.float16"):
        rows_native.rope(q.half(), k.half(), COS, SIN)
    assert torch.equal(fused, fused_projection())
