"""The attention side of a step: runs of query rows and their pages, on the host or as tensors on a device.

A run is the query rows of one request: [first query row, number of rows, position of the first row, where in the block
table the pages of the request begin]. Runs are columns of an array, [4, R], int32. A run can be cut into runs.

Short runs (decode, and verification of a few drafted tokens) are cut into items: each row attends on its own, so that
its result does not depend on the rows beside it. Longer runs are chunks of a prompt, and computed in tiles.

An item's keys are divided into splits. The division depends only on the number of its keys, so its result does not
depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_ITEM_ROWS = 8
"""Requests with at most this many query rows are computed row by row."""
SPLIT_TOKENS = 256
"""Keys of a split. An item that would need more than `MAX_SPLITS` has splits of twice, four times ... as many keys."""
MAX_SPLITS = 64
PARTIAL_PAD = 4
"""Floats behind a partial sum: its maximum, its sum of weights, and two that keep rows on a multiple of 16 bytes."""
TILE_HEADS = 128
"""Query rows of a tile, times the heads of a KV group."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionRows:
    """The attention side of one step as the kernels on a device read it; all tensors are int32.

    Each query row is the row of one item or of one tile. The numbers of items and tiles may be larger than a step
    needs: a captured step has room for the largest, and each step overwrites what it reads.
    """

    block_table: Tensor
    """[N], N >= 1: pages of all requests, one request after the other."""
    item_rows: Tensor
    """[I]: the query row of each item."""
    item_tables: Tensor
    """[I]: where in `block_table` the pages of its request begin."""
    item_lens: Tensor
    """[I]: KV tokens that it sees, itself included. 0: its row becomes zero. -1: there is no such item."""
    work: dict[int, Tensor]
    """By sliding window, 0 for none, [I + 1]: number of splits of all items before each (`split_starts`)."""
    tiles: Tensor
    """[4, C]: runs of at most `chunk_tile_rows` rows, what takes longest first. One of 0 rows is no tile."""
    page_tokens: int
    num_partials: int
    """Largest number of splits whose results are kept, of all items together (`most_partials`)."""
    _counters: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def counters(self, num_kv_heads: int) -> Tensor:
        """Count the finished splits of each item and KV head: [I * Hkv], int32, zero before and after each launch.

        The tensor is made once and keeps its address, because captured launches use it.
        """
        if num_kv_heads not in self._counters:
            self._counters[num_kv_heads] = self.item_rows.new_zeros(
                len(self.item_rows) * num_kv_heads
            )
        return self._counters[num_kv_heads]


def num_splits(lens: np.ndarray, window: int) -> np.ndarray:
    """Number of splits of each item, [I]: at least 1, so that its row is written, but 0 for a length of -1.

    Args:
        lens: [I], integers: KV tokens that each item may see, or -1.
        window: The sliding window; 0 for none.
    """
    seen = np.minimum(lens, window) if window else lens
    size = np.full_like(seen, SPLIT_TOKENS)
    while (short := size * MAX_SPLITS < seen).any():
        size[short] *= 2
    return np.where(lens < 0, 0, np.maximum(-(-seen // size), 1))


def split_starts(lens: np.ndarray, window: int) -> np.ndarray:
    """The work list of items, [I + 1], int32: the number of splits of all items before each.

    Args:
        lens: [I], integers: KV tokens that each item may see, or -1.
        window: The sliding window; 0 for none.
    """
    starts = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(num_splits(lens, window), out=starts[1:])
    return starts


def most_partials(lens: np.ndarray) -> int:
    """Upper bound of the splits of all items with these lengths, for any window; 0 if each item has one split."""
    splits = np.clip(-(-lens // SPLIT_TOKENS), 1, MAX_SPLITS)
    return int(splits.sum()) if splits.max(initial=1) > 1 else 0


def chunk_tile_rows(group: int) -> int:
    """Largest number of query rows of a tile, where `group` heads share a KV head."""
    return max(1, TILE_HEADS // group)


def cut(runs: np.ndarray, most: int) -> np.ndarray:
    """Cut runs into runs of at most `most` rows."""
    counts = -(-runs[1] // most)
    pieces = np.repeat(runs, counts, axis=1)
    offsets = (np.arange(pieces.shape[1]) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    pieces[0] += offsets
    pieces[1] = np.minimum(pieces[1] - offsets, most)
    pieces[2] += offsets
    return pieces


def item_runs(runs: np.ndarray) -> np.ndarray:
    """The rows of short runs, each as a run of its own."""
    return cut(runs[:, runs[1] <= MAX_ITEM_ROWS], 1)


def tile_runs(runs: np.ndarray, group: int) -> np.ndarray:
    """Tiles of all other runs; those that see the most keys come first.

    Args:
        runs: The runs of a step.
        group: Number of heads that share a KV head.
    """
    tiles = cut(runs[:, runs[1] > MAX_ITEM_ROWS], chunk_tile_rows(group))
    return tiles.take(np.argsort(-(tiles[1] + tiles[2]), kind="stable"), axis=1)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionBatch:
    """The attention side of one step, made of runs (`build`) or of tensors that are on a device already (`of_rows`).

    Kernels on a CPU read the runs, and those on a device read `rows`.
    """

    block_table: Tensor
    """[N], int32, on the host: pages of all requests, one request after the other."""
    runs: np.ndarray
    """[4, R], int32: the query rows of each request. They are the last tokens of what it sees."""
    page_tokens: int
    num_rows: int
    """Rows of all requests; other rows of a batch are padding, and their output is zero."""
    device: torch.device
    """Where the kernels run."""
    _rows: AttentionRows | None = None
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls, block_table: np.ndarray, runs: np.ndarray, page_tokens: int, device: torch.device
    ) -> AttentionBatch:
        """Lay out one step.

        Args:
            block_table: [N], int32: pages, in which those of each request are one after the other.
            runs: [4, R], int32: the query rows of each request. No row is in two runs.
            page_tokens: Tokens per page.
            device: Where the kernels run.
        """
        return cls(
            block_table=torch.from_numpy(block_table),
            runs=runs,
            page_tokens=page_tokens,
            num_rows=int(runs[1].sum()),
            device=device,
        )

    @classmethod
    def of_rows(cls, rows: AttentionRows, num_rows: int) -> AttentionBatch:
        """A step whose numbers are on the device; kernels on a CPU refuse it.

        Args:
            rows: Its items and tiles. They have the first `num_rows` rows of the queries, each row once.
            num_rows: Number of these rows.
        """
        return cls(
            block_table=rows.block_table,
            runs=np.zeros((4, 0), dtype=np.int32),
            page_tokens=rows.page_tokens,
            num_rows=num_rows,
            device=rows.block_table.device,
            _rows=rows,
        )

    def rows(self, group: int, window: int) -> AttentionRows:
        """The tensors for kernels on a device, with the work list of items for one window.

        Args:
            group: Number of heads that share a KV head.
            window: The sliding window; 0 for none.

        Raises:
            ValueError: The batch was made of rows without a work list for this window.
        """
        rows = self._rows
        if rows is None:
            rows = self.keep(("rows", chunk_tile_rows(group)), lambda: self._make_rows(group))
            if window not in rows.work:
                starts = split_starts(item_runs(self.runs)[2] + 1, window)
                rows.work[window] = torch.from_numpy(starts).to(self.device)
        elif window not in rows.work:
            raise ValueError(
                f"window: expected one of {sorted(rows.work)}, whose work is known, got {window}"
            )
        return rows

    def _make_rows(self, group: int) -> AttentionRows:
        items = torch.from_numpy(item_runs(self.runs)).to(self.device)
        return AttentionRows(
            block_table=torch.nn.functional.pad(self.block_table, (0, 1)).to(self.device),
            item_rows=items[0],
            item_tables=items[3],
            item_lens=items[2] + 1,
            work={},
            tiles=torch.from_numpy(tile_runs(self.runs, group)).to(self.device),
            page_tokens=self.page_tokens,
            num_partials=most_partials(item_runs(self.runs)[2] + 1),
        )

    def expect_runs(self) -> None:
        """Check that there are runs.

        Raises:
            ValueError: The batch was made of tensors on a device.
        """
        if self._rows is not None:
            raise ValueError(
                "batch: expected one made of runs, got one of rows on a device, which Triton reads"
            )

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what a kernel prepared for this step under `key`, preparing it on first use.

        Some preparations need sizes that only a kernel sees (heads, strides, dtype). The first layer makes them for
        all layers.
        """
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]
