"""Attention with all that a layer does before it, in one operation and composed of the single ones."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from implementations import (
    BF16,
    F32,
    INTERPRETS,
    NATIVE,
    TORCH,
    TRITON,
    Implementation,
    needs_compiler,
)
from manylora.kernels.attend import HeadNorms
from manylora.kernels.dispatch import native_kernels
from numerics import assert_rows_close, bits
from oracles import ORACLES
from projected import Projected
from scattered_kv import AttentionCase, odd_vectors

IMPLEMENTATIONS = [TRITON] if INTERPRETS else [TORCH, *NATIVE, TRITON]
REQUESTS = ((1, 40), (20, 20), (3, 70), (1, 1), (130, 131), (1, 0))
CASES = [
    AttentionCase(REQUESTS, *sizes, 16, dtype, window, padding_rows=2)
    for sizes in ((4, 2, 24), (7, 1, 64), (3, 3, 80), (2, 2, 16), (6, 2, 128))
    for dtype in (F32, BF16)
    for window in (None, 30)
]
FEW = [
    AttentionCase(
        ((1, 40), (5, 20), (3, 21), (10, 12), (1, 0)), *sizes, 16, dtype, window, padding_rows=2
    )
    for sizes, dtype, window in (
        ((4, 2, 24), F32, None),
        ((7, 1, 64), BF16, 30),
        ((3, 3, 80), F32, 30),
    )
]
with_and_without_norms = pytest.mark.parametrize(
    "has_norms", [False, True], ids=["plain", "normed heads"]
)


def cases(impl: Implementation) -> list[AttentionCase]:
    """What an implementation is compared with the oracle for."""
    return FEW if impl.is_interpreted else CASES


@with_and_without_norms
def test_it_gives_the_numbers_of_the_oracle_and_changes_nothing_but_its_slots(
    has_norms: bool, impl: Implementation, case: AttentionCase
) -> None:
    projected = Projected(case, has_norms, impl.device)
    out, arena = projected.call(impl.kernels)
    assert not torch.equal(bits(arena), bits(projected.arena))
    assert out[:-3].any(-1).all()
    assert not out[-3:].any()  # a request without context and padding
    expected, expected_arena = projected.call(ORACLES)
    assert torch.equal(bits(arena[:, :, 1]), bits(expected_arena[:, :, 1])), (
        "values are stored as they are"
    )
    # Each operation rounds to a narrow dtype.
    assert_rows_close(out, expected, 0.5 if case.dtype == F32 else 4)
    assert torch.equal(arena.isnan(), expected_arena.isnan())
    assert_rows_close(
        arena.nan_to_num(), expected_arena.nan_to_num(), 0.5 if case.dtype == F32 else 2
    )


@pytest.mark.parametrize("window", [None, 30])
def test_it_gives_the_numbers_of_the_oracle_with_int8(
    window: int | None, impl: Implementation, dtype: torch.dtype
) -> None:
    requests = FEW[0].requests if impl.is_interpreted else REQUESTS
    case = AttentionCase(requests, 7, 1, 80, 16, dtype, window, padding_rows=2, is_int8=True)
    projected = Projected(case, device=impl.device)
    out, arena, scales = projected.call_with_scales(impl.kernels)
    expected, expected_arena, expected_scales = projected.call_with_scales(ORACLES)
    assert torch.equal(bits(scales[:, :, 1]), bits(expected_scales[:, :, 1]))
    assert torch.equal(arena[:, :, 1], expected_arena[:, :, 1])
    assert (arena.int() - expected_arena.int()).abs().max() <= 2, (
        "keys are rounded after they are normed and rotated"
    )
    assert_rows_close(
        out, expected, 500 if dtype == F32 else 8
    )  # a key may be rounded to the next step


@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
def test_a_layer_stores_what_the_definition_says(
    head_dim: int, impl: Implementation, dtype: torch.dtype
) -> None:
    case = AttentionCase(
        ((20, 20), (3, 70), (1, 1), (1, 0)), 6, 2, head_dim, 16, dtype, padding_rows=1, is_int8=True
    )
    projected = Projected(case, False, impl.device)
    projected.cos, projected.sin = (
        torch.ones_like(projected.cos),
        torch.zeros_like(projected.sin),
    )  # keys as they are
    x = odd_vectors(dtype).repeat(1, 2)[:, :head_dim]
    projected.qkv.view(26, -1, head_dim)[:14, 8:] = x[:, None]
    projected.qkv.view(26, -1, head_dim)[:14, 6:8] = x.flip(0)[:, None]
    _, arena, scales = projected.call_with_scales(impl.kernels)
    _, expected, expected_scales = projected.call_with_scales(ORACLES)
    assert torch.equal(arena, expected)
    assert torch.equal(scales.isnan(), expected_scales.isnan())
    assert torch.equal(scales.nan_to_num(), expected_scales.nan_to_num())
    assert not torch.equal(arena, projected.arena)


@pytest.mark.parametrize("head_dim", [16, 32, 48])
def test_queries_and_keys_are_rotated_as_in_transformers(
    head_dim: int, impl: Implementation
) -> None:
    case = AttentionCase(((3, 20), (1, 40), (1, 1)), 4, 2, head_dim, 16, F32, padding_rows=1)
    projected = Projected(case, False, impl.device)
    angles = [
        torch.cat((table, table), -1)[projected.positions][None]
        for table in (projected.cos, projected.sin)
    ]
    heads = projected.qkv.view(6, 8, head_dim).transpose(0, 1)[None]
    rotated = apply_rotary_pos_emb(heads[:, :4], heads[:, 4:6], *angles)
    already = Projected(case, False, impl.device)
    already.qkv = torch.cat((*rotated, heads[:, 6:]), 1)[0].transpose(0, 1).flatten(1).contiguous()
    already.cos, already.sin = torch.ones_like(projected.cos), torch.zeros_like(projected.sin)
    for got, expected in zip(projected.call(impl.kernels), already.call(ORACLES), strict=True):
        assert_rows_close(got.nan_to_num(), expected.nan_to_num(), 0.5)


def test_values_of_any_bits_are_stored_as_they_are(
    impl: Implementation, dtype: torch.dtype
) -> None:
    case = AttentionCase(((3, 20), (1, 40), (1, 1)), 3, 3, 80, 16, dtype, padding_rows=1)
    projected = Projected(case, False, impl.device)
    integers = torch.int32 if dtype == F32 else torch.int16
    drawn = torch.randint(
        -(2**15), 2**15, (6, 3 * 80), generator=torch.Generator().manual_seed(0)
    ).to(integers)
    drawn[0, :80] = -1  # a NaN
    projected.qkv[:, 6 * 80 :] = drawn.view(dtype).to(impl.device)
    _, arena = projected.call(impl.kernels)
    _, expected = projected.call(ORACLES)
    assert torch.equal(bits(arena[:, :, 1]), bits(expected[:, :, 1]))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_key_or_value_that_is_not_finite_comes_out_of_the_rows_that_see_it(
    part: str, wrong: float, impl: Implementation, dtype: torch.dtype
) -> None:
    case = AttentionCase(((9, 40), (1, 30)), 4, 2, 64, 16, dtype, padding_rows=2, is_int8=True)
    projected = Projected(case, False, impl.device)
    assert projected.call(impl.kernels)[0].isfinite().all()
    head = 4 + 1 if part == "key" else 4 + 2 + 1  # the second of two heads
    projected.qkv.view(12, 8, 64)[3, head, 17] = wrong
    out = projected.call(impl.kernels)[0].view(12, 4, 64)
    assert out[3:9, 2:].isnan().all()
    assert out[:9, :2].isfinite().all()
    assert out[9:].isfinite().all()


def test_a_row_without_a_slot_leaves_the_pages_as_they_are(
    impl: Implementation, dtype: torch.dtype
) -> None:
    projected = Projected(
        AttentionCase(((3, 20), (2, 9)), 6, 2, 24, 16, dtype, padding_rows=12), device=impl.device
    )
    projected.slots[[0, 3]] = -1
    _, expected = projected.call(ORACLES)
    _, arena = projected.call(impl.kernels)
    assert torch.equal(arena.isnan(), expected.isnan())
    projected.slots.fill_(-1)
    _, arena = projected.call(impl.kernels)
    assert torch.equal(bits(arena), bits(projected.arena))


@needs_compiler
def test_layers_of_a_step_share_what_is_prepared() -> None:
    projected = Projected(CASES[0])
    first, _ = projected.call(native_kernels())
    kept = first.clone()
    projected.qkv *= -1
    second, _ = projected.call(native_kernels())
    assert second is first
    assert not torch.equal(second, kept)
    projected.qkv *= -1
    assert torch.equal(projected.call(native_kernels())[0], kept)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("qkv", lambda p: p.qkv[:, :-1], r"qkv: expected \[T, \(Hq \+ 4\) \* 24\], got"),
        ("qkv", lambda p: p.qkv[:, :96], r"qkv: expected \[T, \(Hq \+ 4\) \* 24\], got"),
        ("qkv", lambda p: p.qkv.T.contiguous().T, "qkv: expected contiguous rows, got"),
        ("qkv", lambda p: p.qkv[1:], r"cos: expected shape \[157, 24\], got \[158, 24\]"),
        (
            "arena",
            lambda p: p.arena.bfloat16(),
            r"k_pages: expected dtype torch\.float32, got torch\.bfloat16",
        ),
        (
            "norms",
            lambda p: replace(p.norms, k=p.norms.k[1:]),
            r"norms\.k: expected shape \[24\], got \[23\]",
        ),
        (
            "norms",
            lambda p: replace(p.norms, q=p.norms.q.double()),
            r"norms\.q: expected dtype torch\.float32",
        ),
        (
            "positions",
            lambda p: p.positions[1:],
            r"cos: expected shape \[158, 24\], got \[157, 24\]",
        ),
        (
            "cos",
            lambda p: p.cos.double(),
            r"cos: expected dtype torch\.float32, got torch\.float64",
        ),
        (
            "slots",
            lambda p: p.slots.int(),
            r"slot_mapping: expected dtype torch\.int64, got torch\.int32",
        ),
        (
            "norms",
            lambda _: HeadNorms(torch.ones(48)[::2], torch.ones(24), 1e-6),
            r"norms\.q: expected consecutive",
        ),
        ("slots", lambda _: torch.tensor([16]), r"slot_mapping: expected shape \[158\], got \[1\]"),
        ("window", lambda _: 0, "window: expected a positive number, got 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_misfits_are_refused(
    name: str, change: Callable[[Projected], object], expected: str
) -> None:
    projected = Projected(CASES[0])
    setattr(projected, name, change(projected))
    with pytest.raises(ValueError, match=expected):
        projected.call(native_kernels())


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("qkv", lambda p: p.qkv[:, :-1], r"qkv: expected \[T, \(Hq \+ 4\) \* 24\], got"),
        (
            "norms",
            lambda p: replace(p.norms, k=p.norms.k[1:]),
            r"norms\.k: expected shape \[24\], got \[23\]",
        ),
        ("positions", lambda p: p.positions[1:], r"positions: expected shape \[158\], got \[157\]"),
        (
            "positions",
            lambda p: p.positions.short(),
            r"positions: expected dtype int32 or int64, got torch\.int16",
        ),
        (
            "positions",
            lambda p: p.positions.repeat(2)[::2],
            "positions: expected consecutive elements, got",
        ),
        ("cos", lambda p: p.cos[:, 1:], r"cos: expected shape \[any, 12\], got \[161, 11\]"),
        (
            "sin",
            lambda p: p.sin.double(),
            r"sin: expected dtype torch\.float32, got torch\.float64",
        ),
        ("sin", lambda p: p.sin.T.contiguous().T, "sin: expected contiguous rows, got"),
        (
            "slots",
            lambda p: p.slots.short(),
            r"slot_mapping: expected dtype int32 or int64, got torch\.int16",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_triton_refuses_misfits(
    name: str, change: Callable[[Projected], object], expected: str
) -> None:
    pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
    projected = Projected(CASES[0])
    setattr(projected, name, change(projected))
    with pytest.raises(ValueError, match=expected):
        projected.call(TRITON.make())
