from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from cpu_kernels import ALL_KERNELS, CPU_KERNELS, KERNELS_AND_DTYPES, needs_compiler
from kernel_numerics import assert_rows_close
from oracles.attention_reference import paged_attention as reference
from scattered_kv import BF16, DECODE, F16, F32, FULL_CASES, INTERPRETER_CASES, LAYER, MIXED, AttentionCase, ScatteredKv
from weft.kernels.dispatch import Kernels, native_kernels, torch_kernels
from weft.kernels.native import attention as attention_native
from weft.kernels.native.library import NATIVE_DTYPES
from weft.kernels.plain import attention as attention_cpu

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SHORT_CASES = [case for case in FULL_CASES if case.requests in (DECODE, MIXED)]
LONG_CASES = [
    AttentionCase(((1, 1500), (64, 300), (130, 130), (1, 257)), 14, 2, 64, 64, dtype, window)
    for dtype in (F32, BF16)
    for window in (None, 100)
]
CASES = [*INTERPRETER_CASES, *SHORT_CASES, *LONG_CASES]
VERSIONS = [
    *(
        pytest.param(native_kernels(), case, id=f"native-{case}", marks=needs_compiler)
        for case in CASES
        if case.dtype in NATIVE_DTYPES
    ),
    *(pytest.param(torch_kernels(), case, id=f"torch-{case}") for case in CASES),
]


def tolerance(kernels: Kernels, dtype: torch.dtype) -> float:
    """Torch operators round scores to a narrow dtype of the keys before the softmax, as transformers does."""
    if dtype == F32:
        return 0.25
    return 2.5 if kernels is torch_kernels() else 1


@pytest.mark.parametrize(("kernels", "case"), VERSIONS)
def test_cpu_versions_equal_the_reference(kernels: Kernels, case: AttentionCase) -> None:
    operands = ScatteredKv(case)
    actual = operands.attend(kernels.paged_attention)
    assert_rows_close(actual, operands.attend(reference), tolerance(kernels, case.dtype))


def test_reference_equals_attention_over_dense_keys() -> None:
    case = AttentionCase(((5, 40), (20, 20), (1, 33)))
    operands = ScatteredKv(case)
    out = operands.attend(reference)
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


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_rows_of_no_request_and_requests_without_context_are_zero(kernels: Kernels) -> None:
    operands = ScatteredKv(AttentionCase(((1, 0), (1, 20), (3, 0)), padding_rows=2))
    out = operands.attend(kernels.paged_attention)
    assert not out[[0, 2, 3, 4, 5, 6]].any()
    assert out[1].any()


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_a_batch_without_context_is_all_zero(kernels: Kernels) -> None:
    operands = ScatteredKv(AttentionCase(((1, 0),), padding_rows=1))
    assert not operands.attend(kernels.paged_attention).any()


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS_AND_DTYPES)
def test_poison_behind_the_context_does_not_leak(kernels: Kernels, dtype: torch.dtype) -> None:
    operands = ScatteredKv(AttentionCase(MIXED, dtype=dtype))
    assert operands.arena[:, LAYER].isnan().any()
    clean = operands.attend(kernels.paged_attention)
    operands.arena.nan_to_num_(7.0)
    operands.arena[0] = 0
    assert torch.equal(operands.attend(kernels.paged_attention), clean)


def test_a_step_prepares_once_for_all_layers() -> None:
    operands = ScatteredKv(AttentionCase(MIXED))
    operands.attend(attention_cpu.paged_attention)
    prepared = list(operands.batch._kept.values())
    operands.attend(attention_cpu.paged_attention)
    assert len(prepared) == 1
    assert next(iter(operands.batch._kept.values())) is prepared[0]


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_a_decode_row_gives_the_same_alone_and_in_a_batch(kernels: Kernels) -> None:
    operands = ScatteredKv(AttentionCase(((1, 90), (1, 30), (1, 91), (1, 500))))
    together = operands.attend(kernels.paged_attention)
    for index, (_, context) in enumerate(operands.case.requests):
        q = operands.q[index : index + 1]
        alone = operands.attend_to(kernels.paged_attention, index, context - 1, context, q)
        assert_rows_close(alone, together[index : index + 1])


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives(kernels: Kernels) -> None:
    whole = ScatteredKv(AttentionCase(((100, 100),)))
    expected = whole.attend(kernels.paged_attention)
    for start, end in ((0, 30), (30, 38), (38, 99), (99, 100)):
        out = whole.attend_to(kernels.paged_attention, 0, start, end, whole.q[start:end])
        assert_rows_close(out, expected[start:end])


def test_items_of_very_different_length_are_not_padded_to_the_longest() -> None:
    operands = ScatteredKv(AttentionCase(((1, 2000), (1, 20), (1, 25), (1, 1990), (1, 30))))
    operands.attend(attention_cpu.paged_attention)
    plan = next(iter(operands.batch._kept.values()))
    assert [(bucket.count, bucket.length) for bucket in plan.buckets] == [(2, 2000), (3, 30)]


def test_buckets_are_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cpu, "BUCKET_BYTES", 64 * 2 * 32 * 4)
    operands = ScatteredKv(AttentionCase(((1, 40),) * 3 + ((1, 100),)))
    out = operands.attend(attention_cpu.paged_attention)
    plan = next(iter(operands.batch._kept.values()))
    assert [bucket.count for bucket in plan.buckets] == [1, 1, 1, 1]
    assert_rows_close(out, operands.attend(reference))


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_misfits_are_refused(kernels: Kernels) -> None:
    operands = ScatteredKv(AttentionCase(DECODE))
    q = operands.q
    with pytest.raises(ValueError, match="q: expected at least 5 rows, got 4"):
        operands.attend(kernels.paged_attention, q[:4])
    with pytest.raises(ValueError, match="q: expected a multiple of 2 heads, got 3"):
        operands.attend(kernels.paged_attention, q[:, :3])
    with pytest.raises(ValueError, match=r"q: expected shape \[any, any, 32\], got \[5, 4, 31\]"):
        operands.attend(kernels.paged_attention, q[:, :, 1:])
    with pytest.raises(ValueError, match=r"k_pages: expected dtype torch\.bfloat16, got torch\.float32"):
        operands.attend(kernels.paged_attention, q.bfloat16())
    operands.case = replace(operands.case, window=0)
    with pytest.raises(ValueError, match="sliding_window: expected a positive number, got 0"):
        operands.attend(kernels.paged_attention)
    operands.case = AttentionCase(DECODE)
    operands.v_pages = operands.v_pages[1:]
    with pytest.raises(ValueError, match="v_pages: expected shape"):
        operands.attend(kernels.paged_attention)
    operands.v_pages = operands.k_pages.contiguous()
    with pytest.raises(ValueError, match=r"v_pages: expected (the )?strides"):
        operands.attend(kernels.paged_attention)
    operands.k_pages = operands.v_pages = operands.k_pages.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="k_pages: expected consecutive elements"):
        operands.attend(kernels.paged_attention)


@needs_compiler
def test_native_kernels_refuse_what_they_cannot_read() -> None:
    operands = ScatteredKv(AttentionCase(DECODE))
    with pytest.raises(ValueError, match="q: expected consecutive elements, got"):
        operands.attend(attention_native.paged_attention, operands.q.transpose(1, 2).contiguous().transpose(1, 2))
    narrow = ScatteredKv(AttentionCase(DECODE, dtype=F16))
    with pytest.raises(ValueError, match=r"expected one of torch\.float32, torch\.bfloat16, got torch\.float16"):
        narrow.attend(attention_native.paged_attention)
