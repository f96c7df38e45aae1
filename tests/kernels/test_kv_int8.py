"""Keys and values in 8 bits: what is stored, what attention makes of it, and what is not finite."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from implementations import BF16, F16, F32, Implementation
from manylora.kernels.kv_layer import dequantise, quantise
from manylora.kernels.native.attention import TASK_ROWS
from numerics import assert_rows_close, bits, turned
from oracles import ORACLES, int8_vector
from scattered_kv import DECODE, MIXED, AttentionCase, ScatteredKv, odd_vectors

NAN = float("nan")
AROUND_BLOCKS = (
    (1, 63),
    (1, 64),
    (1, 65),
    (1, 130),
    (63, 63),
    (3, 66),
    (1, 0),
    (65, 130),
    (2, 0),
    (64, 128),
)
LONG = ((TASK_ROWS + 5, TASK_ROWS + 90), (1, 700), (1, 257))
FEW = [
    AttentionCase(DECODE, 14, 2, 64, 128, BF16, is_int8=True),
    AttentionCase(MIXED, 6, 2, 24, 16, F32, 20, padding_rows=2, is_int8=True),
    AttentionCase(((1, 600), (9, 90)), 7, 1, 80, 32, BF16, is_int8=True),
]
CASES = [
    *FEW,
    *(
        AttentionCase(
            requests, *heads, head_dim, page_tokens, dtype, window, padding_rows=3, is_int8=True
        )
        for requests, window in ((AROUND_BLOCKS, None), (MIXED, 37), (LONG, 100))
        for heads, head_dim, page_tokens in (
            ((2, 2), 16, 64),
            ((6, 2), 24, 32),
            ((7, 1), 64, 128),
            ((16, 2), 80, 16),
            ((4, 4), 128, 16),
        )
        for dtype in (F32, BF16, F16)
    ),
]


def cases(impl: Implementation) -> list[AttentionCase]:
    """What an implementation is compared with the oracle for."""
    return FEW if impl.is_interpreted else CASES


@functools.cache
def operands_and_expected(
    case: AttentionCase, device: torch.device
) -> tuple[ScatteredKv, torch.Tensor]:
    operands = ScatteredKv(case, device)
    return operands, operands.attend(ORACLES.paged_attention)


def test_the_definition_is_the_scale_and_rounding_that_its_text_says() -> None:
    x = odd_vectors()
    q, scales = quantise(x)
    for row, (vector, stored, scale) in enumerate(
        zip(x.tolist(), q.tolist(), scales.tolist(), strict=True)
    ):
        assert stored == int8_vector(vector)[0], row
        assert scale == pytest.approx(int8_vector(vector)[1], rel=0, abs=0, nan_ok=True), row
    assert q.min() == -127
    assert q[5, [1, 3, 5]].tolist() == [0, 2, 2], "halves go to the even integer"
    normal = [0, 1, 5, 11, 12, 13]
    assert ((dequantise(q, scales, F32) - x).abs() <= scales[:, None] * 0.5001)[normal].all()
    assert dequantise(q, scales, F32)[8:11].isnan().all()


def test_what_is_stored_of_a_token_depends_on_its_own_vector_alone() -> None:
    x = odd_vectors()
    q, scales = quantise(x)
    for row in range(len(x)):
        alone, scale = quantise(x[row])
        assert torch.equal(alone, q[row])
        assert torch.equal(bits(scale[None]), bits(scales[row : row + 1]))


def test_implementations_equal_the_oracle(impl: Implementation, case: AttentionCase) -> None:
    operands, expected = operands_and_expected(case, impl.device)
    out = operands.attend(impl.kernels.paged_attention)
    # Torch operators round keys and values to a narrow dtype, and then their scores.
    rounded = 4 if impl.has_rounded_scores and case.dtype != F32 else 1
    assert_rows_close(out, expected, rounded * impl.tolerance(case.dtype))
    assert torch.equal(out.any(-1), expected.any(-1))


@pytest.mark.parametrize("window", [None, 50])
def test_a_token_gives_the_same_alone_in_a_batch_and_in_any_chunk(
    window: int | None, impl: Implementation, dtype: torch.dtype
) -> None:
    if impl.leaves_out(window, dtype):
        return
    requests = ((100, 100), (1, 200), (20, 130))
    operands = ScatteredKv(
        AttentionCase(requests, 7, 1, 80, 64, dtype, window, is_int8=True), impl.device
    )
    together = operands.attend(impl.kernels.paged_attention)
    parts = [(0, 0, 30), (0, 30, 31), (0, 31, 100), (1, 199, 200), (2, 110, 118), (2, 118, 130)]
    firsts, ends = [0, 100, 101], [context for _, context in requests]
    for request, start, end in parts:
        row = firsts[request] + start - (ends[request] - requests[request][0])
        expected = together[row : row + end - start]
        out = operands.attend_to(
            impl.kernels.paged_attention, request, start, end, operands.q[row : row + end - start]
        )
        assert_rows_close(out, expected, 4 if impl.has_rounded_scores else 1)
        if impl.is_bitwise:
            assert torch.equal(bits(out), bits(expected)), (request, start)


@pytest.mark.parametrize("window", [None, 50])
def test_a_scale_of_nan_comes_out_of_the_rows_that_see_it(
    window: int | None, impl: Implementation, dtype: torch.dtype
) -> None:
    if impl.leaves_out(window, dtype):
        return
    requests = ((100, 100), (1, 90), (12, 70), (1, 100))
    operands = ScatteredKv(
        AttentionCase(requests, 6, 2, 64, 16, dtype, window, is_int8=True), impl.device
    )
    clean = operands.attend(impl.kernels.paged_attention)
    seen = torch.zeros(clean.shape[:2], dtype=torch.bool)
    seen[30 : 100 if window is None else 30 + window, 3:] = True
    place = (
        operands.block_tables[0][1],
        1,
        30 % 16,
    )  # position 30 of the first request, in one head
    assert operands.kv_scales is not None
    for scales in operands.kv_scales:
        before = scales[place].clone()
        scales[place] = NAN
        out = operands.attend(impl.kernels.paged_attention)
        scales[place] = before
        assert out[seen].isnan().all()
        # In values, 0 times NaN may reach other rows of the same request.
        others = (
            ~seen
            if scales is operands.kv_scales[0] and impl.is_bitwise
            else torch.arange(len(out)) >= 100
        )
        assert torch.equal(bits(out[others]), bits(clean[others]))


Change = Callable[[torch.Tensor, torch.Tensor], object]
MISFITS: list[tuple[str, Change, str]] = [
    ("kv_scales", lambda _k, _v: None, r"k_pages: expected dtype torch\.float32, got torch\.int8"),
    (
        "k_pages",
        lambda _k, _v: torch.zeros(20, 2, 16, 32),
        r"k_pages: expected dtype torch\.int8, got torch\.float32",
    ),
    (
        "kv_scales",
        lambda k, v: (k, v.double()),
        r"kv_scales: expected dtype torch\.float32, got torch\.float64",
    ),
    ("kv_scales", lambda k, v: (k[1:], v), r"kv_scales: expected shape \["),
    (
        "kv_scales",
        lambda k, v: (turned(k), turned(v)),
        "kv_scales: expected consecutive tokens, got",
    ),
    ("kv_scales", lambda k, v: (k, v.contiguous()), "kv_scales: expected strides"),
]


@pytest.mark.parametrize(("name", "change", "expected"), MISFITS)
def test_misfits_are_refused(
    name: str, change: Change, expected: str, impl: Implementation
) -> None:
    operands = ScatteredKv(AttentionCase(DECODE, is_int8=True), impl.device)
    assert operands.kv_scales is not None
    changed = change(*operands.kv_scales)
    setattr(
        operands, name, changed.to(impl.device) if isinstance(changed, torch.Tensor) else changed
    )
    with pytest.raises(ValueError, match=expected):
        operands.attend(impl.kernels.paged_attention)


def test_layers_of_a_step_may_differ_in_format(impl: Implementation) -> None:
    wide, int8 = (
        ScatteredKv(AttentionCase(MIXED, is_int8=is_int8), impl.device) for is_int8 in (False, True)
    )
    assert wide.block_tables == int8.block_tables
    wide.batch = int8.batch
    for operands in (int8, wide, int8):
        out = operands.attend(impl.kernels.paged_attention)
        assert_rows_close(out, operands.attend(ORACLES.paged_attention))
