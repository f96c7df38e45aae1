"""The contract of norms and the gate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from implementations import BF16, F32, Implementation, num_threads
from numerics import assert_rows_close, assert_rows_match, turned
from oracles import ORACLES

SIZES = pytest.mark.parametrize("size", [2, 7, 16, 24, 100, 896, 2050, 14336])
GATES = (0.0, -0.0, 1.0, -1.0, 20.0, -20.0, 88.0, -88.0, 104.0, -104.0, 200.0, -200.0, 3e38, -3e38)
NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
NAN = torch.full((1, 32), -1, dtype=torch.int32).view(F32)
"""With all bits set: an instruction makes another NaN, 0x7FC00000."""


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [24, 2050])
def test_rows_of_tokens_are_those_of_the_table(
    size: int, integers: torch.dtype, impl: Implementation, dtype: torch.dtype
) -> None:
    table = impl.randn((50, 2 * size), dtype)[:, :size]
    known = torch.tensor([0, 49, 7, 7], dtype=integers, device=impl.device)
    assert torch.equal(impl.kernels.embed(known, None, table), table[known.long()])
    mixed = torch.tensor([[-3, 49, -1, -2, -4, 0]] * 2, dtype=integers, device=impl.device)[1]
    sampled = torch.tensor([5, -1, 49, -2, 8], dtype=torch.int32, device=impl.device)
    right = torch.tensor([49, 49, 5, 0, 0, 0], device=impl.device)
    assert torch.equal(impl.kernels.embed(mixed, sampled, table), table[right])
    assert impl.kernels.embed(known[:0], sampled, table).shape == (0, size)


@SIZES
def test_norms_equal_the_oracle_and_leave_their_inputs(
    size: int, impl: Implementation, dtype: torch.dtype
) -> None:
    x, residual, weight = (
        impl.randn(shape, dtype, seed) for seed, shape in enumerate(((5, size), (5, size), (size,)))
    )
    before = x.clone(), residual.clone()
    assert_rows_close(impl.kernels.rms_norm(x, weight, 1e-6), ORACLES.rms_norm(x, weight, 1e-6))
    heads = impl.randn((3, 6, size), dtype)[:, 1::2]  # of a fused projection
    assert_rows_close(
        impl.kernels.rms_norm(heads, weight, 1e-6), ORACLES.rms_norm(heads, weight, 1e-6)
    )
    normed, stream = impl.kernels.fused_add_rms_norm(x, residual, weight, 1e-6)
    if impl.is_interpreted:
        assert_rows_close(stream, x + residual)
    else:
        assert torch.equal(stream, x + residual)
    assert_rows_close(normed, ORACLES.rms_norm(stream, weight, 1e-6))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_norms_remember_nothing(impl: Implementation) -> None:
    x, weight = impl.randn((2, 32)), impl.randn((32,), seed=1)
    impl.kernels.fused_add_rms_norm(x, x, weight, 1e-6)
    x.zero_()
    normed, stream = impl.kernels.fused_add_rms_norm(x, x, weight, 1e-6)
    assert not normed.any()
    assert not stream.any()


def test_norms_give_the_numbers_of_transformers(impl: Implementation, dtype: torch.dtype) -> None:
    x, weight = impl.randn((16, 896), dtype), impl.randn((896,), dtype, 1)
    module = LlamaRMSNorm(896, eps=1e-5).to(dtype).to(impl.device)
    module.weight.data.copy_(weight)
    rtol, atol = (1e-6, 1e-6) if dtype == F32 else (2**-6, 1e-3)
    torch.testing.assert_close(
        impl.kernels.rms_norm(x, weight, 1e-5), module(x).detach(), rtol=rtol, atol=atol
    )


def test_a_row_that_is_not_finite_stays_alone(impl: Implementation) -> None:
    x, weight = impl.randn((5, 100)), impl.randn((100,), seed=1)
    clean = impl.kernels.rms_norm(x, weight, 1e-6)
    x[2, 50] = float("nan")
    out = impl.kernels.rms_norm(x, weight, 1e-6)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (3, 24), (2, 1024), (2, 2049), (2, 14336), (0, 16)]
)
def test_silu_and_mul_equals_the_oracle(
    rows: int, width: int, impl: Implementation, dtype: torch.dtype
) -> None:
    gate_up = impl.randn((rows, 2 * width), dtype) * 4
    before = gate_up.clone()
    assert_rows_close(impl.kernels.silu_and_mul(gate_up), ORACLES.silu_and_mul(gate_up))
    assert torch.equal(gate_up, before)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_large_gates_let_all_through_or_nothing(impl: Implementation, dtype: torch.dtype) -> None:
    gates = torch.tensor([*GATES, *NOT_FINITE])[:, None].expand(-1, 21)
    values = torch.cat((torch.linspace(-3, 3, 20), torch.tensor([float("nan")])))
    gate_up = torch.cat((gates, values.expand(len(gates), -1)), 1).to(dtype).to(impl.device)
    assert_rows_match(impl.kernels.silu_and_mul(gate_up), ORACLES.silu_and_mul(gate_up))


@pytest.mark.parametrize("distance", [0, 1, 5000, 20000])
def test_sums_are_rounded_to_the_nearest_bfloat16(distance: int, impl: Implementation) -> None:
    if impl.is_interpreted:
        return  # its stores truncate
    every = torch.arange(2**16).to(torch.int16).view(BF16).view(256, 256).to(impl.device)
    other = every.view(-1).roll(distance).view(256, 256)
    _, stream = impl.kernels.fused_add_rms_norm(every, other, torch.ones_like(every[0]), 1e-6)
    # Instructions for bfloat16 take numbers below the smallest normal one for zero.
    smallest = torch.finfo(BF16).tiny
    torch.testing.assert_close(stream, every + other, rtol=0, atol=smallest, equal_nan=True)


def test_a_nan_of_any_bits_stays_one(impl: Implementation) -> None:
    assert impl.kernels.silu_and_mul(NAN.to(impl.device)).isnan().all()


def test_results_have_the_same_bits_alone_and_with_more_threads(
    impl: Implementation, dtype: torch.dtype
) -> None:
    if not impl.is_bitwise:
        return
    x, weight, gate_up = (impl.randn(shape, dtype) for shape in ((100, 896), (896,), (100, 1792)))
    normed, gated = impl.kernels.rms_norm(x, weight, 1e-6), impl.kernels.silu_and_mul(gate_up)
    for row in range(100):
        assert torch.equal(impl.kernels.rms_norm(x[row : row + 1], weight, 1e-6)[0], normed[row])
        assert torch.equal(impl.kernels.silu_and_mul(gate_up[row : row + 1])[0], gated[row])
    with num_threads(2):
        assert torch.equal(impl.kernels.rms_norm(x, weight, 1e-6), normed)
        assert torch.equal(impl.kernels.silu_and_mul(gate_up), gated)


X, ONES = torch.randn((3, 128)), torch.ones(128)
TOKENS = torch.tensor([2, 1])
MISFITS: list[tuple[str, Callable[[], tuple[Any, ...]], str]] = [
    (
        "embed",
        lambda: (TOKENS.short(), None, X),
        r"tokens: expected dtype int32 or int64, got torch\.int16",
    ),
    (
        "embed",
        lambda: (TOKENS.repeat(2)[::2], None, X),
        r"tokens: expected consecutive elements, got \(2,\)",
    ),
    (
        "embed",
        lambda: (TOKENS, TOKENS, X),
        r"sampled: expected dtype torch\.int32, got torch\.int64",
    ),
    (
        "embed",
        lambda: (TOKENS, TOKENS.int().repeat(2)[::2], X),
        "sampled: expected consecutive elements, got",
    ),
    ("embed", lambda: (TOKENS, None, turned(X)), "table: expected consecutive elements, got"),
    ("rms_norm", lambda: (X, ONES[1:], 1e-6), r"weight: expected shape \[128\], got \[127\]"),
    (
        "rms_norm",
        lambda: (X, ONES.bfloat16(), 1e-6),
        r"weight: expected dtype torch\.float32, got torch\.bfloat16",
    ),
    (
        "rms_norm",
        lambda: (X, torch.ones(256)[::2], 1e-6),
        r"weight: expected consecutive elements, got \(2,\)",
    ),
    (
        "rms_norm",
        lambda: (turned(X), ONES, 1e-6),
        r"x: expected consecutive elements, got \(1, 3\)",
    ),
    (
        "rms_norm",
        lambda: (X[None, None], ONES, 1e-6),
        r"x: expected two or three dimensions, got \[1, 1, 3, 128\]",
    ),
    (
        "fused_add_rms_norm",
        lambda: (X, X, ONES[1:], 1e-6),
        r"x: expected shape \[any, 127\], got \[3, 128\]",
    ),
    (
        "fused_add_rms_norm",
        lambda: (X, X[1:], ONES, 1e-6),
        r"residual: expected shape \[3, 128\], got \[2, 128\]",
    ),
    (
        "fused_add_rms_norm",
        lambda: (X, X.bfloat16(), ONES, 1e-6),
        r"residual: expected dtype torch\.float32, got",
    ),
    (
        "fused_add_rms_norm",
        lambda: (X, X, torch.ones(256)[::2], 1e-6),
        "weight: expected consecutive elements",
    ),
    (
        "fused_add_rms_norm",
        lambda: (turned(X), X, ONES, 1e-6),
        r"x: expected contiguous rows, got \(1, 3\)",
    ),
    (
        "fused_add_rms_norm",
        lambda: (X, turned(X), ONES, 1e-6),
        r"residual: expected contiguous rows, got \(1, 3\)",
    ),
    (
        "silu_and_mul",
        lambda: (X[:, 1:],),
        r"gate_up: expected two dimensions, the second even, got \[3, 127\]",
    ),
    ("silu_and_mul", lambda: (X[:, 2:],), r"gate_up: expected contiguous rows, got \(128, 1\)"),
    (
        "silu_and_mul",
        lambda: (X[None],),
        r"gate_up: expected two dimensions, the second even, got \[1, 3, 128\]",
    ),
]


@pytest.mark.parametrize(("name", "operands", "expected"), MISFITS)
def test_misfits_are_refused(
    name: str, operands: Callable[[], tuple[Any, ...]], expected: str, impl: Implementation
) -> None:
    with pytest.raises(ValueError, match=expected):
        getattr(impl.kernels, name)(*operands())
