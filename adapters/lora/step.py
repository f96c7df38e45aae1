"""Adapters as the kernels see them: places of their weights, tiles of rows, and one object per step that adds deltas.

`AdapterTables` has the places of the weights of each resident adapter in static tensors by adapter slot. It does not
know the owners of slots, which residency knows. Tiles, runs of consecutive rows of one adapter or of the base, say
which rows of the batch use which adapter. `PagedLora` computes the deltas from the pages with the SGMV kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from manylora.adapters.base_shape import SITES, BaseShape
from manylora.adapters.lora.layout import LoraLayout
from manylora.kernels.dispatch import Kernels, Linear, kernels_for
from manylora.kernels.sgmv import LoraDelta, SgmvOperands, SgmvSite, SgmvTables, Tiles
from manylora.lora_rows import GROUP_ROWS, PITCH_BYTES
from manylora.memory.arena import Arena
from manylora.memory.geometry import PageGeometry

BASE_SLOT = -1
DECODE_TILE_ROWS = 16
PREFILL_TILE_ROWS = 64
PREFILL_MIN_ROWS = 128
"""Smallest batch, in rows, that uses the larger tile on a GPU. The larger tile reads an adapter's weights once for four
times as many rows of a prompt. The number of rows alone decides: the kind of tile changes the order of sums, and a
row's result must not depend on the other rows of the batch."""
SIDE_ROWS = 64
"""Largest step, in rows, that leaves a GPU room to run the shrink of a site beside the base's layer."""
MAX_OFFSET = 2**31 - 1


class AdapterTables:
    """One row per adapter slot, in tensors whose addresses never change.

    Args:
        slots: Number of rows.
        base: Shape of the base model.
        max_rank: Largest rank, a multiple of 8.
        geometry: Sizes of a page.
        device: Where the kernels run.
    """

    def __init__(
        self,
        slots: int,
        base: BaseShape,
        max_rank: int,
        geometry: PageGeometry,
        device: torch.device,
    ) -> None:
        self.slots = slots
        self.base = base
        self.max_rank = max_rank
        self.geometry = geometry
        per_module = (slots, base.num_layers, len(base.modules))
        host_offsets = torch.zeros((*per_module, 2, max_rank // GROUP_ROWS), dtype=torch.int32)
        host_ranks = torch.zeros(per_module, dtype=torch.int32)
        host_scalings = torch.zeros(per_module, dtype=torch.float32)
        self.offsets = host_offsets.to(device)
        """int32 [slots, layers, modules, 2 (A, B), max_rank / 8]: start of each row group in the arena, in units of
        256 bytes."""
        self.ranks = host_ranks.to(device)
        """int32 [slots, layers, modules]: ranks, padded to a multiple of 8; 0 where the adapter changes nothing."""
        self.scalings = host_scalings.to(device)
        """float32 [slots, layers, modules]: factors of B @ A."""
        self.host_offsets: npt.NDArray[np.int32] = host_offsets.numpy()
        """`offsets` on the host, for building batches; the same memory on a CPU."""
        self.host_ranks: npt.NDArray[np.int32] = host_ranks.numpy()
        """`ranks` on the host."""
        self.host_scalings: npt.NDArray[np.float32] = host_scalings.numpy()
        """`scalings` on the host."""

    def write(
        self,
        slot: int,
        layout: LoraLayout,
        pages: Sequence[int],
        ranks: Mapping[tuple[int, int], int],
        scalings: Mapping[tuple[int, int], float],
    ) -> None:
        """Write the row of an adapter whose pages are in the arena, for steps that the calling thread launches later.

        No step that uses the slot may run. On a GPU, this waits for no step.

        Args:
            slot: Row to overwrite.
            layout: Places of the row groups in the adapter's pages.
            pages: Arena pages, `layout.num_pages` of them, in the layout's order.
            ranks: True rank by (layer, module index).
            scalings: Scaling by (layer, module index).

        Raises:
            ValueError: If a rank exceeds `max_rank`, the pages do not match the layout, or an offset overflows.
        """
        if len(pages) != layout.num_pages:
            raise ValueError(f"the layout has {layout.num_pages} pages, got {len(pages)}")
        largest = max(ranks.values(), default=0)
        if largest > self.max_rank:
            raise ValueError(f"rank {largest} exceeds the tables' {self.max_rank}")
        for table in (self.host_offsets, self.host_ranks, self.host_scalings):
            table[slot] = 0
        for (layer, module), rank in ranks.items():
            self.host_ranks[slot, layer, module] = -(-rank // GROUP_ROWS) * GROUP_ROWS
            self.host_scalings[slot, layer, module] = scalings[layer, module]
        if layout.runs:
            layer_column, module_column, part, group, page, units = layout.groups
            starts = (
                np.asarray(pages, dtype=np.int64)[page] * (self.geometry.page_bytes // PITCH_BYTES)
                + units
            )
            if starts.max() > MAX_OFFSET:
                raise ValueError(
                    f"offset {starts.max()} exceeds int32: the arena is larger than 512 GiB"
                )
            self.host_offsets[slot, layer_column, module_column, part, group] = starts
        self._publish(slot)

    def touched(self, slots: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Bool [layers, modules]: true if any of the adapters in `slots` changes the module."""
        return np.logical_or.reduce(self.host_ranks[list(slots)] > 0, axis=0)  # type: ignore[no-any-return]

    def _publish(self, slot: int) -> None:
        """Launch the copies of a row on the calling thread's stream, which is that of the steps.

        Later launches see the row, and no earlier launch is waited for: torch reuses pinned memory only after its copy
        has ended.
        """
        if self.ranks.device.type == "cpu":
            return
        hosts = (self.host_offsets, self.host_ranks, self.host_scalings)
        for table, host in zip((self.offsets, self.ranks, self.scalings), hosts, strict=True):
            row = torch.from_numpy(host[slot])
            staged = torch.empty(
                row.shape, dtype=row.dtype, pin_memory=table.device.type == "cuda"
            ).copy_(row)
            table[slot].copy_(staged, non_blocking=True)


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


@dataclass(eq=False, slots=True)
class LoraStep:
    """The adapters of one step's rows, applied from their pages."""

    lora: PagedLora
    """The weights."""
    tiles: Tiles
    """Rows of each adapter."""
    touched: Sequence[Sequence[bool]] | None
    """[layers][sites], true if an adapter of the step changes the site; None to work on all."""
    side: torch.cuda.Stream | None = None
    """Stream on which shrinks run beside the base's layers; None has them run in order."""

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
        shrink = self.lora.shrink
        if shrink is None:
            y = linear(x)
            self.apply(layer, site, x, y)
            return y, None
        operands = self._operands(layer, site)
        if operands is None:
            return linear(x), None
        if self.side is None:
            return linear(x), shrink(x, operands)
        # Each stream waits for the other, so that neither reuses memory that the other still reads.
        main = torch.cuda.current_stream(x.device)
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            delta = shrink(x, operands)
        y = linear(x)
        main.wait_stream(self.side)
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
            self.lora.sgmv(x, y, operands)

    def _operands(self, layer: int, site: int) -> SgmvOperands | None:
        """Operands at a site; None if no adapter of the step changes it."""
        if self.touched is not None and not self.touched[layer][site]:
            return None
        lora = self.lora
        return SgmvOperands(
            lora.arena.elements, lora.slot_tables, self.tiles, lora.sites[site], layer
        )


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
