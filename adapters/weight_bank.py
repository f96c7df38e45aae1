"""LoRA weights of several adapters side by side, so that one matrix product serves the rows of all of them.

A bank has columns per module, and each adapter in it has a range of them. A site's shrink weight is the A rows of all
columns of its slices stacked; each slice has its own expand weight, B^T times the scaling. A column that an adapter
does not fill in some layer is zero there. Knows neither rows nor steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from weft.adapters.base_shape import SITES
from weft.adapters.page_rows import copy_rows
from weft.adapters.tables import AdapterTables
from weft.memory.arena import Arena
from weft.memory.geometry import GROUP_ROWS

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x [rows, in] to a new [rows, out]: a linear layer without bias."""
MakeLinear = Callable[[torch.Tensor], Linear]
"""Lays a weight [out, in] out for fast products; the result may hold a copy."""


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """An adapter slot as of one generation, so one adapter's weights for certain."""

    slot: int
    generation: int


@dataclass(slots=True)
class SiteWeights:
    """One layer's site: all columns of the bank."""

    a: torch.Tensor
    """[columns of the site, in_features]."""
    bt: list[torch.Tensor]
    """Per slice [columns of the slice, out_features]."""
    shrink: Linear | None = None
    """`a` laid out for products, when the bank is packed."""
    expand: list[Linear | None] = field(default_factory=list)
    """Per slice `bt`, laid out for products."""


class WeightBank:
    """Columns, and the adapters that have them.

    Args:
        arena: Holds the adapters' pages.
        tables: Say where in it they are.
        capacity: Columns per module, multiples of 8.
    """

    def __init__(self, arena: Arena, tables: AdapterTables, capacity: npt.NDArray[np.int64]) -> None:
        self._arena = arena
        self._tables = tables
        self.capacity = [int(columns) for columns in capacity]
        """Columns per module."""
        self.site_columns = [sum(self.capacity[module] for module in site.modules) for site in SITES]
        self.columns: dict[AdapterKey, list[slice]] = {}
        """By adapter, its range of columns per module; empty where it changes nothing."""
        self.sites: dict[tuple[int, int], SiteWeights] = {}
        """By (layer, site); absent where no adapter changes anything."""
        self.num_bytes = bank_bytes(arena, tables, capacity)
        """Most bytes that the weights take, with their packed copies."""
        self.is_packed = False

    def add(self, key: AdapterKey) -> bool:
        """Copy an adapter's weights from its pages into free columns.

        Returns:
            False, and nothing done, when there are not enough free columns next to each other.
        """
        widths = column_widths(self._tables, key.slot)
        ranges = []
        for module, width in enumerate(widths):
            start = self._find_free(module, int(width))
            if start is None:
                return False
            ranges.append(slice(start, start + int(width)))
        self.unpack()
        self.columns[key] = ranges
        ranks = self._tables.host_ranks[key.slot]
        for layer in range(self._tables.base.num_layers):
            for index, site in enumerate(SITES):
                modules = [module for module in site.modules if ranks[layer, module]]
                if modules or (layer, index) in self.sites:
                    self._fill(layer, index, key.slot, ranges)
        return True

    def remove(self, key: AdapterKey) -> None:
        """Free an adapter's columns; what is in them stays until they are filled again."""
        del self.columns[key]

    def pack(self, make_linear: MakeLinear) -> None:
        """Make laid-out copies of all weights, beside the plain ones."""
        for (_, index), weights in self.sites.items():
            weights.shrink = make_linear(weights.a)
            weights.expand = [
                make_linear(bt.t().contiguous()) if self.capacity[module] else None
                for module, bt in zip(SITES[index].modules, weights.bt, strict=True)
            ]
        if not self.is_packed:
            self.num_bytes *= 2
            self.is_packed = True

    def unpack(self) -> None:
        """Drop the laid-out copies."""
        if self.is_packed:
            self.num_bytes //= 2
            self.is_packed = False
            for weights in self.sites.values():
                weights.shrink, weights.expand = None, []

    def _find_free(self, module: int, width: int) -> int | None:
        if width == 0:
            return 0
        taken = sorted((ranges[module].start, ranges[module].stop) for ranges in self.columns.values())
        start = 0
        for first, stop in taken:
            if first - start >= width:
                break
            start = max(start, stop)
        return start if self.capacity[module] - start >= width else None

    def _fill(self, layer: int, index: int, slot: int, ranges: list[slice]) -> None:
        site = SITES[index]
        weights = self.sites.get((layer, index)) or self._allocate(layer, index)
        first = 0
        for module, bt in zip(site.modules, weights.bt, strict=True):
            columns = ranges[module]
            num_groups = int(self._tables.host_ranks[slot, layer, module]) // GROUP_ROWS
            offsets = self._tables.host_offsets[slot, layer, module, :, :num_groups].tolist()
            a = weights.a[first + columns.start : first + columns.stop]
            rank = num_groups * GROUP_ROWS
            copy_rows(self._arena, offsets[0], a[:rank])
            copy_rows(self._arena, offsets[1], bt[columns][:rank])
            scaling = float(self._tables.host_scalings[slot, layer, module])
            if scaling != 1.0:
                bt[columns][:rank].mul_(scaling)
            a[rank:].zero_()
            bt[columns][rank:].zero_()
            first += self.capacity[module]

    def _allocate(self, layer: int, index: int) -> SiteWeights:
        site, modules = SITES[index], self._tables.base.modules
        a = torch.zeros((self.site_columns[index], modules[site.modules[0]].in_features), dtype=self._arena.dtype)
        bt = [torch.zeros((self.capacity[m], modules[m].out_features), dtype=self._arena.dtype) for m in site.modules]
        weights = self.sites[layer, index] = SiteWeights(a, bt)
        return weights


def column_widths(tables: AdapterTables, slot: int) -> npt.NDArray[np.int64]:
    """Columns that an adapter takes in a bank, per module: its largest rank in any layer."""
    widths: npt.NDArray[np.int64] = tables.host_ranks[slot].max(axis=0).astype(np.int64)
    return widths


def bank_bytes(arena: Arena, tables: AdapterTables, capacity: npt.NDArray[np.int64]) -> int:
    """Most bytes of an unpacked bank with so many columns per module."""
    modules = tables.base.modules
    row_bytes = np.array([(m.in_features + m.out_features) * arena.dtype.itemsize for m in modules], dtype=np.int64)
    return int((capacity * row_bytes).sum()) * tables.base.num_layers
