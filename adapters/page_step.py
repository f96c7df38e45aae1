"""One step's rows against adapters that lie in their pages only: products with views of the pages, and no copy.

An adapter's row groups mostly lie one behind the other, so that a matrix is one view or two. A site then costs two
products or a few more per module and adapter, on weights that are not packed: more than a bank of several adapters,
but nothing has to be done before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.adapters.base_shape import SITES
from weft.adapters.page_rows import page_runs
from weft.adapters.segments import Segment
from weft.adapters.tables import AdapterTables
from weft.memory.arena import Arena
from weft.memory.geometry import GROUP_ROWS


class _PagedSlice(NamedTuple):
    """A module that an adapter changes in one layer."""

    out: slice
    """Its columns of y."""
    a: list[torch.Tensor]
    """[rows, in_features] each; together the rank rows of A."""
    bt: list[torch.Tensor]
    """[rows, out_features] each; together those of B transposed."""
    scaling: float


class PagedAdapter:
    """An adapter's matrices as views of its pages, found when they are first asked for.

    Args:
        arena: Holds the pages.
        tables: Say where in it they are; what they say of the slot must not change while this is used.
        slot: The adapter's.
    """

    def __init__(self, arena: Arena, tables: AdapterTables, slot: int) -> None:
        self._arena = arena
        self._tables = tables
        self._slot = slot
        self._sites: dict[tuple[int, int], list[_PagedSlice]] = {}

    def apply(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapter's delta at one site to all rows; shapes as of `LoraStep.apply`."""
        slices = self._sites.get((layer, site))
        if slices is None:
            slices = self._sites[layer, site] = self._find(layer, site)
        for part in slices:
            hidden = [torch.mm(x, a.t()) for a in part.a]
            h = hidden[0] if len(hidden) == 1 else torch.cat(hidden, dim=1)
            first = 0
            for bt in part.bt:
                y[:, part.out].addmm_(h[:, first : first + len(bt)], bt, alpha=part.scaling)
                first += len(bt)

    def _find(self, layer: int, site: int) -> list[_PagedSlice]:
        slices = []
        first_out = 0
        for module in SITES[site].modules:
            shape = self._tables.base.modules[module]
            num_groups = int(self._tables.host_ranks[self._slot, layer, module]) // GROUP_ROWS
            if num_groups:
                offsets = self._tables.host_offsets[self._slot, layer, module, :, :num_groups].tolist()
                slices.append(
                    _PagedSlice(
                        slice(first_out, first_out + shape.out_features),
                        page_runs(self._arena, offsets[0], shape.in_features),
                        page_runs(self._arena, offsets[1], shape.out_features),
                        float(self._tables.host_scalings[self._slot, layer, module]),
                    )
                )
            first_out += shape.out_features
        return slices


class PageStep:
    """The rows of one step whose adapters are read from their pages.

    Args:
        segments: The rows, each with its adapter.
    """

    def __init__(self, segments: Sequence[tuple[PagedAdapter, Segment]]) -> None:
        self._segments = segments

    def apply(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' deltas at one site; the contract is `LoraStep.apply`."""
        for adapter, segment in self._segments:
            rows = slice(segment.start, segment.stop)
            adapter.apply(layer, site, x[rows], y[rows])
