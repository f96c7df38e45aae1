"""SGMV on the CPU with torch operators: gathers the weights of one adapter after the other from their pages.

For CPUs without kernels in C++. Gathering costs more than the arithmetic, which the kernel in C++ does without.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from manylora.kernels.sgmv import SgmvOperands, Tiles, check_operands
from manylora.lora_rows import GROUP_ROWS, PITCH_BYTES, row_pitch_bytes


def sgmv(x: Tensor, y: Tensor, operands: SgmvOperands) -> None:
    """Add the low-rank products of every tile's adapter to its rows.

    Semantics:
        for s, start, length in tiles.numbers.T, s >= 0:
            rows = start : start + length
            for slice, module in enumerate(site.modules):
                y[rows, slice] += scalings[s, layer, module] * (x[rows] @ A[s, layer, module].T) @ BT[s, layer, module]

    Args:
        x: Input of the site, [num_tokens, in_features].
        y: Output of the site, [num_tokens, sum of widths], dtype of x. Mutated.
        operands: The arena, where in it the weights lie, which rows belong to which adapter slot, site and layer.

    In this implementation tiles of one adapter that follow each other are joined to a segment; a segment costs one
    gather and one product for A of all slices, and one of each per slice for B.

    Raises:
        ValueError: An operand does not fit.
    """
    check_operands(x, operands, y)
    arena_elements, tables, tiles, site, layer = operands
    first = site.modules[0]
    span = slice(first, first + len(site.modules))
    for slot, start, end in _segments(tiles):
        ranks = tables.ranks[slot, layer, span].tolist()
        if not any(ranks):
            continue
        scalings = tables.scalings[slot, layer, span].tolist()
        offsets = tables.offsets[slot, layer, span]  # [slices, 2, max_rank / 8]
        a_starts = torch.cat(
            [_row_starts(o[0], r, site.in_features, x) for o, r in zip(offsets, ranks, strict=True)]
        )
        lora_a = _gather(arena_elements, a_starts, site.in_features)  # [sum of ranks, in]
        hidden = x[start:end] @ lora_a.T  # [rows, sum of ranks]
        column = plane = 0
        for index, (rank, width) in enumerate(zip(ranks, site.widths, strict=True)):
            if rank:
                lora_bt = _gather(
                    arena_elements, _row_starts(offsets[index, 1], rank, width, x), width
                )
                block = y[start:end, column : column + width]
                block.addmm_(hidden[:, plane : plane + rank], lora_bt, alpha=scalings[index])
            column += width
            plane += rank


def _segments(tiles: Tiles) -> Iterator[tuple[int, int, int]]:
    live = (t for t in zip(*tiles.numbers.tolist(), strict=True) if t[0] >= 0)
    for slot, run in itertools.groupby(live, key=lambda tile: tile[0]):
        start = end = -1
        for _, tile_start, tile_length in run:
            if tile_start != end:
                if start >= 0:
                    yield slot, start, end
                start = tile_start
            end = tile_start + tile_length
        yield slot, start, end


def _row_starts(offsets: Tensor, rank: int, features: int, like: Tensor) -> Tensor:
    """Start of each rank row in units, [rank], int64."""
    pitch = row_pitch_bytes(features, like.element_size()) // PITCH_BYTES
    steps = torch.arange(GROUP_ROWS) * pitch
    return (offsets[: rank // GROUP_ROWS, None].long() + steps).reshape(-1)


def _gather(arena_elements: Tensor, starts: Tensor, features: int) -> Tensor:
    # Every row starts at a multiple of the unit, so overlapping windows at that stride hold each of them whole.
    unit = PITCH_BYTES // arena_elements.element_size()
    num_windows = (arena_elements.numel() - features) // unit + 1
    return arena_elements.as_strided((num_windows, features), (unit, 1)).index_select(0, starts)
