import numpy as np
import pytest
import torch

from weft.kernels.attention_batch import MAX_ITEM_ROWS, AttentionBatch, PromptChunk

CPU = torch.device("cpu")


def test_tables_are_padded_with_the_zero_page() -> None:
    batch = AttentionBatch.build([[3, 4, 5], [9], []], [1, 2, 0], [40, 16, 0], CPU, 16)
    assert batch.block_table.tolist() == [[3, 4, 5], [9, 0, 0], [0, 0, 0]]
    assert batch.query_indptr.tolist() == [0, 1, 3, 3]
    assert batch.context_lens.tolist() == [40, 16, 0]
    assert {t.dtype for t in (batch.block_table, batch.query_indptr, batch.context_lens)} == {torch.int32}
    assert np.array_equal(batch.block_table_host, batch.block_table.numpy())


def test_each_row_of_a_short_run_is_its_own_item() -> None:
    batch = AttentionBatch.build([[1], [2, 3], [4]], [1, 3, 1], [7, 20, 5], CPU, 16)
    assert [each.tolist() for each in batch.items] == [[0, 1, 2, 3, 4], [0, 1, 1, 1, 2], [7, 18, 19, 20, 5]]
    assert batch.max_item_len == 20
    assert batch.chunks == ()


def test_long_runs_are_chunks_in_any_order_with_items() -> None:
    rows = MAX_ITEM_ROWS + 1
    batch = AttentionBatch.build([[1], [2], [3]], [rows, 1, rows], [rows, 4, 12], CPU, 16)
    assert batch.chunks == (PromptChunk(0, 0, rows, rows), PromptChunk(2, rows + 1, rows, 12))
    assert batch.items[0].tolist() == [rows]
    assert batch.num_rows == 2 * rows + 1


def test_rows_without_context_are_items_of_length_zero_and_no_request_is_no_item() -> None:
    batch = AttentionBatch.build([[], [5]], [20, 1], [0, 3], CPU, 16)
    assert batch.items[2].tolist() == [0] * 20 + [3]
    assert batch.chunks == ()
    empty = AttentionBatch.build([], [], [], CPU, 16)
    assert (empty.num_rows, empty.max_item_len) == (0, 0)


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="expected equal lengths, got 1, 2 and 1"):
        AttentionBatch.build([[1]], [1, 1], [1], CPU, 16)
    with pytest.raises(ValueError, match=r"query_lens\[0\]: expected 0 to its context of 3, got 4"):
        AttentionBatch.build([[1]], [4], [3], CPU, 16)
    with pytest.raises(ValueError, match=r"context_lens\[1\]: expected at most 16 tokens of 1 pages, got 17"):
        AttentionBatch.build([[1], [2]], [1, 1], [3, 17], CPU, 16)


def test_what_is_kept_is_made_once() -> None:
    batch = AttentionBatch.build([[1]], [1], [1], CPU, 16)
    kept = batch.keep("key", object)
    assert batch.keep("key", object) is kept
    assert batch.keep("other key", object) is not kept
