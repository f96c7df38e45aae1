import numpy as np
import pytest
import torch

from implementations import NATIVE, TORCH, needs_compiler
from manylora.kernels.attention_batch import (
    MAX_ITEM_ROWS,
    MAX_SPLITS,
    AttentionBatch,
    AttentionRows,
    chunk_tile_rows,
    item_runs,
    most_partials,
    num_splits,
    split_starts,
    tile_runs,
)
from scattered_kv import AttentionCase, ScatteredKv, listed_batch

CPU = torch.device("cpu")


def test_each_row_of_a_short_run_is_its_own_item() -> None:
    batch = listed_batch([[1], [2, 3], [4]], [1, 3, 1], [7, 20, 5], CPU, 16)
    assert item_runs(batch.runs).T.tolist() == [
        [0, 1, 6, 0],
        [1, 1, 17, 1],
        [2, 1, 18, 1],
        [3, 1, 19, 1],
        [4, 1, 4, 3],
    ]
    assert tile_runs(batch.runs, 1).shape == (4, 0)
    assert (batch.num_rows, batch.block_table.tolist()) == (5, [1, 2, 3, 4])


def test_long_runs_are_tiles_in_any_order_with_items() -> None:
    rows = MAX_ITEM_ROWS + 1
    batch = listed_batch([[1], [2], [3]], [rows, 1, rows], [rows, 4, 12], CPU, 16)
    assert tile_runs(batch.runs, 1).T.tolist() == [[rows + 1, rows, 3, 2], [0, rows, 0, 0]]
    assert item_runs(batch.runs).T.tolist() == [[rows, 1, 3, 1]]
    assert batch.num_rows == 2 * rows + 1


def test_rows_without_context_and_requests_without_rows_are_in_no_item() -> None:
    batch = listed_batch([[], [5], [6]], [20, 1, 0], [0, 3, 2], CPU, 16)
    assert item_runs(batch.runs).T.tolist() == [[20, 1, 2, 0]]
    assert batch.num_rows == 1
    empty = listed_batch([], [], [], CPU, 16)
    assert (empty.num_rows, item_runs(empty.runs).shape) == (0, (4, 0))


def pages_of(rows: AttentionRows, start: int, tokens: int) -> list[int]:
    """The pages of a request with so many tokens."""
    return rows.block_table[start : start - (-tokens // rows.page_tokens)].tolist()


def test_rows_name_the_pages_of_each_item_and_tile() -> None:
    batch = listed_batch(
        [[3, 4, 5], [9], [1, 2, 6, 7], []], [1, 2, 33, 1], [40, 16, 50, 0], CPU, 16
    )
    rows = batch.rows(group=8, window=0)
    assert rows.item_rows.tolist() == [0, 1, 2]
    assert rows.item_lens.tolist() == [40, 15, 16]
    assert [
        pages_of(rows, start, length)
        for start, length in zip(rows.item_tables.tolist(), rows.item_lens.tolist(), strict=True)
    ] == [[3, 4, 5], [9], [9]]
    tiles = rows.tiles.T.tolist()
    assert [tile[:3] for tile in tiles] == [[35, 1, 49], [19, 16, 33], [3, 16, 17]], (
        "the longest first"
    )
    assert {tuple(pages_of(rows, start, 50)) for *_, start in tiles} == {(1, 2, 6, 7)}
    assert rows.work[0].tolist() == [0, 1, 2, 3]
    assert {
        rows.work[0].dtype,
        *(t.dtype for t in (rows.block_table, rows.item_rows, rows.tiles)),
    } == {torch.int32}
    assert (rows.page_tokens, rows.num_partials) == (16, 0)


def test_rows_are_made_once_for_all_layers_and_their_work_for_each_window() -> None:
    batch = listed_batch([list(range(1, 41))], [1], [600], CPU, 16)
    rows = batch.rows(4, 0)
    assert batch.rows(4, 300) is rows
    assert {window: work.tolist() for window, work in rows.work.items()} == {0: [0, 3], 300: [0, 2]}
    assert rows.num_partials == 3
    counters = rows.counters(2)
    assert (counters.tolist(), counters.dtype) == ([0, 0], torch.int32)
    assert rows.counters(2) is counters
    assert batch.rows(128, 0).tiles.shape == (4, 0)
    assert len(listed_batch([], [], [], CPU, 16).rows(1, 0).block_table) == 1


def test_an_item_is_split_by_what_it_sees_alone() -> None:
    lens = np.array(
        [0, 1, 255, 256, 257, 511, 512, 513, 64 * 256, 64 * 256 + 1, 64 * 512 + 1, 131_072, -1]
    )
    assert num_splits(lens, 0).tolist() == [1, 1, 1, 1, 2, 2, 2, 3, 64, 33, 33, 64, 0]
    assert num_splits(lens, 500).tolist() == [1, 1, 1, 1, *[2] * 8, 0]
    assert split_starts(lens[[2, -1, 4, 7]], 0).tolist() == [0, 1, 1, 3, 6]
    assert split_starts(lens[:0], 0).tolist() == [0]
    assert split_starts(lens, 0).dtype == np.int32


@pytest.mark.parametrize("longest", [1, 256, 257, 5_000, 64 * 256, 40_000, 131_072])
def test_no_item_has_more_splits_than_there_is_room_for(longest: int) -> None:
    lens = np.arange(longest + 1)
    for window in (0, 300, 5000, 16_384):
        splits = num_splits(lens, window)
        assert splits.max() <= MAX_SPLITS
        assert most_partials(lens) >= (splits.sum() if splits.max() > 1 else 0)
        assert most_partials(lens[-1:]) >= (splits[-1] if splits[-1] > 1 else 0)
    # Where no item has two splits, none is kept.
    assert bool(most_partials(lens)) == (longest > 256)


def test_tiles_cover_each_row_of_a_chunk_once_and_the_longest_come_first() -> None:
    chunks = np.array([(2, 70, 5, 0), (80, 9, 1000, 40)], dtype=np.int32).T
    tiles = tile_runs(chunks, 4).T.tolist()
    assert tiles == [[80, 9, 1000, 40], [66, 6, 69, 0], [34, 32, 37, 0], [2, 32, 5, 0]]
    assert tile_runs(chunks[:, :0], 4).shape == (4, 0)
    assert [chunk_tile_rows(group) for group in (1, 7, 128, 200)] == [128, 18, 1, 1]


@needs_compiler
def test_what_is_on_a_device_is_taken_as_it_is_and_refused_on_a_cpu() -> None:
    operands = ScatteredKv(AttentionCase(((1, 20),)))
    rows = operands.batch.rows(2, 0)
    operands.batch = AttentionBatch.of_rows(rows, 1)
    assert operands.batch.rows(2, 0) is rows
    assert (operands.batch.num_rows, operands.batch.page_tokens, operands.batch.device) == (
        1,
        16,
        CPU,
    )
    with pytest.raises(
        ValueError, match=r"window: expected one of \[0\], whose work is known, got 7"
    ):
        operands.batch.rows(2, 7)
    for kernels in (TORCH.kernels, NATIVE[0].kernels):
        with pytest.raises(
            ValueError, match="batch: expected one made of runs, got one of rows on a device"
        ):
            operands.attend(kernels.paged_attention)


def test_what_is_kept_is_made_once() -> None:
    batch = listed_batch([[1]], [1], [1], CPU, 16)
    kept = batch.keep("key", object)
    assert batch.keep("key", object) is kept
    assert batch.keep("other key", object) is not kept
