"""What the decoder and the runner see of adapters: one object per step that adds the deltas at each site.

`PagedLora` computes them straight from the pages with the SGMV kernels. Segments on the host, and tiles in the kernels,
say which rows of the batch use which adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weft.adapters.base_shape import SITES, BaseShape
from weft.adapters.lora.tables import AdapterTables
from weft.kernels.dispatch import Kernels, Linear, kernels_for
from weft.kernels.sgmv import LoraDelta, SgmvSite, SgmvTables, Tiles
from weft.memory.arena import Arena

DECODE_TILE_ROWS = 16
PREFILL_TILE_ROWS = 64
PREFILL_MIN_ROWS = 512
"""Batches with more rows than this use the larger tile."""


class PagedLora:
    """Prepares steps for `sgmv`. Holds no weights of its own.

    Args:
        arena: Holds the adapters' pages.
        tables: Say where in it they are.
        base: Shape of the base model.
        kernels: The operations; those of the arena's device when None.
    """

    def __init__(self, arena: Arena, tables: AdapterTables, base: BaseShape, kernels: Kernels | None = None) -> None:
        self.arena = arena
        self.tables = tables
        self.operands = SgmvTables(tables.offsets, tables.ranks, tables.scalings)
        kernels = kernels or kernels_for(arena.device, arena.dtype)
        self.sgmv, self.shrink = kernels.sgmv, kernels.shrink
        self.sites = [
            SgmvSite(base.modules[site.modules[0]].in_features, site.modules, base.site_widths(index))
            for index, site in enumerate(SITES)
        ]

    def prepare(self, row_slots: Sequence[int], /) -> LoraStep | None:
        """Prepare the adapters of a step, once for all layers.

        Args:
            row_slots: Adapter slot of each row, ascending, -1 (the base model) first.

        Returns:
            None when no row's adapter changes anything.
        """
        segments, num_rows = build_segments(row_slots), len(row_slots)
        used = self.tables.touched([segment.slot for segment in segments])
        if not used.any():
            return None
        rows_per_tile = PREFILL_TILE_ROWS if num_rows > PREFILL_MIN_ROWS else DECODE_TILE_ROWS
        tiles = build_tiles(segments, num_rows, self.tables.slots, rows_per_tile)
        slot, start, length = torch.from_numpy(tiles).to(self.arena.device)
        touched = [[bool(used[layer, list(site.modules)].any()) for site in SITES] for layer in range(len(used))]
        return LoraStep(self, Tiles(slot, start, length, rows_per_tile), touched)


class LoraStep:
    """The adapters of one step's rows, applied from their pages.

    Args:
        lora: Where the weights are.
        tiles: Which rows use which adapter.
        touched: [layers][sites] whether any adapter of the step changes the site.
    """

    def __init__(self, lora: PagedLora, tiles: Tiles, touched: Sequence[Sequence[bool]]) -> None:
        self._lora = lora
        self._tiles = tiles
        self._touched = touched

    def project(self, layer: int, site: int, linear: Linear, x: torch.Tensor) -> tuple[torch.Tensor, LoraDelta | None]:
        """The base's linear layer, and what the adapters add to it.

        Args:
            layer: Decoder layer.
            site: Index into `SITES`.
            linear: The base's layer at the site.
            x: [T, in_features], its input.

        Returns:
            [T, sum of the site's widths], and what the next operation is to add to it; None where nothing is left to
            be added.
        """
        y, lora = linear(x), self._lora
        if lora.shrink is None:
            self.apply(layer, site, x, y)
        elif self._touched[layer][site]:
            operands = lora.arena.elements, lora.operands, self._tiles, lora.sites[site], layer
            return y, lora.shrink(x, *operands)
        return y, None

    def apply(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' deltas at one site, in place.

        Args:
            layer: Decoder layer.
            site: Index into `SITES`.
            x: [T, in_features], the input of the base's linear layer.
            y: [T, sum of the site's widths], its output; rows of the base model stay as they are.
        """
        if self._touched[layer][site]:
            lora = self._lora
            lora.sgmv(x, y, lora.arena.elements, lora.operands, self._tiles, lora.sites[site], layer)


class Segment(NamedTuple):
    """Consecutive rows that use one adapter."""

    slot: int
    start: int
    length: int


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


def build_tiles(
    segments: Sequence[Segment], num_rows: int, num_slots: int, rows_per_tile: int
) -> npt.NDArray[np.int32]:
    """Cut segments into tiles of at most `rows_per_tile` rows, padded to the most that `num_rows` rows can have.

    Args:
        segments: Segments of the batch.
        num_rows: Rows of the batch.
        num_slots: Adapter slots of the tables.
        rows_per_tile: Most rows in a tile.

    Returns:
        [3, capacity]: slot, first row and number of rows of each tile; unused ones are -1, 0, 0.
    """
    capacity = -(-num_rows // rows_per_tile) + min(num_rows, num_slots)
    tiles = np.zeros((3, capacity), dtype=np.int32)
    tiles[0] = -1
    index = 0
    for segment in segments:
        stop = segment.start + segment.length
        for start in range(segment.start, stop, rows_per_tile):
            tiles[:, index] = (segment.slot, start, min(rows_per_tile, stop - start))
            index += 1
    return tiles
