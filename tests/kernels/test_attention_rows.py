"""Paged attention over rows that a step on static buffers fills itself, in Triton."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import implementations
from implementations import BF16, F32, Implementation
from manylora.kernels.attention_batch import (
    AttentionBatch,
    AttentionRows,
    split_starts,
)
from numerics import assert_rows_close, bits
from oracles import ORACLES
from scattered_kv import AttentionCase, ScatteredKv

IMPLEMENTATIONS = [implementations.TRITON]
BORDERS = (255, 256, 257, 511, 512, 513)


def padded(rows: AttentionRows, items: Sequence[tuple[int, int, int]], tiles: int) -> AttentionRows:
    """The same items behind others of (row, start of pages, length), and so many unused tiles before the others."""
    more = torch.tensor(items, dtype=torch.int32, device=rows.item_rows.device).reshape(-1, 3).T
    lens = torch.cat((more[2], rows.item_lens))
    unused = rows.tiles.new_zeros((4, tiles))
    return dataclasses.replace(
        rows,
        item_rows=torch.cat((more[0], rows.item_rows)),
        item_tables=torch.cat((more[1], rows.item_tables)),
        item_lens=lens,
        work={
            window: torch.from_numpy(split_starts(lens.cpu().numpy(), window)).to(lens.device)
            for window in rows.work
        },
        tiles=torch.cat((unused, rows.tiles, unused), dim=1),
        num_partials=rows.num_partials + len(items),
        _counters={},
    )


@pytest.mark.parametrize("window", [None, 300])
def test_items_around_the_borders_of_splits_equal_the_oracle(
    window: int | None, impl: Implementation
) -> None:
    case = AttentionCase(tuple((1, length) for length in BORDERS), 7, 1, 16, 64, F32, window)
    operands = ScatteredKv(case, impl.device)
    out = operands.attend(impl.kernels.paged_attention)
    assert_rows_close(out, operands.attend(ORACLES.paged_attention))
    rows = operands.batch.rows(7, window or 0)
    assert not rows.counters(1).any(), "zero again for the next launch"
    assert torch.equal(operands.attend(impl.kernels.paged_attention), out)


def test_an_item_beyond_the_most_splits_of_256_tokens_has_larger_ones(impl: Implementation) -> None:
    operands = ScatteredKv(AttentionCase(((1, 64 * 256 + 1), (1, 3)), 2, 1, 16, 128), impl.device)
    assert operands.batch.rows(2, 0).num_partials == 65
    assert_rows_close(
        operands.attend(impl.kernels.paged_attention),
        operands.attend(ORACLES.paged_attention),
        scale=2,
    )
    assert operands.batch.rows(2, 0).work[0].tolist() == [0, 33, 34]


@pytest.mark.parametrize("window", [None, 280])
def test_unused_items_and_tiles_change_nothing(window: int | None, impl: Implementation) -> None:
    requests = ((1, 600), (12, 40), (1, 5), (2, 300), (1, 0), (20, 320))
    operands = ScatteredKv(
        AttentionCase(requests, 4, 2, 16, 32, BF16, window, padding_rows=3), impl.device
    )
    expected = operands.attend(impl.kernels.paged_attention)
    before, count = operands.batch.rows(2, window or 0), len(operands.q)
    # Four rows of no request are items of length 0; two places for items are not used, beside rows that others have.
    of_none = [(count - 1, 9, 0), (count - 2, 0, 0), (count - 3, 0, 0), (16, 0, 0)]
    rows = padded(before, [(0, 0, -1), *of_none, (3, 0, -1)], 2)
    operands.batch = AttentionBatch.of_rows(rows, count)
    out = operands.attend(impl.kernels.paged_attention)
    assert torch.equal(bits(out), bits(expected))
    assert not out[-3:].any()


def test_the_same_tensors_serve_another_step(impl: Implementation) -> None:
    """What a captured launch does: only what the tensors hold changes, and where keys were there is NaN now."""
    steps = [
        ScatteredKv(AttentionCase(requests, 4, 2, 16, 16), impl.device, seed)
        for seed, requests in enumerate(
            (((1, 700), (1, 20), (9, 50)), ((1, 1), (1, 300), (9, 300)))
        )
    ]
    longest = max(
        (operands.batch.rows(2, 0) for operands in steps), key=lambda rows: len(rows.block_table)
    )
    room = dataclasses.replace(
        longest,
        block_table=torch.zeros_like(longest.block_table),
        item_lens=torch.full_like(longest.item_lens, -1),
        work={0: torch.zeros_like(longest.work[0])},
        tiles=torch.zeros_like(longest.tiles),
        num_partials=12,
        _counters={},
    )
    addresses = room.counters(2).data_ptr()
    for operands in (*steps, steps[0]):
        expected, rows = operands.attend(impl.kernels.paged_attention), operands.batch.rows(2, 0)
        room.block_table[: len(rows.block_table)] = rows.block_table
        for name in ("item_rows", "item_tables", "item_lens", "tiles"):
            getattr(room, name).copy_(getattr(rows, name))
        room.work[0].copy_(rows.work[0])
        batch, operands.batch = operands.batch, AttentionBatch.of_rows(room, len(operands.q))
        assert torch.equal(operands.attend(impl.kernels.paged_attention), expected)
        operands.batch = batch
    assert room.counters(2).data_ptr() == addresses


@pytest.mark.parametrize("window", [None, 30])
def test_tiles_may_be_computed_in_parts(
    window: int | None, impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are in float32, which takes more registers."""
    from manylora.kernels.triton import attention

    operands = ScatteredKv(
        AttentionCase(((70, 90), (9, 9)), 2, 1, 16, 16, F32, window), impl.device
    )
    expected = operands.attend(impl.kernels.paged_attention)
    sizes = attention.chunk_sizes
    monkeypatch.setattr(
        attention, "chunk_sizes", lambda group, head_dim, *_: sizes(group, head_dim, F32, F32)
    )
    assert sizes(2, 16, F32, F32)["PARTS"] > 1
    assert_rows_close(operands.attend(impl.kernels.paged_attention), expected)


def test_the_first_row_of_a_tile_may_be_any_row_of_its_chunk(impl: Implementation) -> None:
    operands = ScatteredKv(AttentionCase(((64, 150),), 2, 1, 16, 16), impl.device)
    whole = operands.attend(impl.kernels.paged_attention)
    rows = operands.batch.rows(2, 0)
    pieces = np.array(((0, 5, 86, 0), (5, 40, 91, 0), (45, 19, 131, 0)), dtype=np.int32).T.copy()
    cut = dataclasses.replace(rows, tiles=torch.from_numpy(pieces).to(impl.device))
    operands.batch = AttentionBatch.of_rows(cut, 64)
    assert torch.equal(bits(operands.attend(impl.kernels.paged_attention)), bits(whole))
