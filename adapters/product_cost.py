"""What a product of few rows with LoRA weights costs on a CPU, in multiply-adds, for choosing between ways to do it.

A call costs something by itself, a weight's way from memory is worth some rows that are multiplied with it, and the
rest is arithmetic. Fitted on two cores of an AVX512-bf16 EPYC with torch 2.13: to packed bfloat16 weights of a 0.5B
model, and to plain float32 ones, whose products begin sooner and take longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

LOAD_ROWS = 6
MAX_DECODE_ROWS = 16
"""Rows per adapter that a partition reckons with; prompts are there for a few steps only."""
MIN_BANK_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class ProductCost:
    """Costs in one number format."""

    call_macs: int
    """What a call costs by itself."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> ProductCost:
        """The costs of products in `dtype`."""
        return cls(700_000 if dtype == torch.float32 else 6_500_000)

    def product(self, num_rows: int, num_weights: int, num_calls: int) -> int:
        """Cost of multiplying rows with weights (their number of elements) in so many calls."""
        return (num_rows + LOAD_ROWS) * num_weights + num_calls * self.call_macs

    def bank_columns(self, column_weights: int, calls: int) -> int:
        """Columns of a bank for adapters that come and go: as many as cost about what another bank's calls do.

        Args:
            column_weights: Weights of one column of all modules.
            calls: Calls that a bank needs.
        """
        columns = calls * self.call_macs // ((MAX_DECODE_ROWS + LOAD_ROWS) * column_weights)
        return max(MIN_BANK_COLUMNS, 1 << columns.bit_length() - 1 if columns else 0)

    def partition(self, rows: Sequence[int], weights: Sequence[int], calls: int) -> list[slice]:
        """Split adapters into consecutive groups, so that masked products of each group's rows cost least in all.

        One group multiplies every row with every adapter's weights; a group per adapter multiplies no row in vain but
        needs the most calls.

        Args:
            rows: Rows of each adapter.
            weights: Weights of each adapter, elements.
            calls: Calls that a group needs.
        """
        counted = [min(count, MAX_DECODE_ROWS) for count in rows]
        best = [0]
        starts = [0]
        for stop in range(1, len(rows) + 1):
            costs = []
            for start in range(stop):
                group = self.product(sum(counted[start:stop]), sum(weights[start:stop]), calls)
                costs.append(best[start] + group)
            start = min(range(stop), key=costs.__getitem__)
            best.append(costs[start])
            starts.append(start)
        groups: list[slice] = []
        stop = len(rows)
        while stop:
            groups.append(slice(starts[stop], stop))
            stop = starts[stop]
        return groups[::-1]
