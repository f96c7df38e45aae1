"""Attention in C++, as it is compiled for this CPU and for lesser ones: sizes that matter, and results bit by bit."""

import ctypes
import functools
import itertools

import pytest
import torch

from cpu_kernels import num_threads
from kernel_numerics import assert_rows_close
from oracles.attention_reference import paged_attention as reference
from scattered_kv import BF16, F32, AttentionCase, ScatteredKv
from weft.kernels.native.attention import TASK_ROWS, paged_attention
from weft.kernels.native.library import native_function

pytestmark = pytest.mark.usefixtures("poisoned_memory", "native_build")
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
WINDOWS = pytest.mark.parametrize("window", [None, 50])
# Keys are computed 64 at a time; a run of rows is cut after TASK_ROWS of all its heads.
AROUND_BLOCKS = ((1, 63), (1, 64), (1, 65), (1, 130), (63, 63), (3, 66), (1, 0), (65, 130), (2, 0), (64, 128))
LONG_PROMPTS = ((TASK_ROWS + 5, TASK_ROWS + 5), (1, 70), (2 * TASK_ROWS + 1, 2 * TASK_ROWS + 90))
LIMITS = itertools.cycle([(None, None), (100, None), (1, None), (None, 20.0), (37, 8.0), (64, None), (65, 3.0)])
CASES = [
    *(
        AttentionCase(AROUND_BLOCKS, *heads, head_dim, page_tokens, dtype, *next(LIMITS), padding_rows=3)
        for (head_dim, heads), page_tokens, dtype in zip(
            itertools.product((16, 24, 64, 80, 128), ((2, 2), (6, 2), (7, 1), (16, 2))),
            itertools.cycle((16, 64, 128)),
            itertools.cycle((F32, BF16, BF16, F32, F32)),
            strict=False,
        )
    ),
    *(AttentionCase(LONG_PROMPTS, 2, 2, 64, 16, dtype, window) for dtype in (F32, BF16) for window in (None, 100)),
]


@functools.cache
def operands_and_expected(case: AttentionCase) -> tuple[ScatteredKv, torch.Tensor]:
    operands = ScatteredKv(case)
    return operands, operands.attend(reference)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sizes_that_matter_are_right(case: AttentionCase) -> None:
    operands, expected = operands_and_expected(case)
    out = operands.attend(paged_attention)
    assert_rows_close(out, expected, 0.25 if case.dtype == F32 else 1)
    assert torch.equal(out == 0, expected == 0)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == F32 else torch.int16)


@DTYPES
@WINDOWS
@pytest.mark.parametrize("heads", [(14, 2), (3, 3)], ids=str)
def test_a_token_is_bitwise_the_same_alone_and_in_any_chunk(
    heads: tuple[int, int], window: int | None, dtype: torch.dtype
) -> None:
    whole = ScatteredKv(AttentionCase(((200, 200),), *heads, 64, 16, dtype, window))
    expected = whole.attend(paged_attention)
    assert_rows_close(expected, whole.attend(reference))
    chunks = [(0, 30), (30, 38), (38, 103), (103, 104), (104, 200)]
    for start, end in [*chunks, *((i, i + 1) for i in range(200))]:
        out = whole.attend_to(paged_attention, 0, start, end, whole.q[start:end])
        assert torch.equal(bits(out), bits(expected[start:end])), (start, end)


@DTYPES
@WINDOWS
@pytest.mark.parametrize("softcap", [None, 8.0])
def test_a_request_is_bitwise_the_same_alone_and_beside_others(
    softcap: float | None, window: int | None, dtype: torch.dtype
) -> None:
    requests = ((9, 130), (1, 200), (40, 170), (1, 64), (30, 30), (1, 65), (0, 20), (8, 90))
    operands = ScatteredKv(AttentionCase(requests, 7, 1, 80, 64, dtype, window, softcap))
    together = operands.attend(paged_attention)
    row = 0
    for index, (rows, context) in enumerate(requests):
        q, expected = operands.q[row : row + rows], together[row : row + rows]
        alone = operands.attend_to(paged_attention, index, context - rows, context, q)
        assert torch.equal(bits(alone), bits(expected)), index
        row += rows


@DTYPES
def test_results_are_bitwise_the_same_in_every_run_and_with_more_threads(dtype: torch.dtype) -> None:
    operands = ScatteredKv(AttentionCase(((130, 140), (1, 500), (1, 65)), 14, 2, 64, 16, dtype))
    with num_threads(1):
        first = operands.attend(paged_attention)
        assert torch.equal(operands.attend(paged_attention), first)
    with num_threads(2):
        assert all(torch.equal(operands.attend(paged_attention), first) for _ in range(5))


def with_a_nan(operands: ScatteredKv, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output once position 30 of the first request is NaN in one head, and which of its [rows, heads] see that."""
    pages.view(torch.int32 if pages.dtype == F32 else torch.int16)[operands.block_tables[0][1], 1, 30 % 16, 5] = -1
    out = operands.attend(paged_attention)
    seen = torch.zeros(out.shape[:2], dtype=torch.bool)
    seen[30 : 100 if operands.case.window is None else 30 + operands.case.window, 3:] = True
    return out, seen


NAN_CASES = [
    AttentionCase(((100, 100), (1, 90), (12, 70), (1, 100)), 6, 2, 64, 16, dtype, window)
    for dtype in (F32, BF16)
    for window in (None, 50)
]


@pytest.mark.parametrize("case", NAN_CASES, ids=str)
def test_a_nan_in_a_key_comes_out_of_the_rows_that_see_it_and_of_no_others(case: AttentionCase) -> None:
    operands = ScatteredKv(case)
    clean = operands.attend(paged_attention)
    out, seen = with_a_nan(operands, operands.k_pages)
    assert out[seen].isnan().all()
    assert torch.equal(bits(out[~seen]), bits(clean[~seen]))


@pytest.mark.parametrize("case", NAN_CASES, ids=str)
def test_a_nan_in_a_value_comes_out_of_the_rows_that_see_it_and_of_no_other_request(case: AttentionCase) -> None:
    operands = ScatteredKv(case)
    clean = operands.attend(paged_attention)
    out, seen = with_a_nan(operands, operands.v_pages)
    assert out[seen][:, 5].isnan().all()
    assert torch.equal(out[seen][:, :5], clean[seen][:, :5])
    assert torch.equal(bits(out[100:]), bits(clean[100:]))


@DTYPES
def test_scores_beyond_the_range_of_weights_are_no_error(dtype: torch.dtype) -> None:
    operands = ScatteredKv(AttentionCase(((70, 70), (1, 130)), dtype=dtype))
    operands.scale = 300.0
    out = operands.attend(paged_attention)
    assert_rows_close(out, operands.attend(reference), 1000 if dtype == F32 else 1)


def test_as_many_requests_as_a_server_has() -> None:
    operands = ScatteredKv(AttentionCase(tuple((1, 3 + index % 7) for index in range(150))))
    assert_rows_close(operands.attend(paged_attention), operands.attend(reference), 1)


def test_too_little_memory_is_an_error_and_not_the_end_of_the_process() -> None:
    task = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    attention = native_function("attention", F32, "i" * 16 + "ffii", ctypes.c_bool)
    assert attention(*[0] * 10, 0, task.data_ptr(), 1, 1, 1, 1 << 50, 1.0, 0.0, 0, 0)
