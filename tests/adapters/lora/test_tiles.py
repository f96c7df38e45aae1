"""Rows of a batch cut into tiles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.adapters.lora.step import fill_tiles, tile_capacity, tile_rows

NUM_SLOTS = 7
row_slots_lists = st.lists(st.integers(-1, NUM_SLOTS - 1), max_size=80).map(sorted)


@settings(derandomize=True, deadline=None)
@given(row_slots_lists, st.sampled_from([1, 4, 16]))
def test_tiles_cover_every_row_exactly_once_and_fit(
    row_slots: list[int], rows_per_tile: int
) -> None:
    capacity = tile_capacity(len(row_slots), NUM_SLOTS, rows_per_tile)
    tiles = np.full((3, capacity), 99, dtype=np.int32)
    live = fill_tiles(tiles, row_slots, rows_per_tile)
    covered = []
    for slot, start, length in tiles[:, :live].T.tolist():
        assert 1 <= length <= rows_per_tile
        covered += [(row, slot) for row in range(start, start + length)]
    assert covered == list(enumerate(row_slots))
    assert tiles[:, live:].T.tolist() == [[-1, 0, 0]] * (capacity - live)


@pytest.mark.parametrize(
    ("num_rows", "rows_per_tile", "lengths"),
    [
        (1, 16, [1]),
        (8, 16, [1] * 8),
        (40, 16, [1] * 7 + [33]),
        (100, 64, [1] * 6 + [65, 29]),
        (64, 16, [17, 17, 30]),
    ],
)
def test_the_capacity_is_reached_and_never_exceeded(
    num_rows: int, rows_per_tile: int, lengths: list[int]
) -> None:
    assert sum(lengths) == num_rows
    capacity = tile_capacity(num_rows, len(lengths) - 1, rows_per_tile)
    row_slots = [slot - 1 for slot, length in enumerate(lengths) for _ in range(length)]
    assert fill_tiles(np.empty((3, capacity), dtype=np.int32), row_slots, rows_per_tile) <= capacity
    worst = [1] * (len(lengths) - 1) + [num_rows - len(lengths) + 1]
    row_slots = [slot - 1 for slot, length in enumerate(worst) for _ in range(length)]
    assert fill_tiles(np.empty((3, capacity), dtype=np.int32), row_slots, rows_per_tile) == capacity


def test_rows_that_are_not_sorted_and_too_little_room_are_refused() -> None:
    with pytest.raises(ValueError, match="slot 0 comes after slot 1 in row 2"):
        fill_tiles(np.empty((3, 9), dtype=np.int32), [-1, 1, 0], 16)
    with pytest.raises(ValueError, match="expected room for 3 tiles, got 2"):
        fill_tiles(np.empty((3, 2), dtype=np.int32), [-1, 0, 1], 16)


def test_a_prompt_takes_the_larger_tile_in_a_step_of_the_default_size() -> None:
    assert tile_rows(512) == 64
    assert {tile_rows(num_rows) for num_rows in range(1, 65)} == {16}
