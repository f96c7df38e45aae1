"""The rows of LoRA matrices where they lie: in arena pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.memory.arena import Arena
from weft.memory.geometry import GROUP_ROWS, row_pitch_bytes


def page_runs(arena: Arena, offsets: Sequence[int], features: int) -> list[torch.Tensor]:
    """Views of consecutive row groups, as few as there are: groups that lie behind each other are one.

    Args:
        arena: Holds the pages.
        offsets: Start of each group, in units of 256 bytes, in the order of the rows.
        features: Length of a row.

    Returns:
        [8 * groups, features] each, of the arena's dtype.
    """
    unit = arena.geometry.unit_elements
    pitch = row_pitch_bytes(features, arena.geometry.dtype_bytes) // arena.geometry.dtype_bytes
    group_units = GROUP_ROWS * pitch // unit
    elements = arena.elements.view(-1)
    runs = []
    first = 0
    while first < len(offsets):
        stop = first + 1
        while stop < len(offsets) and offsets[stop] == offsets[stop - 1] + group_units:
            stop += 1
        runs.append(elements.as_strided(((stop - first) * GROUP_ROWS, features), (pitch, 1), offsets[first] * unit))
        first = stop
    return runs


def copy_rows(arena: Arena, offsets: Sequence[int], out: torch.Tensor) -> None:
    """Copy row groups from pages into consecutive rows.

    Args:
        arena: Holds the pages.
        offsets: As of `page_runs`.
        out: [8 * len(offsets), features] of the arena's dtype.
    """
    first = 0
    for run in page_runs(arena, offsets, out.shape[1]):
        out[first : first + len(run)].copy_(run)
        first += len(run)
