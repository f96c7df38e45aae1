from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.adapters.product_cost import MIN_BANK_COLUMNS, ProductCost

COSTS = ProductCost.of(torch.bfloat16)


def cost_of(groups: list[slice], rows: list[int], weights: list[int], calls: int) -> int:
    return sum(COSTS.product(sum(rows[group]), sum(weights[group]), calls) for group in groups)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 10**7)), min_size=1, max_size=6), st.integers(1, 40))
def test_no_other_split_costs_less(adapters: list[tuple[int, int]], calls: int) -> None:
    rows, weights = [list(part) for part in zip(*adapters, strict=True)]
    best = cost_of(COSTS.partition(rows, weights, calls), rows, weights, calls)
    for cuts in range(2 ** (len(rows) - 1)):
        edges = [0, *(index + 1 for index in range(len(rows) - 1) if cuts >> index & 1), len(rows)]
        groups = [slice(start, stop) for start, stop in pairwise(edges)]
        assert best <= cost_of(groups, rows, weights, calls)


def test_small_adapters_share_a_product_and_large_ones_do_not() -> None:
    assert COSTS.partition([2] * 4, [1000] * 4, 10) == [slice(0, 4)]
    assert COSTS.partition([16] * 2, [10**9] * 2, 10) == [slice(0, 1), slice(1, 2)]


def test_groups_are_consecutive_and_complete() -> None:
    groups = COSTS.partition([4] * 20, [3 * 10**6] * 20, 10)
    assert [index for group in groups for index in range(20)[group]] == list(range(20))


def test_a_bank_is_as_wide_as_its_calls_are_dear() -> None:
    narrow, wide = ProductCost.of(torch.float32), COSTS
    assert narrow.bank_columns(10**4, 40) < wide.bank_columns(10**4, 40)
    assert wide.bank_columns(10**9, 40) == MIN_BANK_COLUMNS
    columns = wide.bank_columns(3 * 10**4, 40)
    assert columns > MIN_BANK_COLUMNS
    assert (columns & (columns - 1)) == 0
