from collections.abc import Callable

import pytest
import torch

from weft.kernels import kv_write_cpu, kv_write_reference
from weft.kernels.kv_slots import KvSlots

CPU = torch.device("cpu")
SLOTS = [35, -1, 16, 0 * 16 + 17, 79, -1, 48]


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arena = torch.full((6, 3, 2, 2, 16, 8), float("nan"), dtype=dtype)
    fused = torch.randn(len(SLOTS), 6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    return arena, fused[:, 2:4], fused[:, 4:]


@pytest.mark.parametrize("write", [kv_write_cpu.kv_write, kv_write_reference.kv_write], ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_land_in_their_slots_and_nothing_else_changes(write: Callable[..., None], dtype: torch.dtype) -> None:
    arena, k, v = operands(dtype)
    write(k, v, arena[:, 1, 0], arena[:, 1, 1], KvSlots.build(SLOTS, 16, CPU))
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            assert torch.equal(arena[slot // 16, 1, 0, :, slot % 16], k[token])
            assert torch.equal(arena[slot // 16, 1, 1, :, slot % 16], v[token])
    written = sum(slot >= 0 for slot in SLOTS)
    assert int((~arena.isnan()).sum()) == written * 2 * 2 * 8


@pytest.mark.parametrize("mapping", [[16, 17, 50], [-1, -1, -1]], ids=["all stored", "none stored"])
def test_the_cpu_version_stores_all_or_none(mapping: list[int]) -> None:
    arena, k, v = operands()
    expected = arena.clone()
    slots = KvSlots.build(mapping, 16, CPU)
    kv_write_cpu.kv_write(k[:3], v[:3], arena[:, 0, 0], arena[:, 0, 1], slots)
    kv_write_reference.kv_write(k[:3], v[:3], expected[:, 0, 0], expected[:, 0, 1], slots)
    assert torch.equal(arena.view(torch.int32), expected.view(torch.int32))


def test_tensors_that_are_not_views_of_one_are_stored_too() -> None:
    arena, k, v = operands()
    apart, expected = (arena[:, 1, 0].clone(), arena[:, 1, 1].clone()), arena.clone()
    slots = KvSlots.build(SLOTS, 16, CPU)
    kv_write_cpu.kv_write(k.clone(), v.clone(), *apart, slots)
    kv_write_reference.kv_write(k, v, expected[:, 1, 0], expected[:, 1, 1], slots)
    for place, pages in enumerate(apart):
        assert torch.equal(pages.view(torch.int32), expected[:, 1, place].contiguous().view(torch.int32))
    # Values before keys in one tensor are no such view either.
    kv_write_cpu.kv_write(v, k, arena[:, 1, 1], arena[:, 1, 0], slots)
    assert torch.equal(arena[:, 1, 1].contiguous().view(torch.int32), apart[1].view(torch.int32))


def test_slots_know_which_rows_are_stored() -> None:
    slots = KvSlots.build(SLOTS, 16, CPU)
    assert slots.mapping.tolist() == SLOTS
    assert slots.rows is not None
    assert slots.rows.tolist() == [0, 2, 3, 4, 6]
    assert slots.pages.tolist() == [2, 1, 1, 4, 3]
    assert slots.offsets.tolist() == [3, 0, 1, 15, 0]
    assert KvSlots.build([1, 2], 16, CPU).rows is None


def test_misfits_are_refused() -> None:
    arena, k, v = operands()
    with pytest.raises(ValueError, match=r"slot_mapping: expected shape \[7\], got \[6\]"):
        kv_write_cpu.kv_write(k, v, arena[:, 0, 0], arena[:, 0, 1], KvSlots.build(SLOTS[1:], 16, CPU))
    with pytest.raises(ValueError, match=r"v: expected shape \[7, 2, 8\], got \[6, 2, 8\]"):
        kv_write_cpu.kv_write(k, v[1:], arena[:, 0, 0], arena[:, 0, 1], KvSlots.build(SLOTS, 16, CPU))
