from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.adapters.lora.step import Segment, build_segments, build_tiles, tile_capacity

row_slots_lists = st.lists(st.integers(-1, 6), max_size=80).map(sorted)


def test_segments_are_runs_of_one_adapter_and_the_base_has_none() -> None:
    assert build_segments([-1, -1, 0, 0, 0, 4]) == [Segment(0, 2, 3), Segment(4, 5, 1)]
    assert build_segments([-1]) == []
    assert build_segments([]) == []


def test_rows_that_are_not_sorted_are_refused() -> None:
    with pytest.raises(ValueError, match="slot 0 comes after slot 1"):
        build_segments([1, 0])


@settings(derandomize=True, deadline=None)
@given(row_slots_lists, st.sampled_from([1, 4, 16]))
def test_tiles_cover_every_adapter_row_exactly_once(row_slots: list[int], rows_per_tile: int) -> None:
    slots, starts, lengths = build_tiles(build_segments(row_slots), len(row_slots), 7, rows_per_tile)
    covered: dict[int, int] = {}
    for slot, start, length in zip(slots, starts, lengths, strict=True):
        assert (slot >= 0) == (1 <= length <= rows_per_tile)
        for row in range(start, start + length):
            assert row not in covered
            covered[row] = int(slot)
    assert covered == {row: slot for row, slot in enumerate(row_slots) if slot >= 0}
    assert len(slots) == tile_capacity(len(row_slots), 7, rows_per_tile)
    live = int((slots >= 0).sum())
    assert (slots[live:] == -1).all()
