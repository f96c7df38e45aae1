import pytest
import torch

from cpu_kernels import ALL_KERNELS, CPU_KERNELS, KERNELS_AND_DTYPES, needs_compiler
from oracles import kv_write_reference
from weft.kernels.dispatch import Kernels
from weft.kernels.kv_slots import KvSlots
from weft.kernels.native import rows as rows_native

CPU = torch.device("cpu")
SLOTS = [35, -1, 16, 0 * 16 + 17, 79, -1, 48]


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arena = torch.full((6, 3, 2, 2, 16, 8), float("nan"), dtype=dtype)
    fused = torch.randn(len(SLOTS), 6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    return arena, fused[:, 2:4], fused[:, 4:]


@pytest.mark.parametrize("kernels", ALL_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_land_in_their_slots_and_nothing_else_changes(dtype: torch.dtype, kernels: Kernels) -> None:
    arena, k, v = operands(dtype)
    kernels.kv_write(k, v, arena[:, 1, 0], arena[:, 1, 1], KvSlots.build(SLOTS, 16, CPU))
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            assert torch.equal(arena[slot // 16, 1, 0, :, slot % 16], k[token])
            assert torch.equal(arena[slot // 16, 1, 1, :, slot % 16], v[token])
    written = sum(slot >= 0 for slot in SLOTS)
    assert int((~arena.isnan()).sum()) == written * 2 * 2 * 8


@pytest.mark.parametrize("kernels", CPU_KERNELS)
@pytest.mark.parametrize("mapping", [[16, 17, 50], [-1, -1, -1]], ids=["all stored", "none stored"])
def test_cpu_versions_store_all_or_none(mapping: list[int], kernels: Kernels) -> None:
    arena, k, v = operands()
    expected = arena.clone()
    slots = KvSlots.build(mapping, 16, CPU)
    kernels.kv_write(k[:3], v[:3], arena[:, 0, 0], arena[:, 0, 1], slots)
    kv_write_reference.kv_write(k[:3], v[:3], expected[:, 0, 0], expected[:, 0, 1], slots)
    assert torch.equal(arena.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_keys_and_values_may_lie_in_different_ways(kernels: Kernels) -> None:
    arena, k, v = operands()
    expected = arena.clone()
    slots = KvSlots.build(SLOTS, 16, CPU)
    kernels.kv_write(k, v.transpose(0, 1).contiguous().transpose(0, 1), arena[:, 1, 0], arena[:, 1, 1], slots)
    kv_write_reference.kv_write(k, v, expected[:, 1, 0], expected[:, 1, 1], slots)
    assert torch.equal(arena.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS_AND_DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "page_tokens"), [(1, 24, 16), (3, 80, 64), (8, 128, 128)])
def test_every_bit_is_stored(heads: int, head_dim: int, page_tokens: int, kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    mapping = torch.randperm(5 * page_tokens, generator=generator)[:70]
    mapping[::7] = -1
    slots = KvSlots.build(mapping.numpy(), page_tokens, CPU)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    # Any bits, those of a NaN among them.
    fused = torch.randint(-(2**15), 2**15, (70, 2 * heads + 1, head_dim), generator=generator).to(bits).view(dtype)
    actual = torch.full((5, 2, 2, heads, page_tokens, head_dim), float("nan"), dtype=dtype)
    expected = actual.clone()
    k, v = fused[:, 1 : heads + 1], fused[:, heads + 1 :]
    kernels.kv_write(k, v, actual[:, 1, 0], actual[:, 1, 1], slots)
    kv_write_reference.kv_write(k, v, expected[:, 1, 0], expected[:, 1, 1], slots)
    assert torch.equal(actual.view(bits), expected.view(bits))


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_tensors_that_are_not_views_of_one_are_stored_too(kernels: Kernels) -> None:
    arena, k, v = operands()
    apart, expected = (arena[:, 1, 0].clone(), arena[:, 1, 1].clone()), arena.clone()
    slots = KvSlots.build(SLOTS, 16, CPU)
    kernels.kv_write(k.clone(), v.clone(), *apart, slots)
    kv_write_reference.kv_write(k, v, expected[:, 1, 0], expected[:, 1, 1], slots)
    for place, pages in enumerate(apart):
        assert torch.equal(pages.view(torch.int32), expected[:, 1, place].contiguous().view(torch.int32))
    # Values before keys in one tensor are no such view either.
    kernels.kv_write(v, k, arena[:, 1, 1], arena[:, 1, 0], slots)
    assert torch.equal(arena[:, 1, 1].contiguous().view(torch.int32), apart[1].view(torch.int32))


def test_slots_know_which_rows_are_stored() -> None:
    slots = KvSlots.build(SLOTS, 16, CPU)
    assert slots.mapping.tolist() == SLOTS
    assert slots.rows is not None
    assert slots.rows.tolist() == [0, 2, 3, 4, 6]
    assert slots.pages.tolist() == [2, 1, 1, 4, 3]
    assert slots.offsets.tolist() == [3, 0, 1, 15, 0]
    assert KvSlots.build([1, 2], 16, CPU).rows is None


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_misfits_are_refused(kernels: Kernels) -> None:
    arena, k, v = operands()
    k_pages, v_pages, slots = arena[:, 0, 0], arena[:, 0, 1], KvSlots.build(SLOTS, 16, CPU)
    with pytest.raises(ValueError, match=r"slot_mapping: expected shape \[7\], got \[6\]"):
        kernels.kv_write(k, v, k_pages, v_pages, KvSlots.build(SLOTS[1:], 16, CPU))
    with pytest.raises(ValueError, match=r"v: expected shape \[7, 2, 8\], got \[6, 2, 8\]"):
        kernels.kv_write(k, v[1:], k_pages, v_pages, slots)
    with pytest.raises(ValueError, match=r"k_pages: expected dtype torch\.bfloat16, got torch\.float32"):
        kernels.kv_write(k.bfloat16(), v.bfloat16(), k_pages, v_pages, slots)
    with pytest.raises(ValueError, match=r"v_pages: expected shape \[6, 2, 16, 8\], got \[5, 2, 16, 8\]"):
        kernels.kv_write(k, v, k_pages, v_pages[1:], slots)
    with pytest.raises(ValueError, match="k_pages: expected consecutive elements, got"):
        kernels.kv_write(k, v, turned(k_pages), turned(v_pages), slots)
    assert arena.isnan().all()


@needs_compiler
def test_native_kernels_refuse_what_they_cannot_read() -> None:
    arena, k, v = operands()
    k_pages, v_pages, slots = arena[:, 0, 0], arena[:, 0, 1], KvSlots.build(SLOTS, 16, CPU)
    for rows in ((turned(k), v), (k, turned(v))):
        with pytest.raises(ValueError, match="expected consecutive elements, got"):
            rows_native.kv_write(*rows, k_pages, v_pages, slots)
    with pytest.raises(ValueError, match=r"v_pages: expected strides \(1536, 128, 8, 1\), got \(256, 128, 8, 1\)"):
        rows_native.kv_write(k, v, k_pages, v_pages.contiguous(), slots)
    with pytest.raises(ValueError, match=r"expected one of torch\.float32, torch\.bfloat16, got torch\.float16"):
        rows_native.kv_write(k.half(), v.half(), arena.half()[:, 0, 0], arena.half()[:, 0, 1], slots)
    assert arena.isnan().all()


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, elements of the last dimension apart."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
