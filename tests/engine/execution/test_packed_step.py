"""Plans as arrays, against the same said with loops over tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from manylora.adapters.residency.entry import SlotLease
from manylora.engine.execution.packed_step import PackedStep, pack_step
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.scheduling.plan import Chunk, SampleSpec, StepPlan
from manylora.errors import EngineError
from manylora.kernels.attention_batch import (
    MAX_ITEM_ROWS,
    chunk_tile_rows,
    item_runs,
    tile_runs,
)
from manylora.memory.geometry import PageGeometry

PAGE_TOKENS, NUM_PAGES, HEAD_GROUP = 4, 1000, 2
GEOMETRY = PageGeometry(
    page_bytes=4096,
    page_tokens=PAGE_TOKENS,
    num_groups=2,
    layers_per_group=1,
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    dtype_bytes=4,
)


def a_plan(rng: random.Random) -> StepPlan:
    chunks: list[Chunk] = []
    for _ in range(rng.randrange(1, 7)):
        count = rng.choice(
            (1, 1, MAX_ITEM_ROWS, MAX_ITEM_ROWS + 1, 3 * chunk_tile_rows(HEAD_GROUP) + 1)
        )
        start, slot = rng.randrange(30), rng.randrange(-1, 3)
        blocks = GEOMETRY.blocks(start + count) + rng.randrange(2)
        pages = [
            np.array(rng.sample(range(1, NUM_PAGES), blocks), dtype=np.int32) for _ in range(2)
        ]
        chunks.append(
            Chunk(
                request_id=f"r{len(chunks)}",
                token_ids=[rng.randrange(1000) for _ in range(count)],
                start=start,
                block_table=pages,
                adapter=None if slot < 0 else SlotLease(slot=slot, generation=1, digest=f"{slot}"),
                sample=a_sample() if rng.random() < 0.7 else None,
            )
        )
    return StepPlan(step=1, chunks=chunks)


def a_sample() -> SampleSpec:
    return SampleSpec(params=SamplingParams(), seed=0, choice_index=0, output_index=0)


def a_token(request_id: str, source: int | None = None) -> Chunk:
    pages = np.array([5], dtype=np.int32)
    return Chunk(
        request_id=request_id,
        token_ids=[7],
        start=0,
        block_table=[pages, pages],
        sample=a_sample(),
        token_source=source,
    )


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_in_one_row_with_its_pages_and_in_one_item_or_tile(seed: int) -> None:
    plan = a_plan(random.Random(seed))
    step = pack_step(plan, GEOMETRY, NUM_PAGES)
    items, tiles = item_runs(step.runs), tile_runs(step.runs, HEAD_GROUP)
    seen_by = {row: (position + 1, table) for row, _, position, table in items.T.tolist()}
    for first, count, position, table in tiles.T.tolist():
        assert count <= chunk_tile_rows(HEAD_GROUP)
        for offset in range(count):
            assert first + offset not in seen_by
            seen_by[first + offset] = (position + offset + 1, table)
    row, samples = 0, []
    leases = [plan.chunks[place].adapter for place in step.order]
    slots = [-1 if lease is None else lease.slot for lease in leases]
    assert slots == sorted(slots)
    assert sorted(step.order) == list(range(len(plan.chunks)))
    for index, place in enumerate(step.order):
        chunk = plan.chunks[place]
        assert step.runs[0, index] == row
        for offset, token in enumerate(chunk.token_ids):
            position = chunk.start + offset
            assert (step.tokens[row], step.positions[row]) == (token, position)
            assert step.row_slots[row] == slots[index]
            length, table = seen_by.pop(row)
            assert length == position + 1
            for group, pages in enumerate(chunk.block_table):
                page = pages[position // PAGE_TOKENS]
                assert step.kv_slots[group, row] == page * PAGE_TOKENS + position % PAGE_TOKENS
                blocks = GEOMETRY.blocks(position + 1)
                assert step.tables[group, table : table + blocks].tolist() == list(pages[:blocks])
            row += 1
        if chunk.sample is not None:
            samples.append((index, row - 1))
    assert row == step.num_rows
    assert not seen_by
    assert list(zip(step.samples, step.last_rows().tolist(), strict=True)) == samples
    assert step.is_decode == (len(samples) == row)
    assert {array.dtype for array in arrays(step)} == {np.dtype(np.int32)}


def arrays(step: PackedStep) -> list[np.ndarray]:
    own = [value for name in step.__slots__ if isinstance(value := getattr(step, name), np.ndarray)]
    items, tiles = item_runs(step.runs), tile_runs(step.runs, HEAD_GROUP)
    return [*own, items, tiles, step.row_slots, step.last_rows()]


def test_a_token_of_the_step_before_is_named_by_its_place() -> None:
    plan = StepPlan(step=2, chunks=[a_token("a", 2), a_token("b"), a_token("c", 0)])
    assert pack_step(plan, GEOMETRY, NUM_PAGES, [4, None, 1]).tokens.tolist() == [-2, 7, -5]


@pytest.mark.parametrize("source", [1, 3, -1], ids=["yields none", "no such chunk", "negative"])
def test_a_token_that_the_step_before_does_not_yield_is_refused(source: int) -> None:
    with pytest.raises(EngineError, match="takes the token of chunk"):
        pack_step(
            StepPlan(step=2, chunks=[a_token("a", source)]), GEOMETRY, NUM_PAGES, [4, None, 1]
        )
