from __future__ import annotations

import psutil
import pytest
import torch

from weft.memory.arena import Arena
from weft.memory.geometry import PageGeometry, page_geometry

CPU = torch.device("cpu")


def make_geometry(**changes: int) -> PageGeometry:
    sizes = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 16, "dtype_bytes": 2, "largest_row_features": 64} | changes
    return page_geometry(**sizes)


def test_k_and_v_of_all_layers_tile_a_page_exactly_once() -> None:
    geometry = make_geometry()
    arena = Arena(geometry, 3, CPU, torch.bfloat16)
    for layer in range(geometry.num_layers):
        k, v = arena.kv(layer)
        assert k.shape == (3, 2, geometry.page_tokens, 16)
        k[1] += 1
        v[1] += 1
    assert (arena.elements[1] == 1).all()
    assert not arena.bytes[0].any()
    assert not arena.bytes[2].any()


def test_a_head_of_a_layer_is_one_contiguous_run() -> None:
    arena = Arena(make_geometry(), 3, CPU, torch.float16)
    k, _ = arena.kv(2)
    assert k[1, 1].is_contiguous()


def test_layers_of_different_groups_share_a_place_in_their_own_pages() -> None:
    geometry = make_geometry(num_layers=32, num_kv_heads=32, head_dim=128)
    assert geometry.num_groups == 4
    arena = Arena(geometry, 2, CPU, torch.bfloat16)
    assert arena.kv(1)[0].storage_offset() == arena.kv(9)[0].storage_offset()
    assert arena.kv(7)[1].storage_offset() != arena.kv(1)[1].storage_offset()


def test_poison_reads_as_nan_and_zero_clears_it() -> None:
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)):
        arena = Arena(make_geometry(dtype_bytes=size), 4, CPU, dtype)
        arena.poison([1, 3])
        assert arena.elements[[1, 3]].isnan().all()
        assert not arena.bytes[[0, 2]].any()
        arena.zero([1])
        assert not arena.bytes[1].any()


def test_the_zero_page_is_not_poisoned() -> None:
    arena = Arena(make_geometry(), 2, CPU, torch.bfloat16)
    with pytest.raises(ValueError, match="zero page"):
        arena.poison([1, 0])


def test_a_dtype_of_another_size_than_the_geometry_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        Arena(make_geometry(dtype_bytes=2), 2, CPU, torch.float32)


def test_pages_take_no_memory_before_they_are_used() -> None:
    before = psutil.Process().memory_info().rss
    arena = Arena(make_geometry(), (1 << 30) // make_geometry().page_bytes, CPU, torch.bfloat16)
    assert arena.bytes.nbytes > 900 << 20
    assert psutil.Process().memory_info().rss - before < 64 << 20
