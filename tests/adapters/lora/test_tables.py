from __future__ import annotations

import pytest
import torch

from adapters_factory import tiny_base
from manylora.adapters.lora.layout import LoraLayout, RowRun, plan_layout
from manylora.adapters.lora.step import AdapterTables
from residency_parts import tiny_geometry

BASE = tiny_base()
GEOMETRY = tiny_geometry(BASE)


def make_tables(slots: int = 3) -> AdapterTables:
    return AdapterTables(slots, BASE, 64, GEOMETRY, torch.device("cpu"))


def test_a_row_says_where_each_group_is_in_units_of_256_bytes() -> None:
    tables = make_tables()
    ranks = {(0, 0): 20, (1, 6): 3}
    layout = plan_layout(ranks, BASE, GEOMETRY)
    pages = [7 + 2 * index for index in range(layout.num_pages)]
    tables.write(1, layout, pages, ranks, {(0, 0): 0.5, (1, 6): 2.0})
    assert tables.ranks[1, 0, 0] == 24
    assert tables.ranks[1, 1, 6] == 8
    assert tables.ranks[1].count_nonzero() == 2
    assert tables.scalings[1, 0, 0] == 0.5
    for layer, module, part, group, page, units in layout.groups.T.tolist():
        offset = int(tables.offsets[1, layer, module, part, group])
        assert offset * 256 == pages[page] * GEOMETRY.page_bytes + units * 256
    assert not tables.ranks[[0, 2]].any()
    assert not tables.offsets[[0, 2]].any()


def test_a_new_adapter_leaves_nothing_of_the_old_one() -> None:
    tables = make_tables()
    for ranks in ({(0, 0): 64, (1, 1): 8}, {(0, 3): 8}):
        layout = plan_layout(ranks, BASE, GEOMETRY)
        tables.write(
            0, layout, list(range(1, layout.num_pages + 1)), ranks, dict.fromkeys(ranks, 1.0)
        )
    assert tables.ranks[0].nonzero().tolist() == [[0, 3]]
    assert not tables.offsets[0, :, [0, 1]].any()
    assert tables.touched([0]).nonzero()[1].tolist() == [3]


def test_host_and_device_tables_are_one_on_a_cpu() -> None:
    tables = make_tables()
    tables.ranks[2, 0, 0] = 8
    assert tables.host_ranks[2, 0, 0] == 8


def test_a_rank_above_the_limit_wrong_pages_and_too_large_an_arena_are_refused() -> None:
    tables = make_tables()
    ranks = {(0, 0): 72}
    layout = plan_layout(ranks, BASE, GEOMETRY)
    with pytest.raises(ValueError, match="rank 72"):
        tables.write(0, layout, list(range(layout.num_pages)), ranks, {(0, 0): 1.0})
    with pytest.raises(ValueError, match="pages"):
        tables.write(0, layout, [], {(0, 0): 8}, {(0, 0): 1.0})
    one_group = LoraLayout(1, (RowRun(0, 0, 0, 0, 1, 0, 0, 1),))
    with pytest.raises(ValueError, match="512 GiB"):
        tables.write(0, one_group, [2**31], {(0, 0): 8}, {(0, 0): 1.0})
