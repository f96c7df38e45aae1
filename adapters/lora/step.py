"""Adapters as the decoder and the runner see them: one object per step that adds the deltas at each site.

`PagedLora` computes the deltas from the pages with the SGMV kernels. Tiles say which rows of the batch use which
adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from manylora.adapters.base_shape import SITES, BaseShape
from manylora.adapters.lora.tables import AdapterTables
from manylora.adapters.lora.tiles import DECODE_TILE_ROWS, fill_tiles, tile_capacity, tile_rows
from manylora.kernels.dispatch import Kernels, Linear, kernels_for
from manylora.kernels.sgmv import LoraDelta, SgmvOperands, SgmvSite, SgmvTables, Tiles
from manylora.memory.arena import Arena

BASE_SLOT = -1
SIDE_ROWS = 64
"""Largest step, in rows, that leaves a GPU room to run the shrink of a site beside the base's layer."""


class PagedLora:
    """Prepares steps for `sgmv`. Holds no weights of its own.

    Args:
        arena: Arena with the adapters' pages.
        tables: Places of the adapters' weights in the arena.
        base: Shape of the base model.
        kernels: The operations; None takes those of the arena's device.
    """

    def __init__(
        self, arena: Arena, tables: AdapterTables, base: BaseShape, kernels: Kernels | None = None
    ) -> None:
        self.arena = arena
        self.tables = tables
        self.slot_tables = SgmvTables(tables.offsets, tables.ranks, tables.scalings)
        kernels = kernels or kernels_for(arena.device, arena.dtype)
        self.sgmv = kernels.sgmv
        self.shrink = kernels.shrink
        self.side = torch.cuda.Stream(arena.device) if arena.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """Stream on which shrinks of small steps run; None has them run in order."""
        self.sites = [
            SgmvSite(
                base.modules[site.modules[0]].in_features, site.modules, base.site_widths(index)
            )
            for index, site in enumerate(SITES)
        ]

    def prepare(self, row_slots: Sequence[int], /) -> LoraStep | None:
        """Prepare the adapters of a step, once for all layers.

        Args:
            row_slots: Adapter slot of each row, ascending, -1 (the base model) first.

        Returns:
            None if no row's adapter changes anything.
        """
        num_rows = len(row_slots)
        used = self.tables.touched(sorted(set(row_slots) - {BASE_SLOT}))
        if not used.any():
            return None
        # In C++, short tiles are faster for prompts too.
        rows_per_tile = DECODE_TILE_ROWS if self.shrink is None else tile_rows(num_rows)
        tiles = np.empty(
            (3, tile_capacity(num_rows, self.tables.slots, rows_per_tile)), dtype=np.int32
        )
        live = fill_tiles(tiles, row_slots, rows_per_tile)
        touched = [
            [bool(used[layer, list(site.modules)].any()) for site in SITES]
            for layer in range(len(used))
        ]
        numbers = torch.from_numpy(tiles[:, :live]).contiguous().to(self.arena.device)
        return LoraStep(self, Tiles(numbers, rows_per_tile), touched)

    def static_step(
        self, tiles: torch.Tensor, rows_per_tile: int, *, is_small: bool = False
    ) -> LoraStep:
        """A step whose rows and adapters change later, as in a captured graph. It works on all sites.

        Args:
            tiles: [3, capacity], int32, on the device, as `fill_tiles` fills it for all rows of the step.
            rows_per_tile: Largest number of rows in a tile.
            is_small: True if it never has more than `SIDE_ROWS` rows.
        """
        return LoraStep(self, Tiles(tiles, rows_per_tile), None, self.side if is_small else None)


class LoraStep:
    """The adapters of one step's rows, applied from their pages.

    Args:
        lora: The weights.
        tiles: Rows of each adapter.
        touched: [layers][sites], true if an adapter of the step changes the site; None to work on all.
        side: Stream on which shrinks run beside the base's layers; None has them run in order.
    """

    def __init__(
        self,
        lora: PagedLora,
        tiles: Tiles,
        touched: Sequence[Sequence[bool]] | None,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        self._lora = lora
        self._tiles = tiles
        self._touched = touched
        self._side = side

    def project(
        self, layer: int, site: int, linear: Linear, x: torch.Tensor
    ) -> tuple[torch.Tensor, LoraDelta | None]:
        """Apply the base's linear layer, and compute the adapters' delta.

        Args:
            layer: Decoder layer.
            site: Index into `SITES`.
            linear: The base's layer at the site.
            x: [T, in_features], its input.

        Returns:
            [T, sum of the site's widths], and the delta that the next operation must add to it. The delta is None if
            there is none, or if it is added already.
        """
        shrink = self._lora.shrink
        if shrink is None:
            y = linear(x)
            self.apply(layer, site, x, y)
            return y, None
        operands = self._operands(layer, site)
        if operands is None:
            return linear(x), None
        if self._side is None:
            return linear(x), shrink(x, operands)
        # Each stream waits for the other, so that neither reuses memory that the other still reads.
        main = torch.cuda.current_stream(x.device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            delta = shrink(x, operands)
        y = linear(x)
        main.wait_stream(self._side)
        return y, delta

    def apply(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' deltas at one site, in place.

        Args:
            layer: Decoder layer.
            site: Index into `SITES`.
            x: [T, in_features], the input of the base's linear layer.
            y: [T, sum of the site's widths], its output; rows of the base model stay as they are.
        """
        operands = self._operands(layer, site)
        if operands is not None:
            self._lora.sgmv(x, y, operands)

    def _operands(self, layer: int, site: int) -> SgmvOperands | None:
        """Operands at a site; None if no adapter of the step changes it."""
        if self._touched is not None and not self._touched[layer][site]:
            return None
        lora = self._lora
        return SgmvOperands(
            lora.arena.elements, lora.slot_tables, self._tiles, lora.sites[site], layer
        )
