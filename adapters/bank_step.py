"""One step's rows against one bank of weights: one masked product for all of them, or a product per adapter.

Masked: every row is multiplied with every column, and what a row's adapter does not own is set to zero between shrink
and expand. It is set and not multiplied, for another adapter's weights may well overflow on this row. Per adapter: rows
and columns of one adapter at a time, on slices of the same weights. Neither depends on other rows beyond rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from weft.adapters.base_shape import SITES
from weft.adapters.product_cost import ProductCost
from weft.adapters.segments import Segment
from weft.adapters.tables import AdapterTables
from weft.adapters.weight_bank import AdapterKey, SiteWeights, WeightBank

PACKED_SPEEDUP = 1.4
"""How much faster products with packed weights are, at decode."""


class _Slice(NamedTuple):
    """A module's part of a site that some adapter of the step changes."""

    place: int
    """Which slice of the site it is."""
    module: int
    hidden: slice
    """Its columns of h."""
    out: slice
    """Its columns of y."""


class BankStep:
    """The rows of one step whose adapters are in one bank.

    Args:
        bank: The weights.
        tables: Ranks of the adapters.
        segments: The rows, ascending, each with its adapter's key.
    """

    def __init__(self, bank: WeightBank, tables: AdapterTables, segments: Sequence[tuple[AdapterKey, Segment]]) -> None:
        self._bank = bank
        self._base = tables.base
        self._costs = ProductCost.of(bank.dtype)
        self._segments = [(segment.start, segment.stop, bank.columns[key]) for key, segment in segments]
        self._rows = slice(self._segments[0][0], self._segments[-1][1])
        used = tables.touched([segment.slot for _, segment in segments])
        plans = {row.tobytes(): self._live_slices(row.tolist()) for row in used}
        self._live = [plans[row.tobytes()] for row in used]
        self._is_masked = [self._is_masked_cheaper(site) for site in range(len(SITES))]
        self._foreign = [self._foreign_columns(site) if masked else None for site, masked in enumerate(self._is_masked)]

    def apply(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' deltas at one site; the contract is `LoraStep.apply`."""
        live = self._live[layer][site]
        if live:
            weights = self._bank.sites[layer, site]
            (self._apply_masked if self._is_masked[site] else self._apply_each)(weights, site, live, x, y)

    def _apply_masked(
        self, weights: SiteWeights, site: int, live: Sequence[_Slice], x: torch.Tensor, y: torch.Tensor
    ) -> None:
        rows, foreign = self._rows, self._foreign[site]
        h = weights.shrink(x[rows]) if weights.shrink else torch.mm(x[rows], weights.a.t())
        if foreign is not None:
            h.masked_fill_(foreign, 0.0)
        for part in live:
            out = y[rows, part.out]
            expand = weights.expand[part.place] if weights.expand else None
            if expand:
                out.add_(expand(h[:, part.hidden]))
            else:
                out.addmm_(h[:, part.hidden], weights.bt[part.place])

    def _apply_each(
        self, weights: SiteWeights, _site: int, live: Sequence[_Slice], x: torch.Tensor, y: torch.Tensor
    ) -> None:
        for start, stop, columns in self._segments:
            for part in live:
                own = columns[part.module]
                if own.start == own.stop:
                    continue
                first = part.hidden.start
                h = torch.mm(x[start:stop], weights.a[first + own.start : first + own.stop].t())
                y[start:stop, part.out].addmm_(h, weights.bt[part.place][own])

    def _live_slices(self, used: Sequence[bool]) -> list[list[_Slice]]:
        """Per site, what the step's adapters change where `used` says which modules they do."""
        live: list[list[_Slice]] = []
        for site in SITES:
            slices = []
            first_hidden = first_out = 0
            for place, module in enumerate(site.modules):
                hidden = slice(first_hidden, first_hidden + self._bank.capacity[module])
                out = slice(first_out, first_out + self._base.modules[module].out_features)
                first_hidden, first_out = hidden.stop, out.stop
                if used[module]:
                    slices.append(_Slice(place, module, hidden, out))
            live.append(slices)
        return live

    def _is_masked_cheaper(self, site: int) -> bool:
        modules, costs = SITES[site].modules, self._costs
        row_weights = {m: self._base.modules[m].in_features + self._base.modules[m].out_features for m in modules}
        num_rows = self._rows.stop - self._rows.start
        all_weights = sum(self._bank.capacity[m] * row_weights[m] for m in modules)
        masked = costs.product(num_rows, all_weights, 1 + len(modules))
        each = 0
        for start, stop, columns in self._segments:
            widths = {m: columns[m].stop - columns[m].start for m in modules}
            own_weights = sum(widths[m] * row_weights[m] for m in modules)
            each += costs.product(stop - start, own_weights, 2 * sum(width > 0 for width in widths.values()))
        return masked < each * (PACKED_SPEEDUP if self._bank.is_packed else 1.0)

    def _foreign_columns(self, site: int) -> torch.Tensor | None:
        """Bool [rows, columns of the site]: columns that are not of the row's adapter. None when all are."""
        foreign = np.ones((self._rows.stop - self._rows.start, self._bank.site_columns[site]), dtype=np.bool_)
        for start, stop, columns in self._segments:
            first = 0
            for module in SITES[site].modules:
                own = columns[module]
                rows = slice(start - self._rows.start, stop - self._rows.start)
                foreign[rows, first + own.start : first + own.stop] = False
                first += self._bank.capacity[module]
        return torch.from_numpy(foreign) if foreign.any() else None
