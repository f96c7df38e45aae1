"""The LoRA work of a step: adapters straight from their pages, by the SGMV kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weft.adapters.base_shape import SITES, BaseShape
from weft.adapters.lora_step import LoraStep
from weft.adapters.segments import build_segments, build_tiles, tile_rows
from weft.adapters.tables import AdapterTables
from weft.kernels.dispatch import Sgmv, kernels_for
from weft.kernels.sgmv import SgmvSite, SgmvTables, Tiles
from weft.memory.arena import Arena


class PagedLora:
    """Prepares steps for `sgmv`. Holds no weights of its own.

    Args:
        arena: Holds the adapters' pages.
        tables: Say where in it they are.
        base: Shape of the base model.
        sgmv: The operation; that of the arena's device when None.
    """

    def __init__(self, arena: Arena, tables: AdapterTables, base: BaseShape, sgmv: Sgmv | None = None) -> None:
        self.arena = arena
        self.tables = tables
        self.operands = SgmvTables(tables.offsets, tables.ranks, tables.scalings)
        self.sgmv = sgmv or kernels_for(arena.device, arena.dtype).sgmv
        self.sites = [
            SgmvSite(base.modules[site.modules[0]].in_features, site.modules, base.site_widths(index))
            for index, site in enumerate(SITES)
        ]

    def prepare(self, row_slots: Sequence[int], /) -> LoraStep | None:
        """Prepare the adapters of a step, once for all layers; the contract is `LoraBatcher.prepare`."""
        segments, num_rows = build_segments(row_slots), len(row_slots)
        used = self.tables.touched([segment.slot for segment in segments])
        if not used.any():
            return None
        rows_per_tile = tile_rows(num_rows)
        arrays = build_tiles(segments, num_rows, self.tables.slots, rows_per_tile)
        slot, start, length = torch.from_numpy(np.stack(arrays)).to(self.arena.device)
        touched = [[bool(used[layer, list(site.modules)].any()) for site in SITES] for layer in range(len(used))]
        return PagedStep(self, Tiles(slot, start, length, rows_per_tile), touched)


class PagedStep:
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

    def apply(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' deltas at one site; the contract is `LoraStep.apply`."""
        if self._touched[layer][site]:
            lora = self._lora
            lora.sgmv(x, y, lora.arena.elements, lora.operands, self._tiles, lora.sites[site], layer)
