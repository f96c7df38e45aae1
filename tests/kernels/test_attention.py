"""The contract of paged attention, and how the torch operators bound their memory."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from implementations import (
    BF16,
    CPU,
    F16,
    F32,
    INTERPRETS,
    TORCH,
    Implementation,
    num_threads,
)
from manylora.kernels.native.attention import TASK_ROWS
from manylora.kernels.plain import attention as plain
from numerics import assert_rows_close, bits, turned
from oracles import ORACLES
from scattered_kv import DECODE, LAYER, MIXED, AttentionCase, ScatteredKv

# C++ computes keys 64 at a time, and cuts a run of rows after TASK_ROWS of all its heads.
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
AROUND_PAGES = [token for token in range(200) if token % 16 in (0, 1, 7, 15)]
LONG_PROMPTS = ((TASK_ROWS + 5, TASK_ROWS + 5), (1, 70), (2 * TASK_ROWS + 1, 2 * TASK_ROWS + 90))
LONG_DECODE = ((1, 1500), (64, 300), (130, 130), (1, 257))
WINDOWS = itertools.cycle((None, 100, 1, None, 37, 64, 65))
SMALL_CASES = [
    AttentionCase(DECODE),
    AttentionCase(DECODE, q_heads=14, kv_heads=2, head_dim=64, page_tokens=64, dtype=BF16),
    AttentionCase(((1, 700), (1, 3), (1, 256), (1, 257)), q_heads=7, kv_heads=1),
    AttentionCase(((1, 600), (1, 90)), window=300, dtype=F16),
    AttentionCase(((2, 70), (8, 30)), window=20),
    AttentionCase(MIXED, padding_rows=2),
    AttentionCase(MIXED, q_heads=4, kv_heads=4, head_dim=16, page_tokens=32, dtype=BF16),
    AttentionCase(((130, 133), (9, 9)), q_heads=7, kv_heads=1),
    AttentionCase(((40, 100), (10, 10)), window=16, head_dim=24, dtype=F16),
    AttentionCase(((1, 0), (3, 0)), padding_rows=2),
    AttentionCase(tuple((1, 3 + index % 7) for index in range(40 if INTERPRETS else 150))),
]
CASES = [
    *SMALL_CASES,
    *(
        AttentionCase(requests, *heads, page_tokens, dtype, next(WINDOWS), padding_rows=3)
        for requests in (AROUND_BLOCKS, MIXED)
        for heads, page_tokens, dtype in zip(
            (
                (*heads, head_dim)
                for head_dim in (16, 24, 64, 80, 128)
                for heads in ((2, 2), (6, 2), (7, 1), (16, 2))
            ),
            itertools.cycle((16, 64, 128)),
            itertools.cycle((F32, BF16, BF16, F32, F16)),
            strict=False,
        )
    ),
    *(
        AttentionCase(requests, 14, 2, 64, 64, dtype, window)
        for requests in (LONG_PROMPTS, LONG_DECODE)
        for dtype in (F32, BF16)
        for window in (None, 100)
    ),
]
NAN = torch.tensor(float("nan"))
GPU_CASES = [
    AttentionCase(requests, *sizes, dtype, window, padding_rows=padding)
    for requests, padding in (
        (DECODE, 0),
        (MIXED, 3),
        (((1, 1500), (64, 512), (512, 512), (1, 257)), 0),
    )
    for sizes in ((14, 2, 64, 64), (32, 8, 128, 16), (4, 4, 16, 32))
    for dtype in (F32, F16, BF16)
    for window in (None, 100)
]


def cases(impl: Implementation) -> list[AttentionCase]:
    """What an implementation is compared with the oracle for."""
    if impl.is_interpreted:
        return SMALL_CASES
    return CASES if impl.device == CPU else [*SMALL_CASES, *GPU_CASES]


@functools.cache
def operands_and_expected(
    case: AttentionCase, device: torch.device
) -> tuple[ScatteredKv, torch.Tensor]:
    operands = ScatteredKv(case, device)
    return operands, operands.attend(ORACLES.paged_attention)


def each_alone(impl: Implementation, operands: ScatteredKv) -> Iterator[tuple[torch.Tensor, slice]]:
    """The output of each request in a step of its own, and its rows."""
    row = 0
    for index, (rows, context) in enumerate(operands.case.requests):
        own = slice(row, row + rows)
        yield (
            operands.attend_to(
                impl.kernels.paged_attention, index, context - rows, context, operands.q[own]
            ),
            own,
        )
        row += rows


def test_implementations_equal_the_oracle(impl: Implementation, case: AttentionCase) -> None:
    operands, expected = operands_and_expected(case, impl.device)
    out = operands.attend(impl.kernels.paged_attention)
    rounded = 2.5 if impl.has_rounded_scores and case.dtype != F32 else 1
    assert_rows_close(out, expected, rounded * impl.tolerance(case.dtype))
    assert torch.equal(out.any(-1), expected.any(-1))


def test_the_oracle_equals_attention_over_dense_keys() -> None:
    case = AttentionCase(((5, 40), (20, 20), (1, 33)))
    operands = ScatteredKv(case)
    out = operands.attend(ORACLES.paged_attention)
    row = 0
    for (rows, context), table in zip(case.requests, operands.block_tables, strict=True):
        k, v = (
            operands.arena[table, LAYER, part]
            .permute(1, 0, 2, 3)
            .flatten(1, 2)[:, :context]
            .repeat_interleave(2, 0)
            for part in (0, 1)
        )
        mask = torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
        q = operands.q[row : row + rows].transpose(0, 1)
        dense = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[
            0
        ]
        assert_rows_close(out[row : row + rows], dense.transpose(0, 1))
        row += rows


def test_poison_behind_the_context_does_not_leak(impl: Implementation, dtype: torch.dtype) -> None:
    operands = ScatteredKv(AttentionCase(MIXED, dtype=dtype), impl.device)
    assert operands.arena[:, LAYER].isnan().any()
    clean = operands.attend(impl.kernels.paged_attention)
    operands.arena.nan_to_num_(7.0)
    operands.arena[0] = 0
    assert torch.equal(operands.attend(impl.kernels.paged_attention), clean)


@pytest.mark.parametrize("window", [None, 50])
def test_a_request_gives_the_same_alone_and_beside_others(
    window: int | None, impl: Implementation, dtype: torch.dtype
) -> None:
    if impl.leaves_out(window, dtype):
        return
    requests = (
        (9, 130),
        (1, 200),
        (40, 170),
        (1, 64),
        (30, 30),
        (1, 65),
        (0, 20),
        (8, 90),
        (1, 500),
    )
    operands = ScatteredKv(AttentionCase(requests, 7, 1, 80, 64, dtype, window), impl.device)
    together = operands.attend(impl.kernels.paged_attention)
    for alone, rows in each_alone(impl, operands):
        assert_rows_close(alone, together[rows], 2.5 if impl.has_rounded_scores else 0.1)
        if impl.is_bitwise:
            assert torch.equal(bits(alone), bits(together[rows]))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("heads", [(14, 2), (3, 3)], ids=str)
def test_a_token_gives_the_same_alone_and_in_any_chunk(
    heads: tuple[int, int], window: int | None, impl: Implementation, dtype: torch.dtype
) -> None:
    if impl.leaves_out(window, dtype):
        return
    whole = ScatteredKv(AttentionCase(((200, 200),), *heads, 64, 16, dtype, window), impl.device)
    expected = whole.attend(impl.kernels.paged_attention)
    singles = [(token, token + 1) for token in AROUND_PAGES] if impl.is_bitwise else []
    chunks = [(0, 30), (38, 103), (103, 104)]
    if not impl.is_interpreted:
        chunks += [(30, 38), (104, 200)]
    for start, end in [*chunks, *singles]:
        out = whole.attend_to(impl.kernels.paged_attention, 0, start, end, whole.q[start:end])
        assert_rows_close(out, expected[start:end], 2.5 if impl.has_rounded_scores else 1)
        if impl.is_bitwise:
            assert torch.equal(bits(out), bits(expected[start:end])), (start, end)


def test_results_repeat_bit_by_bit(impl: Implementation, dtype: torch.dtype) -> None:
    num_heads = 4 if impl.is_interpreted else 14
    operands = ScatteredKv(
        AttentionCase(((130, 140), (1, 500), (1, 65)), num_heads, 2, 64, 16, dtype), impl.device
    )
    with num_threads(1):
        first = operands.attend(impl.kernels.paged_attention)
    for threads in (1, 2) if impl.is_bitwise else (1,):
        with num_threads(threads):
            assert all(
                torch.equal(operands.attend(impl.kernels.paged_attention), first)
                for _ in range(1 if impl.is_interpreted else 3)
            )


@pytest.mark.parametrize("window", [None, 50])
def test_a_nan_comes_out_of_the_rows_that_see_it(
    window: int | None, impl: Implementation, dtype: torch.dtype
) -> None:
    if impl.leaves_out(window, dtype):
        return
    requests = ((100, 100), (1, 90), (12, 70), (1, 100))
    operands = ScatteredKv(AttentionCase(requests, 6, 2, 64, 16, dtype, window), impl.device)
    clean = operands.attend(impl.kernels.paged_attention)
    seen = torch.zeros(clean.shape[:2], dtype=torch.bool)
    seen[30 : 100 if window is None else 30 + window, 3:] = True
    place = (
        operands.block_tables[0][1],
        1,
        30 % 16,
        5,
    )  # position 30 of the first request, in one head
    for pages, parts in ((operands.k_pages, slice(None)), (operands.v_pages, slice(5, 6))):
        before = pages[place].clone()
        pages[place] = NAN.to(dtype)
        out = operands.attend(impl.kernels.paged_attention)
        pages[place] = before
        assert out[seen][:, parts].isnan().all()
        # In values, 0 times NaN may reach other rows of the same request.
        others = (
            ~seen if parts == slice(None) and impl.is_bitwise else torch.arange(len(out)) >= 100
        )
        assert torch.equal(bits(out[others]), bits(clean[others]))


def test_layers_of_a_step_may_differ_in_window_and_strides(impl: Implementation) -> None:
    operands = ScatteredKv(AttentionCase(MIXED), impl.device)
    pages = operands.k_pages, operands.v_pages
    for window, (k, v) in ((None, pages), (10, pages), (10, [each.contiguous() for each in pages])):
        operands.case, operands.k_pages, operands.v_pages = (
            replace(operands.case, window=window),
            k,
            v,
        )
        assert_rows_close(
            operands.attend(impl.kernels.paged_attention), operands.attend(ORACLES.paged_attention)
        )


def test_scores_beyond_the_range_of_weights_are_no_error(
    impl: Implementation, dtype: torch.dtype
) -> None:
    operands = ScatteredKv(AttentionCase(((70, 70), (1, 130)), dtype=dtype), impl.device)
    operands.scale = 300.0
    out = operands.attend(impl.kernels.paged_attention)
    if dtype == F32 or impl.is_bitwise:
        assert_rows_close(
            out, operands.attend(ORACLES.paged_attention), 1000 if dtype == F32 else 1
        )
    assert out.isfinite().all()


def test_misfits_are_refused(impl: Implementation) -> None:
    operands = ScatteredKv(AttentionCase(DECODE), impl.device)
    q, k, v = operands.q, operands.k_pages, operands.v_pages

    for changed, expected in (
        ({"q": q[:4]}, "q: expected at least 5 rows, got 4"),
        ({"q": q[:, :3]}, "q: expected a multiple of 2 heads, got 3"),
        ({"q": q[:, :, 1:]}, r"q: expected shape \[any, any, 32\], got \[5, 4, 31\]"),
        ({"q": turned(q)}, "q: expected consecutive elements, got"),
        ({"q": q.bfloat16()}, r"k_pages: expected dtype torch\.bfloat16, got torch\.float32"),
        ({"v_pages": v[1:]}, "v_pages: expected shape"),
        ({"v_pages": v.contiguous()}, "v_pages: expected strides"),
        ({"k_pages": k.mT.contiguous().mT}, "k_pages: expected consecutive elements"),
        ({"case": replace(operands.case, window=0)}, "window: expected a positive number, got 0"),
    ):
        misfit = ScatteredKv(AttentionCase(DECODE), impl.device)
        for name, value in changed.items():
            setattr(misfit, name, value)
        with pytest.raises(ValueError, match=expected):
            misfit.attend(impl.kernels.paged_attention)


def prepared_by(operands: ScatteredKv) -> plain.GatherPlan:
    """What the torch operators prepared for the one layer that ran."""
    key = plain.plan_key(operands.q, operands.layer)
    plan: plain.GatherPlan = operands.batch.keep(key, lambda: pytest.fail("nothing was prepared"))
    return plan


def test_torch_operators_prepare_once_for_all_layers() -> None:
    operands = ScatteredKv(AttentionCase(MIXED))
    operands.attend(TORCH.kernels.paged_attention)
    first = prepared_by(operands)
    operands.attend(TORCH.kernels.paged_attention)
    assert prepared_by(operands) is first


def test_torch_operators_do_not_pad_items_to_the_longest() -> None:
    operands = ScatteredKv(AttentionCase(((1, 2000), (1, 20), (1, 25), (1, 1990), (1, 30))))
    operands.attend(TORCH.kernels.paged_attention)
    assert [(bucket.count, bucket.length) for bucket in prepared_by(operands).gathers] == [
        (2, 2000),
        (3, 30),
    ]


def test_torch_operators_bound_the_memory_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "BUCKET_BYTES", 64 * 2 * 32 * 4)
    operands = ScatteredKv(AttentionCase(((1, 40),) * 3 + ((1, 100),)))
    out = operands.attend(TORCH.kernels.paged_attention)
    assert [bucket.count for bucket in prepared_by(operands).gathers] == [1, 1, 1, 1]
    assert_rows_close(out, operands.attend(ORACLES.paged_attention))
