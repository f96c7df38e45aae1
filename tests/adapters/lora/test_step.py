"""Steps that read weights from their pages, with every implementation of the operation that runs here."""

from __future__ import annotations

import pytest
import torch

from lora_arena import BASE, BATCHES, fill
from oracles import ORACLES
from weft.adapters.lora.layout import LoraLayout
from weft.adapters.lora.step import PagedLora
from weft.kernels.dispatch import Sgmv
from weft.kernels.native import sgmv as sgmv_native
from weft.kernels.plain import sgmv as sgmv_cpu

OPERATIONS = {"native": sgmv_native.sgmv, "torch": sgmv_cpu.sgmv, "reference": ORACLES.sgmv}


@pytest.mark.parametrize("sgmv", OPERATIONS.values(), ids=OPERATIONS.keys())
@pytest.mark.parametrize("row_slots", BATCHES.values(), ids=BATCHES.keys())
def test_a_step_equals_plain_products(row_slots: list[int], sgmv: Sgmv) -> None:
    lora_arena = fill()
    lora_arena.check(PagedLora(lora_arena.arena, lora_arena.tables, BASE, sgmv), row_slots)


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
