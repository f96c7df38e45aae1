"""Tiles: runs of consecutive rows of one adapter or of the base, into which the kernels cut a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

DECODE_TILE_ROWS = 16
PREFILL_TILE_ROWS = 64
PREFILL_MIN_ROWS = 128
"""Smallest batch, in rows, that uses the larger tile on a GPU. The larger tile reads an adapter's weights once for four
times as many rows of a prompt. The number of rows alone decides: the kind of tile changes the order of sums, and a
row's result must not depend on the other rows of the batch."""


def tile_rows(num_rows: int) -> int:
    """Largest number of rows of a tile in a batch, or a bucket, of `num_rows` rows."""
    return PREFILL_TILE_ROWS if num_rows >= PREFILL_MIN_ROWS else DECODE_TILE_ROWS


def tile_capacity(num_rows: int, num_slots: int, rows_per_tile: int) -> int:
    """Upper bound of the tiles that rows are cut into.

    Args:
        num_rows: Rows of the batch.
        num_slots: Adapter slots of the tables; the base's rows are one more run.
        rows_per_tile: Largest number of rows in a tile.
    """
    runs = min(num_rows, num_slots + 1)
    return runs + (num_rows - runs) // rows_per_tile


def fill_tiles(
    out: npt.NDArray[np.int32], row_slots: Sequence[int] | npt.NDArray[np.int32], rows_per_tile: int
) -> int:
    """Cut all rows of a batch into tiles.

    Args:
        out: [3, capacity]: becomes slot (-1 is the base), first row and number of rows of each tile. Unused tiles at
            the end are -1, 0, 0.
        row_slots: Adapter slot of each row, ascending, -1 (the base model) first.
        rows_per_tile: Largest number of rows in a tile.

    Returns:
        Number of used tiles.

    Raises:
        ValueError: The rows are not sorted by slot, or have more tiles than there is room for.
    """
    slots = np.asarray(row_slots, dtype=np.int32)
    firsts, lengths = _runs(slots)
    counts = -(-lengths // rows_per_tile)
    ends = counts.cumsum()
    live = int(ends[-1]) if len(ends) else 0
    if live > out.shape[1]:
        raise ValueError(f"out: expected room for {live} tiles, got {out.shape[1]}")
    offsets = (np.arange(live) - np.repeat(ends - counts, counts)) * rows_per_tile
    out[0, :live] = np.repeat(slots[firsts], counts)
    out[1, :live] = np.repeat(firsts, counts) + offsets
    out[2, :live] = np.minimum(np.repeat(lengths, counts) - offsets, rows_per_tile)
    out[0, live:] = -1
    out[1:, live:] = 0
    return live


def count_tiles(row_slots: Sequence[int] | npt.NDArray[np.int32], rows_per_tile: int) -> int:
    """Number of tiles that `fill_tiles` cuts rows into."""
    return int((-(-_runs(np.asarray(row_slots, dtype=np.int32))[1] // rows_per_tile)).sum())


def _runs(slots: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First row and length of each run of rows with one slot."""
    steps = slots[1:] - slots[:-1]
    if (steps < 0).any():
        row = int(np.argmax(steps < 0))
        raise ValueError(
            f"rows must be sorted by adapter slot: slot {slots[row + 1]} comes after slot {slots[row]} in row {row + 1}"
        )
    firsts = (
        np.concatenate(([0], np.flatnonzero(steps) + 1)) if len(slots) else np.zeros(0, np.int64)
    )
    lengths = np.concatenate((firsts[1:], [len(slots)])) - firsts if len(slots) else firsts
    return firsts, lengths
