"""The attention side of a step, query rows and their pages: lists for the host, and tensors for kernels on a device.

Short runs of query rows (decode, and verification of a few drafted tokens) are items: each row attends on its own, so
that its result does not depend on the rows beside it. Longer runs are chunks of a prompt, and computed in tiles.

An item's keys are divided into splits. The division depends only on the number of its keys, so its result does not
depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The query rows of one request that are computed together."""

    request: int
    row: int
    """First row of the batch."""
    query_len: int
    context_len: int
    """KV tokens including the chunk itself."""


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
    """[4, C]: first query row, number of rows (0: there is no such tile), position of the first row, where in
    `block_table` the pages begin. At most `chunk_tile_rows` rows each, what takes longest first."""
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


def chunk_tiles(chunks: Sequence[tuple[int, int, int, int]], group: int) -> np.ndarray:
    """The tiles of chunks, [4, C], int32, as `AttentionRows.tiles` has them.

    Args:
        chunks: For each chunk: first query row, number of rows, position of the first row, index of its first page.
        group: Number of heads that share a KV head.
    """
    most = chunk_tile_rows(group)
    tiles = [
        (row + start, min(most, rows - start), position + start, table)
        for row, rows, position, table in chunks
        for start in range(0, rows, most)
    ]
    tiles.sort(key=lambda tile: -(tile[1] + tile[2]))  # the keys that a tile sees
    return np.array(tiles, dtype=np.int32).reshape(-1, 4).T.copy()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionBatch:
    """The attention side of one step, made of lists (`build`) or of tensors that are on a device already (`of_rows`).

    Kernels on a CPU read the lists, and those on a device read `rows`.
    """

    block_table: Tensor
    """[R, max_blocks], int32, on the host: pages of each request, padded with 0, the zero page."""
    query_lens: tuple[int, ...] = ()
    """[R]: query rows of each request."""
    context_lens_host: tuple[int, ...] = ()
    """[R]: KV tokens including this step's; 0 for padding."""
    items_host: np.ndarray
    """[3, I], int32: the query row of each item, its request, and how many KV tokens it may see with itself."""
    chunks: tuple[PromptChunk, ...]
    """Requests with more than `MAX_ITEM_ROWS` rows."""
    page_tokens: int
    num_rows: int
    """Rows of all requests; further rows of a batch are padding, and their output is zero."""
    device: torch.device
    """Where the kernels run."""
    _rows: AttentionRows | None = None
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        block_tables: Sequence[Sequence[int] | np.ndarray],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        device: torch.device,
        page_tokens: int,
    ) -> AttentionBatch:
        """Lay out one step.

        Args:
            block_tables: Pages of each request in order; those past `context_lens` are never read.
            query_lens: Query rows of each request in this step, >= 0. They are the last rows of its context.
            context_lens: KV tokens of each request including this step's; 0 makes all its rows padding.
            device: Where the kernels run.
            page_tokens: Tokens per page.

        Raises:
            ValueError: The lists differ in length, or a request has more query rows than context, or more context than
                pages.
        """
        _check(block_tables, query_lens, context_lens, page_tokens)
        indptr = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=indptr[1:])
        return cls(
            block_table=torch.from_numpy(_padded(block_tables)),
            query_lens=tuple(query_lens),
            context_lens_host=tuple(context_lens),
            items_host=_items(indptr, np.asarray(context_lens, dtype=np.int32)),
            chunks=tuple(
                PromptChunk(request, int(indptr[request]), rows, context)
                for request, (rows, context) in enumerate(
                    zip(query_lens, context_lens, strict=True)
                )
                if rows > MAX_ITEM_ROWS and context
            ),
            page_tokens=page_tokens,
            num_rows=int(indptr[-1]),
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
            block_table=torch.zeros((0, 0), dtype=torch.int32),
            items_host=np.zeros((3, 0), dtype=np.int32),
            chunks=(),
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
                rows.work[window] = _to_device(
                    split_starts(self.items_host[2], window), self.device
                )
        elif window not in rows.work:
            raise ValueError(
                f"window: expected one of {sorted(rows.work)}, whose work is known, got {window}"
            )
        return rows

    def _make_rows(self, group: int) -> AttentionRows:
        width = self.block_table.shape[1]
        items, requests, lens = self.items_host
        chunks = [
            (chunk.row, chunk.query_len, chunk.context_len - chunk.query_len, chunk.request * width)
            for chunk in self.chunks
        ]
        parts = (
            np.append(self.block_table.numpy(), np.int32(0)),  # never empty
            items,
            requests * width,
            lens,
            chunk_tiles(chunks, group).reshape(-1),
        )
        block_table, item_rows, item_tables, item_lens, tiles = _to_device(
            np.concatenate(parts).astype(np.int32), self.device
        ).split([part.size for part in parts])
        return AttentionRows(
            block_table=block_table,
            item_rows=item_rows,
            item_tables=item_tables,
            item_lens=item_lens,
            work={},
            tiles=tiles.view(4, -1),
            page_tokens=self.page_tokens,
            num_partials=most_partials(lens),
        )

    def expect_lists(self) -> None:
        """Check that there are lists.

        Raises:
            ValueError: The batch was made of tensors on a device.
        """
        if self._rows is not None:
            raise ValueError(
                "batch: expected one made of lists, got one of rows on a device, which Triton reads"
            )

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what a kernel prepared for this step under `key`, preparing it on first use.

        Some preparations need sizes that only a kernel sees (heads, strides, dtype). The first layer makes them for
        all layers.
        """
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def _check(
    block_tables: Sequence[Sequence[int] | np.ndarray],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    page_tokens: int,
) -> None:
    if not len(block_tables) == len(query_lens) == len(context_lens):
        raise ValueError(
            f"block_tables, query_lens and context_lens: expected equal lengths, "
            f"got {len(block_tables)}, {len(query_lens)} and {len(context_lens)}"
        )
    for request, (pages, rows, context) in enumerate(
        zip(block_tables, query_lens, context_lens, strict=True)
    ):
        if context and not 0 <= rows <= context:
            raise ValueError(
                f"query_lens[{request}]: expected 0 to its context of {context}, got {rows}"
            )
        if context > len(pages) * page_tokens:
            raise ValueError(
                f"context_lens[{request}]: expected at most {len(pages) * page_tokens} tokens of {len(pages)} pages, "
                f"got {context}"
            )


def _padded(block_tables: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """[R, max_blocks], int32: pages of each request, padded with 0."""
    table = np.zeros(
        (len(block_tables), max((len(t) for t in block_tables), default=0)), dtype=np.int32
    )
    for index, pages in enumerate(block_tables):
        table[index, : len(pages)] = pages
    return table


def _items(indptr: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    query_lens = np.diff(indptr)
    is_item = (query_lens <= MAX_ITEM_ROWS) | (contexts == 0)
    requests = np.repeat(np.arange(len(contexts), dtype=np.int32), np.where(is_item, query_lens, 0))
    starts = indptr[:-1][requests]
    ends = indptr[1:][requests]
    first_item = np.searchsorted(requests, requests, side="left").astype(np.int32)
    rows = starts + np.arange(len(requests), dtype=np.int32) - first_item
    lens = np.maximum(contexts[requests] - (ends - 1 - rows), 0)
    return np.stack((rows, requests, np.where(contexts[requests] == 0, 0, lens))).astype(np.int32)


def _to_device(host: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(host)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
