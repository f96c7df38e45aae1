"""Steps that read weights from their pages, with every implementation of the operation that runs here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_arena import BASE, BATCHES, fill
from weft.adapters.lora.layout import LoraLayout
from weft.adapters.lora.step import PagedLora, Segment, build_segments, build_tiles
from weft.kernels.dispatch import Kernels, native_kernels, torch_kernels


@pytest.mark.parametrize("make_kernels", [native_kernels, torch_kernels], ids=["native", "torch"])
@pytest.mark.parametrize("row_slots", BATCHES.values(), ids=BATCHES.keys())
def test_a_step_equals_plain_products(row_slots: list[int], make_kernels: Callable[[], Kernels]) -> None:
    lora_arena = fill()
    lora_arena.check(PagedLora(lora_arena.arena, lora_arena.tables, BASE, make_kernels()), row_slots)


def test_a_step_equals_plain_products_in_bf16() -> None:
    lora_arena = fill(torch.bfloat16)
    lora_arena.check(PagedLora(lora_arena.arena, lora_arena.tables, BASE), BATCHES["a prompt beside single rows"])


def test_a_prompt_of_many_rows_is_cut_into_the_larger_tiles() -> None:
    lora_arena = fill()
    lora_arena.check(PagedLora(lora_arena.arena, lora_arena.tables, BASE), [-1, *[0] * 300, 1, *[2] * 260])


def test_a_batch_of_the_base_only_has_no_lora_work() -> None:
    lora_arena = fill()
    paged = PagedLora(lora_arena.arena, lora_arena.tables, BASE)
    assert paged.prepare([-1, -1]) is None
    assert paged.prepare([]) is None
    lora_arena.tables.write(3, LoraLayout(1, 0, ()), [], {}, {})
    assert paged.prepare([-1, 3]) is None


row_slots_lists = st.lists(st.integers(-1, 6), max_size=80).map(sorted)


def test_segments_are_runs_of_one_adapter_and_the_base_has_none() -> None:
    assert build_segments([-1, -1, 0, 0, 0, 4]) == [Segment(0, 2, 3), Segment(4, 5, 1)]
    assert build_segments([-1]) == []
    assert build_segments([]) == []


def test_rows_that_are_not_sorted_are_refused() -> None:
    with pytest.raises(ValueError, match="slot 0 comes after slot 1"):
        build_segments([1, 0])


@settings(derandomize=True, deadline=None)
@given(row_slots_lists, st.sampled_from([1, 4, 16]))
def test_tiles_cover_every_adapter_row_exactly_once(row_slots: list[int], rows_per_tile: int) -> None:
    slots, starts, lengths = build_tiles(build_segments(row_slots), len(row_slots), 7, rows_per_tile)
    covered: dict[int, int] = {}
    for slot, start, length in zip(slots, starts, lengths, strict=True):
        assert (slot >= 0) == (1 <= length <= rows_per_tile)
        for row in range(start, start + length):
            assert row not in covered
            covered[row] = int(slot)
    assert covered == {row: slot for row, slot in enumerate(row_slots) if slot >= 0}
    assert len(slots) == -(-len(row_slots) // rows_per_tile) + min(len(row_slots), 7)
    live = int((slots >= 0).sum())
    assert (slots[live:] == -1).all()
