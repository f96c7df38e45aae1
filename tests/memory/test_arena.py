from __future__ import annotations

import psutil
import pytest
import torch

from manylora.memory.arena import Arena
from manylora.memory.geometry import PageGeometry, page_geometry

CPU = torch.device("cpu")


def make_geometry(*, is_kv_int8: bool = False, **changes: int) -> PageGeometry:
    sizes = {
        "num_layers": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "dtype_bytes": 2,
        "largest_row_features": 64,
    } | changes
    return page_geometry(**sizes, is_kv_int8=is_kv_int8)


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


def test_int8_and_its_scales_tile_a_page_exactly_once() -> None:
    geometry = make_geometry(is_kv_int8=True)
    arena = Arena(geometry, 3, CPU, torch.bfloat16)
    for layer in range(geometry.num_layers):
        scales = arena.kv_scales(layer)
        assert scales is not None
        for values, of_values in zip(arena.kv(layer), scales, strict=True):
            assert values.shape == (3, 2, geometry.page_tokens, 16)
            assert of_values.shape == values.shape[:3]
            assert (values.dtype, of_values.dtype) == (torch.int8, torch.float32)
            values[1] += 1
            of_values[1] += 1
    num_vectors = 4 * 2 * 2 * geometry.page_tokens
    assert (arena.bytes[1, : num_vectors * 16] == 1).all()
    assert (arena.bytes.view(torch.float32)[1, num_vectors * 4 : num_vectors * 5] == 1).all()
    assert not arena.bytes[1, num_vectors * 20 :].any()
    assert not arena.bytes[[0, 2]].any()


def test_only_int8_has_scales() -> None:
    assert Arena(make_geometry(), 2, CPU, torch.bfloat16).kv_scales(0) is None


@pytest.mark.parametrize("dtype_bytes", [2, 4])
@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "head_dim"),
    [(32, 8, 128), (24, 2, 64), (32, 32, 128), (3, 2, 24), (28, 4, 80)],
)
def test_int8_keeps_the_bytes_of_a_page_but_for_the_scales(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int
) -> None:
    sizes = {
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "dtype_bytes": dtype_bytes,
    }
    wide, int8 = (make_geometry(**sizes, is_kv_int8=is_kv_int8) for is_kv_int8 in (False, True))
    assert int8.page_tokens == wide.page_tokens * dtype_bytes
    assert int8.num_groups == wide.num_groups
    assert int8.page_bytes % 256 == int8.page_bytes % head_dim == 0
    with_scales = wide.page_bytes * (head_dim + 4) // head_dim
    assert with_scales <= int8.page_bytes < with_scales + 256 * head_dim
    arena = Arena(int8, 2, CPU, {2: torch.bfloat16, 4: torch.float32}[dtype_bytes])
    scales = arena.kv_scales(int8.num_layers - 1)
    assert scales is not None
    scales[1][1].fill_(1)  # the last of the page


def test_a_read_of_poisoned_int8_shows_in_its_scale() -> None:
    arena = Arena(make_geometry(is_kv_int8=True), 3, CPU, torch.bfloat16)
    arena.poison([2])
    scales = arena.kv_scales(3)
    assert scales is not None
    assert scales[0][2].isnan().all()
    assert scales[1][2].isnan().all()
    assert not scales[1][1].any()


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


def test_pages_listed_on_the_device_become_zeros_and_no_others() -> None:
    arena = Arena(make_geometry(), 5, CPU, torch.bfloat16)
    arena.poison([1, 2, 3, 4])
    arena.zero_listed(torch.tensor([4, 2], dtype=torch.int32))
    assert [bool(page.any()) for page in arena.bytes] == [False, True, False, True, False]
