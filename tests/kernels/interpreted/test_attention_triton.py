import pytest
import torch

from kernel_numerics import assert_rows_close
from oracles.attention_reference import paged_attention as reference
from scattered_kv import INTERPRETER_CASES, MIXED, AttentionCase, ScatteredKv
from weft.kernels.triton.attention import paged_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", INTERPRETER_CASES, ids=str)
def test_kernels_equal_the_reference(case: AttentionCase) -> None:
    operands = ScatteredKv(case)
    assert_rows_close(operands.attend(paged_attention), operands.attend(reference))


def test_a_row_does_not_depend_on_the_batch() -> None:
    case = AttentionCase(((1, 90), (1, 300), (20, 20), (1, 500)))
    operands = ScatteredKv(case)
    together = operands.attend(paged_attention)
    row = 0
    for index, (rows, context) in enumerate(case.requests):
        q = operands.q[row : row + rows]
        alone = operands.attend_to(paged_attention, index, context - rows, context, q)
        assert_rows_close(alone, together[row : row + rows], 0.1)
        row += rows


def test_rows_without_context_and_padding_are_zero() -> None:
    operands = ScatteredKv(AttentionCase(((1, 0), (1, 600), (3, 0)), padding_rows=2))
    out = operands.attend(paged_attention)
    assert not out[[0, 2, 3, 4, 5, 6]].any()
    assert out[1].any()


def test_results_repeat_bit_by_bit() -> None:
    operands = ScatteredKv(AttentionCase(MIXED))
    assert torch.equal(operands.attend(paged_attention), operands.attend(paged_attention))
