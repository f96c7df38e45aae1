"""Norm, rope, the gate, KV write and sampling, which work row by row."""

import pytest
import torch

from kernel_numerics import assert_rows_close, assert_rows_match
from oracles import reference_kernels
from oracles.sampling_reference import probabilities
from sampling_rows import GREEDY, Parameters, sampling_of
from silu_rows import extreme_gates
from weft.kernels.dispatch import triton_kernels
from weft.kernels.kv_slots import KvSlots
from weft.kernels.plain.rows import both_halves

pytestmark = pytest.mark.usefixtures("poisoned_memory")
TRITON, REFERENCE = triton_kernels(), reference_kernels()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 896), (5, 128), (3, 2049), (4, 3, 64)], ids=str)
def test_rms_norm_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(shape, dtype), randn(shape[-1:], dtype, 1)
    assert_rows_close(TRITON.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


def test_rms_norm_takes_heads_of_a_fused_projection() -> None:
    heads, weight = randn((4, 6, 64), torch.float32)[:, 1:4], randn((64,), torch.float32, 1)
    assert_rows_close(TRITON.rms_norm(heads, weight, 1e-6), REFERENCE.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_add_rms_norm_equals_the_reference(dtype: torch.dtype) -> None:
    x, residual, weight = randn((5, 896), dtype), randn((5, 896), dtype, 1), randn((896,), dtype, 2)
    normed, stream = TRITON.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert_rows_close(stream, x + residual)
    assert_rows_close(normed, REFERENCE.rms_norm(stream, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 48])
def test_rope_equals_the_reference(dtype: torch.dtype, head_dim: int) -> None:
    angles = torch.tensor([0.0, 39.0, 7.0])[:, None] * torch.logspace(0, -3, head_dim // 2)
    cos, sin = both_halves(angles.cos(), angles.sin())
    fused = randn((3, 21, head_dim), dtype)
    expected = fused.clone()
    REFERENCE.rope(expected[:, :17], expected[:, 18:20], cos, sin)
    TRITON.rope(fused[:, :17], fused[:, 18:20], cos, sin)
    assert_rows_close(fused, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 1024, 2049])
def test_silu_and_mul_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    gate_up = randn((3, 2 * width), dtype) * 4
    assert_rows_close(TRITON.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_gates_let_all_through_or_nothing(dtype: torch.dtype) -> None:
    gate_up = extreme_gates(dtype)
    assert_rows_match(TRITON.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_write_stores_exact_bits(dtype: torch.dtype) -> None:
    slots = KvSlots.build([35, -1, 16, 17, 79], 16, torch.device("cpu"))
    fused = randn((5, 9, 24), dtype)
    expected = torch.full((6, 2, 2, 3, 16, 24), float("nan"), dtype=dtype)
    actual = expected.clone()
    TRITON.kv_write(fused[:, 3:6], fused[:, 6:], actual[:, 1, 0], actual[:, 1, 1], slots)
    REFERENCE.kv_write(fused[:, 3:6], fused[:, 6:], expected[:, 1, 0], expected[:, 1, 1], slots)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(actual.view(bits), expected.view(bits))


@pytest.mark.parametrize(
    "parameters",
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 1, 1.0, 0.0),
        (1.3, 20, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.8, 40, 0.9, 0.05),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [37, 1000])
def test_draws_follow_the_exact_distribution(parameters: Parameters, vocab_size: int) -> None:
    logits = randn((1, vocab_size), torch.float32).expand(6, -1)
    uniforms = [0.0, 0.2, 0.4, 0.6, 0.8, 1 - 2**-24]
    sampling = sampling_of([(parameters, uniform) for uniform in uniforms])
    tokens = TRITON.sample(logits, sampling)
    p = probabilities(logits[0], *parameters)
    ends = p.cumsum(0)[tokens]
    u = torch.tensor(uniforms, dtype=torch.float64)
    assert (p[tokens] > 0).all()
    assert (u < ends + 2e-6).all()
    assert (u > ends - p[tokens] - 2e-6).all()


def test_greedy_rows_take_the_first_of_equals_beside_rows_that_draw() -> None:
    logits = torch.randint(-2, 2, (4, 5000), generator=torch.Generator().manual_seed(0)).float()
    logits[3] = -torch.inf
    sampling = sampling_of([(GREEDY, 0.5), (GREEDY, 0.5), ((1.0, 0, 1.0, 0.0), 0.5), (GREEDY, 0.5)])
    tokens = TRITON.sample(logits, sampling)
    assert tokens[[0, 1, 3]].tolist() == logits[[0, 1, 3]].argmax(-1).tolist()
    assert tokens.dtype == torch.int64


def test_logprobs_equal_the_reference() -> None:
    logits = randn((4, 1000), torch.float32)
    tokens = torch.tensor([0, 5, 999, int(logits[3].argmax())])
    for actual, expected in zip(TRITON.logprobs(logits, tokens, 4), REFERENCE.logprobs(logits, tokens, 4), strict=True):
        torch.testing.assert_close(actual, expected)
