import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernel_numerics import assert_rows_close
from weft.kernels import rope_cpu, rope_reference

HEAD_DIM = 32
ANGLES = torch.arange(50.0)[:, None] * 10000 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
POSITIONS = torch.tensor([0, 7, 49, 7, 3])
COS, SIN = rope_reference.both_halves(ANGLES.cos()[POSITIONS], ANGLES.sin()[POSITIONS])


def fused_projection(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(len(POSITIONS), 8, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("joined", [True, False], ids=["neighbours", "apart"])
def test_cpu_version_equals_the_reference(dtype: torch.dtype, joined: bool) -> None:
    fused = fused_projection(dtype)
    expected = fused.clone()
    k_heads = slice(4, 6) if joined else slice(5, 7)
    rope_cpu.rope(fused[:, :4], fused[:, k_heads], COS, SIN)
    rope_reference.rope(expected[:, :4], expected[:, k_heads], COS, SIN)
    assert_rows_close(fused, expected)
    others = [head for head in range(4, 8) if head not in range(k_heads.start, k_heads.stop)]
    assert torch.equal(fused[:, others], fused_projection(dtype)[:, others])


def test_separate_tensors_are_rotated_too() -> None:
    q, k = fused_projection()[:, :4].clone(), fused_projection()[:, 4:6].clone()
    expected_q, expected_k = q.clone(), k.clone()
    rope_cpu.rope(q, k, COS, SIN)
    rope_reference.rope(expected_q, expected_k, COS, SIN)
    assert_rows_close(q, expected_q)
    assert_rows_close(k, expected_k)


def test_the_rotation_is_that_of_transformers() -> None:
    fused = fused_projection()
    q, k = fused[:, :4].clone(), fused[:, 4:6].clone()
    cos, sin = (torch.cat((table, table), -1)[POSITIONS][None] for table in (ANGLES.cos(), ANGLES.sin()))
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rope_cpu.rope(q, k, COS, SIN)
    assert_rows_close(q, expected[0][0].transpose(0, 1).contiguous())
    assert_rows_close(k, expected[1][0].transpose(0, 1).contiguous())


def test_misfits_are_refused() -> None:
    fused = fused_projection()
    with pytest.raises(ValueError, match=r"cos: expected shape \[5, 32\], got \[4, 32\]"):
        rope_cpu.rope(fused[:, :4], fused[:, 4:6], COS[1:], SIN[1:])
