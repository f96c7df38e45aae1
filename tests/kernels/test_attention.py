from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from kernel_numerics import assert_rows_close
from scattered_kv import BF16, DECODE, F32, FULL_CASES, INTERPRETER_CASES, LAYER, MIXED, AttentionCase, ScatteredKv
from weft.kernels import attention_cpu
from weft.kernels.attention_cpu import paged_attention
from weft.kernels.attention_reference import paged_attention as reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SHORT_CASES = [case for case in FULL_CASES if case.requests in (DECODE, MIXED)]
LONG_CASES = [
    AttentionCase(((1, 1500), (64, 300), (130, 130), (1, 257)), 14, 2, 64, 64, dtype, window)
    for dtype in (F32, BF16)
    for window in (None, 100)
]
BF16_SCORES = 2.5
"""The CPU rounds scores to the dtype of the keys before the softmax, as transformers does."""


def attend(version: Callable[..., torch.Tensor], operands: ScatteredKv, q: torch.Tensor | None = None) -> torch.Tensor:
    case = operands.case
    q = operands.q if q is None else q
    return version(q, operands.k_pages, operands.v_pages, operands.batch, operands.scale, case.window, case.softcap)


@pytest.mark.parametrize("case", [*INTERPRETER_CASES, *SHORT_CASES, *LONG_CASES], ids=str)
def test_cpu_version_equals_the_reference(case: AttentionCase) -> None:
    operands = ScatteredKv(case)
    assert_rows_close(attend(paged_attention, operands), attend(reference, operands), BF16_SCORES)


def test_reference_equals_attention_over_dense_keys() -> None:
    case = AttentionCase(((5, 40), (20, 20), (1, 33)))
    operands = ScatteredKv(case)
    out = attend(reference, operands)
    row = 0
    for (rows, context), table in zip(case.requests, operands.block_tables, strict=True):
        k, v = (
            operands.arena[table, LAYER, part].permute(1, 0, 2, 3).flatten(1, 2)[:, :context].repeat_interleave(2, 0)
            for part in (0, 1)
        )
        mask = torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
        q = operands.q[row : row + rows].transpose(0, 1)
        dense = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        assert_rows_close(out[row : row + rows], dense.transpose(0, 1))
        row += rows


@pytest.mark.parametrize("version", [paged_attention, reference], ids=["cpu", "reference"])
def test_rows_of_no_request_and_requests_without_context_are_zero(version: Callable[..., torch.Tensor]) -> None:
    operands = ScatteredKv(AttentionCase(((1, 0), (1, 20), (3, 0)), padding_rows=2))
    out = attend(version, operands)
    assert not out[[0, 2, 3, 4, 5, 6]].any()
    assert out[1].any()


def test_a_batch_without_context_is_all_zero() -> None:
    operands = ScatteredKv(AttentionCase(((1, 0),), padding_rows=1))
    assert not attend(paged_attention, operands).any()


def test_poison_behind_the_context_does_not_leak() -> None:
    operands = ScatteredKv(AttentionCase(MIXED))
    assert operands.arena[:, LAYER].isnan().any()
    clean = attend(paged_attention, operands)
    operands.arena.nan_to_num_(7.0)
    operands.arena[0] = 0
    assert torch.equal(attend(paged_attention, operands), clean)


def test_a_step_prepares_once_for_all_layers() -> None:
    operands = ScatteredKv(AttentionCase(MIXED))
    attend(paged_attention, operands)
    prepared = list(operands.batch._kept.values())
    attend(paged_attention, operands)
    assert len(prepared) == 1
    assert next(iter(operands.batch._kept.values())) is prepared[0]


def test_a_decode_row_gives_the_same_alone_and_in_a_batch() -> None:
    case = AttentionCase(((1, 90), (1, 30), (1, 91), (1, 500)))
    operands = ScatteredKv(case)
    together = attend(paged_attention, operands)
    for index, request in enumerate(case.requests):
        operands.batch = operands.batch.build(
            [operands.block_tables[index]], [1], [request[1]], torch.device("cpu"), case.page_tokens
        )
        assert_rows_close(attend(paged_attention, operands, operands.q[index : index + 1]), together[index : index + 1])


def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives() -> None:
    whole = ScatteredKv(AttentionCase(((100, 100),)))
    expected = attend(paged_attention, whole)
    for start, end in ((0, 30), (30, 38), (38, 99), (99, 100)):
        batch = whole.batch.build(whole.block_tables, [end - start], [end], torch.device("cpu"), 16)
        q = whole.q[start:end]
        out = paged_attention(q, whole.k_pages, whole.v_pages, batch, whole.scale)
        assert_rows_close(out, expected[start:end])


def test_items_of_very_different_length_are_not_padded_to_the_longest() -> None:
    operands = ScatteredKv(AttentionCase(((1, 2000), (1, 20), (1, 25), (1, 1990), (1, 30))))
    attend(paged_attention, operands)
    plan = next(iter(operands.batch._kept.values()))
    assert [(bucket.count, bucket.length) for bucket in plan.buckets] == [(2, 2000), (3, 30)]


def test_buckets_are_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cpu, "BUCKET_BYTES", 64 * 2 * 32 * 4)
    operands = ScatteredKv(AttentionCase(((1, 40),) * 3 + ((1, 100),)))
    out = attend(paged_attention, operands)
    plan = next(iter(operands.batch._kept.values()))
    assert [bucket.count for bucket in plan.buckets] == [1, 1, 1, 1]
    assert_rows_close(out, attend(reference, operands))


def test_misfits_are_refused() -> None:
    operands = ScatteredKv(AttentionCase(DECODE))
    q = operands.q
    with pytest.raises(ValueError, match="q: expected at least 5 rows, got 4"):
        attend(paged_attention, operands, q[:4])
    with pytest.raises(ValueError, match="q: expected a multiple of 2 heads, got 3"):
        attend(paged_attention, operands, q[:, :3])
    with pytest.raises(ValueError, match=r"k_pages: expected dtype torch\.bfloat16, got torch\.float32"):
        attend(paged_attention, operands, q.bfloat16())
    operands.case = replace(operands.case, window=0)
    with pytest.raises(ValueError, match="sliding_window: expected a positive number, got 0"):
        attend(paged_attention, operands)
