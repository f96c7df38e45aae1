"""LoRA weights of several adapters side by side, so that one matrix product serves the rows of all of them.

A bank has columns per module, and each adapter in it has a range of them. A site's shrink weight is the A rows of all
columns of its slices stacked, times the scaling; each slice has its own expand weight, B^T. A column that an adapter
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
    """`a` laid out for products, once it is packed."""
    expand: list[Linear | None] = field(default_factory=list)
    """Per slice `bt`, laid out for products; empty before the first is."""

    @property
    def num_bytes(self) -> int:
        """Of the plain weights."""
        return self.a.nbytes + sum(bt.nbytes for bt in self.bt)


class WeightBank:
    """Columns, and the adapters that have them.

    Filling and packing go by small pieces, so that a step need not wait for a whole bank.

    Args:
        arena: Holds the adapters' pages.
        tables: Say where in it they are.
        capacity: Columns per module, multiples of 8.
    """

    def __init__(self, arena: Arena, tables: AdapterTables, capacity: npt.NDArray[np.int64]) -> None:
        self._arena = arena
        self._tables = tables
        self.dtype = arena.dtype
        self.capacity = [int(columns) for columns in capacity]
        """Columns per module."""
        self.site_columns = [sum(self.capacity[module] for module in site.modules) for site in SITES]
        self.columns: dict[AdapterKey, list[slice]] = {}
        """By adapter, its range of columns per module; empty where it changes nothing."""
        self.sites: dict[tuple[int, int], SiteWeights] = {}
        """By (layer, site); absent where no adapter changes anything."""
        self.plain_bytes = bank_bytes(arena, tables, capacity)
        """Most bytes that the weights take, without packed copies."""
        self.is_packed = False
        """Whether all weights have a packed copy."""
        self._unpacked: list[tuple[SiteWeights, int]] | None = None
        """While packing goes on: what has no packed copy yet, as a site and its slice, -1 for `a`."""

    @property
    def num_bytes(self) -> int:
        """Most bytes that the weights take, with the packed copies that there are or will be."""
        return self.plain_bytes * (2 if self.is_packed or self.is_packing else 1)

    @property
    def is_packing(self) -> bool:
        """Whether some of the weights are still to be packed."""
        return self._unpacked is not None

    def reserve(self, key: AdapterKey) -> bool:
        """Give an adapter free columns, which must then be filled for all layers and sites.

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
        self.columns[key] = ranges
        return True

    def fill(self, key: AdapterKey, layer: int, index: int) -> int:
        """Copy an adapter's weights of one layer and site from its pages into its columns; the bank is not packed.

        Returns:
            Bytes written.
        """
        site = SITES[index]
        weights = self.sites.get((layer, index))
        written = 0
        if weights is None:
            if not self._tables.host_ranks[key.slot, layer, list(site.modules)].any():
                return 0
            weights = self._allocate(layer, index)
            written = weights.num_bytes
        first = 0
        for module, bt in zip(site.modules, weights.bt, strict=True):
            columns = self.columns[key][module]
            num_groups = int(self._tables.host_ranks[key.slot, layer, module]) // GROUP_ROWS
            offsets = self._tables.host_offsets[key.slot, layer, module, :, :num_groups].tolist()
            a = weights.a[first + columns.start : first + columns.stop]
            rank = num_groups * GROUP_ROWS
            copy_rows(self._arena, offsets[0], a[:rank])
            copy_rows(self._arena, offsets[1], bt[columns][:rank])
            scaling = float(self._tables.host_scalings[key.slot, layer, module])
            if scaling != 1.0:  # into A, for rows of others meet B^T, as zeros, and that may overflow in float16
                a[:rank].mul_(scaling)
            a[rank:].zero_()
            bt[columns][rank:].zero_()
            first += self.capacity[module]
            written += a.nbytes + bt[columns].nbytes
        return written

    def remove(self, key: AdapterKey) -> None:
        """Free an adapter's columns; what is in them stays until they are filled again."""
        del self.columns[key]

    def pack_next(self, make_linear: MakeLinear) -> int:
        """Make the laid-out copy of one more weight, beside the plain one.

        Returns:
            Bytes of the copy; 0 when all weights have one, and `is_packed` is set.
        """
        if self._unpacked is None:
            self._unpacked = [
                (weights, place)
                for (_, index), weights in self.sites.items()
                for place, module in ((-1, -1), *enumerate(SITES[index].modules))
                if place == -1 or self.capacity[module]
            ]
        if not self._unpacked:
            self._unpacked, self.is_packed = None, True
            return 0
        weights, place = self._unpacked.pop()
        if place == -1:
            weights.shrink = make_linear(weights.a)
            return weights.a.nbytes
        weights.expand = weights.expand or [None] * len(weights.bt)
        weights.expand[place] = make_linear(weights.bt[place].t().contiguous())
        return weights.bt[place].nbytes

    def unpack(self) -> list[tuple[int, object]]:
        """Part with the laid-out copies; returns them with their bytes, to be freed by letting go of them."""
        copies: list[tuple[int, object]] = [
            (weights.num_bytes, (weights.shrink, weights.expand)) for weights in self.sites.values() if weights.expand
        ]
        for weights in self.sites.values():
            weights.shrink, weights.expand = None, []
        self._unpacked, self.is_packed = None, False
        return copies

    def take_apart(self) -> list[tuple[int, object]]:
        """Part with all weights of a bank that is not used again; returned as from `unpack`."""
        parts: list[tuple[int, object]] = [*self.unpack()]
        parts += [(weights.num_bytes, weights) for weights in self.sites.values()]
        self.sites = {}
        return parts

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
