"""Which rows of a batch use which adapter: segments for loops on the host, tiles for kernels. Plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

DECODE_TILE_ROWS = 16
PREFILL_TILE_ROWS = 64
PREFILL_MIN_ROWS = 512
"""Batches with more rows than this use the larger tile."""


class Segment(NamedTuple):
    """Consecutive rows that use one adapter."""

    slot: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        """First row after the segment."""
        return self.start + self.length


class TileArrays(NamedTuple):
    """Segments cut into pieces; int32 [capacity] each, unused entries are -1, 0, 0."""

    slot: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]


def build_segments(row_slots: Sequence[int]) -> list[Segment]:
    """Find the segments of a batch; rows of the base model belong to none.

    Args:
        row_slots: Adapter slot of each row, ascending, -1 (the base model) first.

    Raises:
        ValueError: If the rows are not sorted by slot.
    """
    segments: list[Segment] = []
    start = 0
    previous = -1
    for slot, rows in groupby(row_slots):
        if slot < previous:
            raise ValueError(f"rows must be sorted by adapter slot: slot {slot} comes after slot {previous}")
        length = sum(1 for _ in rows)
        if slot >= 0:
            segments.append(Segment(slot, start, length))
        start += length
        previous = slot
    return segments


def tile_rows(num_rows: int) -> int:
    """Rows per tile for a batch of `num_rows` rows."""
    return PREFILL_TILE_ROWS if num_rows > PREFILL_MIN_ROWS else DECODE_TILE_ROWS


def tile_capacity(num_rows: int, num_slots: int, rows_per_tile: int) -> int:
    """Most tiles that any batch of `num_rows` rows can have."""
    return -(-num_rows // rows_per_tile) + min(num_rows, num_slots)


def build_tiles(segments: Sequence[Segment], num_rows: int, num_slots: int, rows_per_tile: int) -> TileArrays:
    """Cut segments into tiles of at most `rows_per_tile` rows, padded to `tile_capacity`.

    Args:
        segments: Segments of the batch.
        num_rows: Rows of the batch.
        num_slots: Adapter slots of the tables.
        rows_per_tile: Most rows in a tile.
    """
    capacity = tile_capacity(num_rows, num_slots, rows_per_tile)
    tiles = np.zeros((3, capacity), dtype=np.int32)
    tiles[0] = -1
    index = 0
    for segment in segments:
        for start in range(segment.start, segment.stop, rows_per_tile):
            tiles[:, index] = (segment.slot, start, min(rows_per_tile, segment.stop - start))
            index += 1
    return TileArrays(tiles[0], tiles[1], tiles[2])
