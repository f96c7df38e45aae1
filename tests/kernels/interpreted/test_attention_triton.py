from collections.abc import Callable

import pytest
import torch

from kernel_numerics import assert_rows_close
from scattered_kv import INTERPRETER_CASES, MIXED, AttentionCase, ScatteredKv
from weft.kernels.attention_reference import paged_attention as reference
from weft.kernels.attention_triton import paged_attention


def attend(version: Callable[..., torch.Tensor], operands: ScatteredKv, q: torch.Tensor | None = None) -> torch.Tensor:
    case = operands.case
    q = operands.q if q is None else q
    return version(q, operands.k_pages, operands.v_pages, operands.batch, operands.scale, case.window, case.softcap)


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", INTERPRETER_CASES, ids=str)
def test_kernels_equal_the_reference(case: AttentionCase) -> None:
    operands = ScatteredKv(case)
    assert_rows_close(attend(paged_attention, operands), attend(reference, operands))


def test_a_row_does_not_depend_on_the_batch() -> None:
    case = AttentionCase(((1, 90), (1, 300), (20, 20), (1, 500)))
    operands = ScatteredKv(case)
    together = attend(paged_attention, operands)
    row = 0
    for index, (rows, context) in enumerate(case.requests):
        operands.batch = operands.batch.build(
            [operands.block_tables[index]], [rows], [context], torch.device("cpu"), case.page_tokens
        )
        alone = attend(paged_attention, operands, operands.q[row : row + rows])
        assert_rows_close(alone, together[row : row + rows], 0.1)
        row += rows


def test_rows_without_context_and_padding_are_zero() -> None:
    operands = ScatteredKv(AttentionCase(((1, 0), (1, 600), (3, 0)), padding_rows=2))
    out = attend(paged_attention, operands)
    assert not out[[0, 2, 3, 4, 5, 6]].any()
    assert out[1].any()


def test_results_repeat_bit_by_bit() -> None:
    operands = ScatteredKv(AttentionCase(MIXED))
    assert torch.equal(attend(paged_attention, operands), attend(paged_attention, operands))
