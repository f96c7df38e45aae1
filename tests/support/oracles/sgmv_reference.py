"""The oracle of SGMV: one tile, one slice and one weight row at a time, in float64; slow on purpose."""

from __future__ import annotations

import torch

from weft.kernels.sgmv import GROUP_ROWS, UNIT_BYTES, SgmvSite, SgmvTables, Tiles, check_operands, row_pitch_units


def sgmv(
    x: torch.Tensor,
    y: torch.Tensor,
    arena_elements: torch.Tensor,
    tables: SgmvTables,
    tiles: Tiles,
    site: SgmvSite,
    layer: int,
) -> None:
    """`weft.kernels.plain.sgmv.sgmv` states what it computes."""
    check_operands(x, y, arena_elements, tables, tiles, site, layer)
    flat = arena_elements.reshape(-1)
    for slot, start, length in zip(tiles.slot.tolist(), tiles.start.tolist(), tiles.length.tolist(), strict=True):
        if slot < 0:
            continue
        column = 0
        for module, width in zip(site.modules, site.widths, strict=True):
            rank = int(tables.ranks[slot, layer, module])
            block = y[start : start + length, column : column + width]
            column += width
            if rank == 0:
                continue
            offsets = tables.offsets[slot, layer, module].tolist()
            lora_a = _rows(flat, offsets[0], rank, site.in_features)  # [rank, in]
            lora_bt = _rows(flat, offsets[1], rank, width)  # [rank, out]
            delta = (
                x[start : start + length].double() @ lora_a.T @ lora_bt * float(tables.scalings[slot, layer, module])
            )
            block.copy_(block.double() + delta)


def _rows(flat: torch.Tensor, offsets: list[int], rank: int, features: int) -> torch.Tensor:
    unit = UNIT_BYTES // flat.element_size()
    pitch = row_pitch_units(features, flat.element_size())
    starts = [(offsets[row // GROUP_ROWS] + row % GROUP_ROWS * pitch) * unit for row in range(rank)]
    return torch.stack([flat[start : start + features] for start in starts]).double()
