"""Reads the rows of LoRA matrices out of arena pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.memory.arena import Arena
from weft.memory.geometry import GROUP_ROWS, row_pitch_bytes


def copy_rows(arena: Arena, offsets: Sequence[int], out: torch.Tensor) -> None:
    """Copy row groups from pages into consecutive rows.

    Args:
        arena: Holds the pages.
        offsets: Start of each group, in units of 256 bytes, in the order of the rows.
        out: [8 * len(offsets), features] of the arena's dtype.
    """
    unit = arena.geometry.unit_elements
    features = out.shape[1]
    pitch = row_pitch_bytes(features, arena.geometry.dtype_bytes) // arena.geometry.dtype_bytes
    group_units = GROUP_ROWS * pitch // unit
    elements = arena.elements.view(-1)
    first = 0
    while first < len(offsets):
        # Groups that happen to lie behind each other are copied as one.
        stop = first + 1
        while stop < len(offsets) and offsets[stop] == offsets[stop - 1] + group_units:
            stop += 1
        rows = (stop - first) * GROUP_ROWS
        run = elements.as_strided((rows, features), (pitch, 1), offsets[first] * unit)
        out[first * GROUP_ROWS : stop * GROUP_ROWS].copy_(run)
        first = stop
