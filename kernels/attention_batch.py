"""Which query rows of a step attend to which pages, worked out on the host, once for all layers of a group.

Short runs of query rows (decode, and verification of a few drafted tokens) are items: each row attends on its own, so
that its result does not depend on the rows beside it. Longer runs are chunks of a prompt.
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
class AttentionBatch:
    """The attention side of one step. Rows of request r are `query_indptr[r]` to `query_indptr[r + 1]`."""

    block_table: Tensor
    """[R, max_blocks], int32: pages of each request, padded with 0, the zero page."""
    query_indptr: Tensor
    """[R + 1], int32: cumulative number of query rows."""
    context_lens: Tensor
    """[R], int32: KV tokens including this step's; 0 for padding."""
    items: tuple[Tensor, ...]
    """Three of [I], int32: the query row of each item, its request, and how many KV tokens it may see with itself."""
    query_lens: tuple[int, ...]
    """[R], on the host."""
    context_lens_host: tuple[int, ...]
    """[R], on the host."""
    block_table_host: np.ndarray
    """`block_table` on the host."""
    items_host: np.ndarray
    """[3, I]: `items` on the host."""
    chunks: tuple[PromptChunk, ...]
    """Requests with more than `MAX_ITEM_ROWS` rows."""
    page_tokens: int
    num_rows: int
    """Rows of all requests; further rows of a batch are padding, and their output is zero."""
    max_item_len: int
    """Upper bound of the KV tokens that an item may see; a captured graph is built for one."""
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
            query_lens: Query rows of each request in this step, >= 0. They are the last of its context.
            context_lens: KV tokens of each request including this step's; 0 makes all its rows padding.
            device: Where the kernels run.
            page_tokens: Tokens per page.

        Raises:
            ValueError: The lists differ in length, or a request has more query rows than context, or more context than
                pages.
        """
        _check(block_tables, query_lens, context_lens, page_tokens)
        table = np.zeros((len(block_tables), max((len(t) for t in block_tables), default=0)), dtype=np.int32)
        for index, pages in enumerate(block_tables):
            table[index, : len(pages)] = pages
        indptr = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=indptr[1:])
        contexts = np.asarray(context_lens, dtype=np.int32)
        items = _items(indptr, contexts)
        host = np.concatenate((table.reshape(-1), indptr, contexts, items.reshape(-1)))
        parts = _to_device(host, device).split([table.size, indptr.size, contexts.size, items.size])
        return cls(
            block_table=parts[0].view(table.shape),
            query_indptr=parts[1],
            context_lens=parts[2],
            items=parts[3].view(items.shape).unbind(),
            query_lens=tuple(query_lens),
            context_lens_host=tuple(context_lens),
            block_table_host=table,
            items_host=items,
            chunks=tuple(
                PromptChunk(request, int(indptr[request]), rows, context)
                for request, (rows, context) in enumerate(zip(query_lens, context_lens, strict=True))
                if rows > MAX_ITEM_ROWS and context
            ),
            page_tokens=page_tokens,
            num_rows=int(indptr[-1]),
            max_item_len=int(items[2].max(initial=0)),
        )

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what a kernel prepared for this step under `key`, preparing it on first use.

        What depends on sizes only a kernel sees (heads, strides, dtype) is made by the first layer for all others.
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
    for request, (pages, rows, context) in enumerate(zip(block_tables, query_lens, context_lens, strict=True)):
        if context and not 0 <= rows <= context:
            raise ValueError(f"query_lens[{request}]: expected 0 to its context of {context}, got {rows}")
        if context > len(pages) * page_tokens:
            raise ValueError(
                f"context_lens[{request}]: expected at most {len(pages) * page_tokens} tokens of {len(pages)} pages, "
                f"got {context}"
            )


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
