"""Plans become rows: sorted by adapter slot, with every token's place."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from manylora.adapters.residency.entry import SlotLease
from manylora.engine.execution.packed_step import PackedStep, host_rows, host_slots, pack_step
from manylora.engine.model.decoder import StepRows
from manylora.engine.model.linear import padded_rows
from manylora.engine.scheduling.plan import Chunk, StepPlan
from manylora.errors import EngineError, PageAccountingError
from manylora.memory.geometry import PageGeometry

CPU = torch.device("cpu")
GEOMETRY = PageGeometry(
    page_bytes=4096,
    page_tokens=4,
    num_groups=2,
    layers_per_group=1,
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    dtype_bytes=4,
)
RED = SlotLease(slot=0, generation=3, digest="red")
BLUE = SlotLease(slot=2, generation=1, digest="blue")


def chunk(
    tokens: list[int], start: int, tables: list[list[int]], adapter: SlotLease | None = None
) -> Chunk:
    return Chunk(request_id="r", token_ids=tokens, start=start, block_table=tables, adapter=adapter)


@dataclass
class Batch:
    step: PackedStep
    rows: StepRows
    row_slots: list[int]


def build(*chunks: Chunk) -> Batch:
    step = pack_step(StepPlan(step=1, chunks=list(chunks)), GEOMETRY, 100)
    rows = host_rows(step, GEOMETRY.page_tokens, CPU)
    return Batch(step, rows, host_slots(step, rows))


def test_rows_stand_in_order_of_their_adapter_slot_with_the_base_first() -> None:
    batch = build(
        chunk([1, 2], 0, [[10], [20]], BLUE),
        chunk([3], 5, [[11, 12], [21, 22]]),
        chunk([4, 5, 6], 0, [[13], [23]], RED),
        chunk([7], 1, [[14], [24]], BLUE),
        chunk([8], 0, [[15], [25]]),
    )
    assert batch.rows.tokens.tolist() == [3, 8, 4, 5, 6, 1, 2, 7]
    assert batch.rows.positions.tolist() == [5, 0, 0, 1, 2, 0, 1, 1]
    assert batch.row_slots == [-1, -1, 0, 0, 0, 2, 2, 2]
    assert batch.step.chunk_rows == [5, 0, 2, 7, 1]
    assert batch.step.adapters == {0: RED, 2: BLUE}


def test_every_token_has_its_place_in_each_layer_group() -> None:
    batch = build(
        chunk(list(range(6)), 3, [[10, 11, 12], [20, 21, 22]]),
        chunk([9], 8, [[1, 2, 3], [4, 5, 6]]),
    )
    assert batch.rows.slot_mapping[0].tolist() == [43, 44, 45, 46, 47, 48, 12]
    assert batch.rows.slot_mapping[1].tolist() == [83, 84, 85, 86, 87, 88, 24]


def test_attention_sees_each_request_up_to_its_last_token() -> None:
    attention = build(
        chunk([1, 2, 3], 6, [[10, 11, 12], [20, 21, 22]]), chunk([9], 0, [[1], [4]])
    ).rows.attention
    for each in attention:
        assert each.runs.T.tolist() == [[0, 3, 6, 0], [3, 1, 0, 3]]
    assert attention[0].block_table.tolist() == [10, 11, 12, 1]
    assert attention[1].block_table.tolist() == [20, 21, 22, 4]


def test_a_lone_row_is_padded_to_two_with_a_row_that_is_not_stored() -> None:
    batch = build(chunk([9], 4, [[1, 2], [3, 4]], RED))
    assert batch.row_slots == [0, 0]
    assert batch.rows.slot_mapping[0].tolist() == [8, -1]
    assert batch.rows.attention[0].num_rows == 1


def test_a_lone_chunk_of_several_rows_is_not_padded() -> None:
    assert build(chunk([9, 8], 0, [[1], [3]])).row_slots == [-1, -1]


def test_a_large_step_is_padded_once_to_what_packed_weights_take_as_it_is() -> None:
    pages = [[*range(10, 19)], [*range(20, 29)]]
    batch = build(chunk([9], 0, [[1], [3]]), chunk([*range(1, 34)], 0, pages, BLUE))
    assert len(batch.row_slots) == padded_rows(34) == 36
    assert batch.row_slots == [-1] + [2] * 35
    assert batch.rows.attention[0].num_rows == 34
    assert (batch.rows.slot_mapping[0] < 0).tolist() == [False] * 34 + [True] * 2


@pytest.mark.parametrize("chunks", [[], [chunk([], 0, [[1], [2]])]])
def test_a_step_without_tokens_is_refused(chunks: list[Chunk]) -> None:
    with pytest.raises(EngineError, match="no chunk"):
        build(*chunks)


@pytest.mark.parametrize(
    "tables",
    [[[1], [2, 3]], [[1, 2], [3, 0]], [[1, 100], [2, 3]], [[100, 1], [2, 3]], [[-1, 1], [2, 3]]],
    ids=["too short", "zero page", "page too large", "earlier page too large", "negative page"],
)
def test_block_tables_that_cannot_be_meant_are_refused(tables: list[list[int]]) -> None:
    with pytest.raises(PageAccountingError):
        build(chunk([1, 2], 4, tables))


def test_two_owners_of_one_adapter_slot_are_refused() -> None:
    reused = SlotLease(slot=0, generation=4, digest="green")
    with pytest.raises(EngineError, match="two owners"):
        build(chunk([1], 0, [[1], [2]], RED), chunk([1], 0, [[3], [4]], reused))
