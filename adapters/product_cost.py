"""What a product of few rows with LoRA weights costs on a CPU, in multiply-adds, for choosing between ways to do it.

Measured on two cores of an AVX512-bf16 EPYC with torch 2.13, in bf16 with packed weights, with adapters on all linear
layers of a 0.5B model and 32 rows: 39, 36 and 50 ms for 1, 2 and 4 groups of 240 ranks in all, 21, 31 and 40 ms for 64
ranks. That fits 37 us a call, 173 GMAC/s, and a weight's way from memory worth 6 rows that are multiplied with it.
Within a step, where caches hold other things, calls take longer still.
"""

from __future__ import annotations

from collections.abc import Sequence

CALL_MACS = 6_500_000
LOAD_ROWS = 6
MAX_DECODE_ROWS = 16
"""Rows per adapter that a partition reckons with; prompts are there for a few steps only."""


def product_cost(num_rows: int, num_weights: int, num_calls: int) -> int:
    """Cost of multiplying rows with weights (their number of elements) in so many calls."""
    return (num_rows + LOAD_ROWS) * num_weights + num_calls * CALL_MACS


def partition(rows: Sequence[int], weights: Sequence[int], calls: int) -> list[slice]:
    """Split adapters into consecutive groups, so that masked products of each group's rows cost least in all.

    One group multiplies every row with every adapter's weights; a group per adapter multiplies no row in vain but needs
    the most calls.

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
            group = product_cost(sum(counted[start:stop]), sum(weights[start:stop]), calls)
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
