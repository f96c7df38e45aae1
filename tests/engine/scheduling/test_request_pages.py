from __future__ import annotations

import pytest

from manylora.engine.scheduling.request_pages import BlockTable
from manylora.memory.geometry import PageGeometry


def geometry(num_groups: int = 1) -> PageGeometry:
    return PageGeometry(
        page_bytes=4096,
        page_tokens=16,
        num_groups=num_groups,
        layers_per_group=2,
        num_layers=2 * num_groups,
        num_kv_heads=1,
        head_dim=16,
        dtype_bytes=4,
    )


def test_blocks_needed_counts_only_what_is_missing() -> None:
    table = BlockTable(geometry())
    assert [table.blocks_needed(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    table.append([5])
    assert [table.blocks_needed(n) for n in (0, 1, 16, 17, 33)] == [0, 0, 0, 1, 2]


def test_pages_of_a_block_go_to_their_layer_groups() -> None:
    table = BlockTable(geometry(num_groups=2))
    table.append([3, 4, 7, 8])
    table.append([1, 2])
    assert [pages.tolist() for pages in table.pages] == [[3, 7, 1], [4, 8, 2]]
    assert table.by_block(1) == [7, 8, 1, 2]
    assert table.by_block(0, 2) == [3, 4, 7, 8]
    assert table.num_blocks == 3


def test_half_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="a block is 2 pages"):
        BlockTable(geometry(num_groups=2)).append([3, 4, 7])
