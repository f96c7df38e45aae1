"""Paged attention on the CPU with torch operators.

The first layer of a step plans which rows of the arena to gather, the masks, and the buckets of items. The batch keeps
the plan for the other layers. The heads of a KV group are query rows of one batched product, so keys are read once per
group. Items are computed in buckets of similar length. A chunk is computed in blocks of query rows, which bounds the
memory for scores and skips most masked positions. Keys and values are gathered token by token, and nothing beyond a
request's context is read: padding reads a token of the request itself and is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manylora.kernels.attention_batch import AttentionBatch, PromptChunk
from manylora.kernels.checks import expect, expect_that
from manylora.kernels.kv_layer import KvLayer, dequantise

BUCKET_WASTE_TOKENS = 512
"""Padding, in tokens, that costs about as much as one more bucket."""
QUERY_ROWS = 64
"""Query rows of a chunk that are computed together."""
SMALL_PRODUCT = 1 << 15
"""Elements up to which a product in a narrow dtype costs more to set up than to compute in float32."""
BUCKET_BYTES = 1 << 22
"""Largest memory of the keys that a bucket gathers."""


Steps = tuple[int, ...]
"""Distances from one page, head and token to the next."""


@dataclass(frozen=True, slots=True)
class Places:
    """Places of the keys of some tokens and heads, counted from the layer's first place. Values have equal places."""

    rows: Tensor
    """[n], int64, in rows of D elements."""
    scales: Tensor | None
    """[n], int64, in scales; None without scales."""


@dataclass(frozen=True, slots=True)
class ItemBucket:
    """Items of similar length, computed together."""

    rows: Tensor | slice
    """Their query rows."""
    places: Places
    """[n * Hkv * L] of their keys, padded with those of their first token."""
    mask: Tensor | None
    """[n * Hkv, 1, L], dtype of the queries, added to the scores; None where all lengths are equal."""
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Consecutive query rows of a chunk."""

    rows: slice
    """Rows of the batch."""
    keys: slice
    """The gathered keys of the chunk that the block sees."""
    mask: Tensor
    """[rows, m], dtype of the queries, added to the scores of the last m keys; all rows see the keys before them."""


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The part of a step that its layers share."""

    buckets: tuple[ItemBucket, ...]
    chunks: tuple[tuple[Places, tuple[QueryBlock, ...]], ...]
    """For each prompt chunk, the places to gather, [Hkv * L], and its blocks of query rows."""
    num_arena_rows: int
    """Rows of D elements from a layer's first to its last."""
    num_scales: int
    """Scales from a layer's first to its last; 0 without scales."""
    gathered: tuple[Tensor, Tensor]
    """Room for the keys and values of the largest bucket or chunk, [rows, D], used by one layer after the other."""


def paged_attention(q: Tensor, kv: KvLayer, batch: AttentionBatch, scale: float) -> Tensor:
    """Causal attention of a step's query rows over keys and values in pages (PagedAttention, arXiv:2309.06180).

    Semantics:
        for request r, query row i of its n, at position p = context_lens[r] - n + i, head h of KV group g:
            keys = positions max(0, p - kv.window + 1) to p of request r, through its block table
            scores = scale * q[row, h] @ k[keys, g].T
            out[row, h] = softmax(scores) @ v[keys, g]

    Keys and values of int8 are multiplied by their scales, in this implementation before the products; the scale of a
    key may as well multiply its score, and that of a value its weight.

    Args:
        q: [T, Hq, D]; Hq is a multiple of Hkv, head h reads KV head h // (Hq / Hkv).
        kv: The layer's keys and values in the arena, int8 with the scales that `kv_write` stored, or of the dtype of q.
            Those of this step must have been written. Values beyond a request's context never reach a result.
        batch: The rows and the keys that they attend to.
        scale: Factor of the scores.

    Returns:
        [T, Hq, D], dtype of q. Rows of no request, and of requests without context, are zero.

    In this implementation page, head and token strides must be multiples of the head dimension.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    # Making the plan checks the operands; a layer with operands of the same kind finds the plan made.
    plan: GatherPlan = batch.keep(plan_key(q, kv), lambda: _plan(q, kv, batch))
    out = q.new_zeros(q.shape)  # rows of no request stay zero
    heads = kv.k.shape[1]
    head_dim = q.shape[2]
    # The layer's rows of head_dim elements; gathering whole rows is a plain memory copy.
    rows = [
        pages.as_strided((plan.num_arena_rows, head_dim), (head_dim, 1)) for pages in (kv.k, kv.v)
    ]
    scales = [each.as_strided((plan.num_scales,), (1,)) for each in kv.scales or ()]

    def gather(places: Places) -> list[Tensor]:
        count = len(places.rows)
        found = [
            torch.index_select(each, 0, places.rows, out=room[:count])
            for each, room in zip(rows, plan.gathered, strict=True)
        ]
        if places.scales is None:
            return found
        return [
            dequantise(each, of_all[places.scales], q.dtype)
            for each, of_all in zip(found, scales, strict=True)
        ]

    for bucket in plan.buckets:
        k, v = gather(bucket.places)
        _attend_items(q, k, v, bucket, heads, scale, out)
    for places, blocks in plan.chunks:
        k, v = (gathered.view(heads, -1, head_dim) for gathered in gather(places))
        for block in blocks:
            _attend_chunk(q, k, v, block, heads, scale, out)
    return out


def plan_key(q: Tensor, kv: KvLayer) -> tuple[object, ...]:
    """Key of a `GatherPlan` in a batch: everything of the operands that the plan depends on."""
    return "cpu", q.shape, q.dtype, q.device, kv.kind


def _attend_items(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bucket: ItemBucket,
    heads: int,
    scale: float,
    out: Tensor,
) -> None:
    num_heads, head_dim = q.shape[1:]
    count = bucket.count
    length = bucket.length
    group = num_heads // heads
    queries = q[bucket.rows] if isinstance(bucket.rows, slice) else q.index_select(0, bucket.rows)
    k, v = (gathered.view(count * heads, length, head_dim) for gathered in (keys, values))
    scores = _scores(
        queries.reshape(count * heads, group, head_dim), k, scale
    )  # [n * Hkv, group, L]
    if bucket.mask is not None:
        scores += bucket.mask
    result = _weighted(scores, v).view(count, num_heads, head_dim)
    if isinstance(bucket.rows, slice):
        out[bucket.rows] = result
    else:
        out.index_copy_(0, bucket.rows, result)


def _attend_chunk(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block: QueryBlock,
    heads: int,
    scale: float,
    out: Tensor,
) -> None:
    num_heads, head_dim = q.shape[1:]
    group = num_heads // heads
    queries = q[block.rows].unflatten(1, (heads, group)).transpose(0, 1)  # [Hkv, rows, group, D]
    count = queries.shape[1]
    k = keys[:, block.keys]  # [Hkv, L, D]
    v = values[:, block.keys]
    scores = _scores(queries.reshape(heads, count * group, head_dim), k, scale)
    # [Hkv, rows, group, m] against [rows, 1, m]
    scores.unflatten(1, (count, group))[..., scores.shape[2] - block.mask.shape[1] :] += (
        block.mask.unsqueeze(1)
    )
    result = _weighted(scores, v).view(heads, count, group, head_dim)
    out[block.rows].view(count, heads, group, head_dim).copy_(result.transpose(0, 1))


def _scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Scaled products, summed in float32 and rounded once. The softmax after it computes in float32 for any dtype."""
    dtype = keys.dtype
    if _is_dear(keys):
        queries = queries.float()
        keys = keys.float()
    ignored = queries.new_empty(())
    return torch.baddbmm(ignored, queries, keys.transpose(1, 2), beta=0, alpha=scale).to(dtype)


def _weighted(scores: Tensor, values: Tensor) -> Tensor:
    """Values weighted by the softmax of their scores, rounded to their dtype."""
    weights = scores.softmax(-1).to(values.dtype)
    if _is_dear(values):
        return torch.bmm(weights.float(), values.float()).to(values.dtype)
    return torch.bmm(weights, values)


def _is_dear(operand: Tensor) -> bool:
    """True if a product in its dtype costs more to set up than to compute in float32; both round to the same."""
    return operand.dtype != torch.float32 and operand.numel() <= SMALL_PRODUCT


def _plan(q: Tensor, kv: KvLayer, batch: AttentionBatch) -> GatherPlan:
    check_operands(q, kv, batch)
    batch.expect_lists()
    head_dim = q.shape[2]
    window = kv.window
    strides = kv.strides[:3]
    expect_that(
        "k_pages",
        all(s % head_dim == 0 for s in strides),
        f"strides in multiples of {head_dim}",
        strides,
    )
    steps = tuple(stride // head_dim for stride in strides)
    scale_steps = None if kv.scales is None else kv.scales[0].stride()
    heads = kv.k.shape[1]
    bucket_tokens = BUCKET_BYTES // (heads * head_dim * q.element_size())

    def find(requests: np.ndarray, positions: np.ndarray) -> Places:
        return Places(
            torch.from_numpy(_places(batch, requests, positions, heads, steps)),
            None
            if scale_steps is None
            else torch.from_numpy(_places(batch, requests, positions, heads, scale_steps)),
        )

    buckets = tuple(
        _bucket(batch, members, heads, find, window, q.dtype)
        for members in _group(batch, window, bucket_tokens)
    )
    chunks = tuple(_chunk(chunk, find, window, q.dtype) for chunk in batch.chunks)
    largest = max(
        [
            0,
            *(len(bucket.places.rows) for bucket in buckets),
            *(len(places.rows) for places, _ in chunks),
        ]
    )
    return GatherPlan(
        buckets=buckets,
        chunks=chunks,
        num_arena_rows=_extent(kv.k.shape, steps),
        num_scales=0 if scale_steps is None else _extent(kv.k.shape, scale_steps),
        gathered=(kv.k.new_empty((largest, head_dim)), kv.k.new_empty((largest, head_dim))),
    )


def _extent(shape: torch.Size, steps: Steps) -> int:
    """Places from a layer's first to its last."""
    return 1 + sum((extent - 1) * step for extent, step in zip(shape[:3], steps, strict=True))


def _group(batch: AttentionBatch, window: int | None, max_tokens: int) -> list[np.ndarray]:
    """Indices of the items of each bucket, the longest first. A bucket ends where padding costs more than a new one."""
    lens = batch.items_host[2] if window is None else np.minimum(batch.items_host[2], window)
    order = np.argsort(-lens, kind="stable")
    order = order[lens[order] > 0]
    groups: list[np.ndarray] = []
    start = waste = 0
    for place, length in enumerate(lens[order].tolist()):
        longest = int(lens[order[start]])
        waste += longest - length
        if waste > BUCKET_WASTE_TOKENS or (place + 1 - start) * longest > max(max_tokens, longest):
            groups.append(np.sort(order[start:place]))
            start = place
            waste = 0
    if start < len(order):
        groups.append(np.sort(order[start:]))
    return groups


def _bucket(
    batch: AttentionBatch,
    members: np.ndarray,
    heads: int,
    find: Callable[[np.ndarray, np.ndarray], Places],
    window: int | None,
    dtype: torch.dtype,
) -> ItemBucket:
    rows, requests, ends = batch.items_host[:, members].astype(np.int64)
    starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    lens = ends - starts
    length = int(lens.max())
    positions = starts[:, None] + np.arange(length)  # [n, L]
    live = positions < ends[:, None]
    positions = np.where(live, positions, starts[:, None])
    mask = None
    if not live.all():
        mask = _added(~live, dtype).repeat_interleave(heads, 0).unsqueeze(1)
    count = len(members)
    consecutive = int(rows[-1] - rows[0]) == count - 1
    return ItemBucket(
        rows=slice(int(rows[0]), int(rows[0]) + count) if consecutive else torch.from_numpy(rows),
        places=find(requests[:, None], positions),
        mask=mask,
        count=count,
        length=length,
    )


def _chunk(
    chunk: PromptChunk,
    find: Callable[[np.ndarray, np.ndarray], Places],
    window: int | None,
    dtype: torch.dtype,
) -> tuple[Places, tuple[QueryBlock, ...]]:
    start = 0 if window is None else max(0, chunk.context_len - chunk.query_len - window + 1)
    positions = np.arange(start, chunk.context_len)
    firsts = range(0, chunk.query_len, QUERY_ROWS)
    blocks = tuple(_query_block(chunk, first, start, window, dtype) for first in firsts)
    return find(np.full((1, 1), chunk.request), positions[None]), blocks


def _query_block(
    chunk: PromptChunk, first: int, start: int, window: int | None, dtype: torch.dtype
) -> QueryBlock:
    """Rows from `first` on of a chunk whose gathered keys begin at position `start`."""
    stop = min(first + QUERY_ROWS, chunk.query_len)
    queries = np.arange(first, stop) + chunk.context_len - chunk.query_len
    end = int(queries[-1]) + 1
    begin = start if window is None else max(start, int(queries[0]) - window + 1)
    positions = np.arange(int(queries[0]) if window is None else begin, end)
    hidden = positions > queries[:, None]
    if window is not None:
        hidden |= positions <= queries[:, None] - window
    return QueryBlock(
        rows=slice(chunk.row + first, chunk.row + stop),
        keys=slice(begin - start, end - start),
        mask=_added(hidden, dtype),
    )


def _added(hidden: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores: -inf for hidden positions, 0 for others."""
    return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(dtype)


def _places(
    batch: AttentionBatch, requests: np.ndarray, positions: np.ndarray, heads: int, steps: Steps
) -> np.ndarray:
    """Places in a layer of [n, L] positions and all heads, with these distances: [n * Hkv * L], int64."""
    page_step, head_step, token_step = steps
    pages = batch.block_table.numpy()[requests, positions // batch.page_tokens].astype(np.int64)
    places = pages * page_step + positions % batch.page_tokens * token_step
    of_heads: np.ndarray = places[:, None] + (np.arange(heads) * head_step)[:, None]
    return of_heads.reshape(-1)


def check_operands(q: Tensor, kv: KvLayer, batch: AttentionBatch) -> None:
    """Check the operands of `paged_attention`.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    heads = kv.k.shape[1]
    expect("q", q, (None, None, kv.k.shape[-1]), None, batch.device)
    kv.check((None, None, batch.page_tokens, None), q.dtype, q.device)
    expect_that("q", q.shape[0] >= batch.num_rows, f"at least {batch.num_rows} rows", q.shape[0])
    expect_that("q", q.shape[1] % heads == 0, f"a multiple of {heads} heads", q.shape[1])
    expect_that("q", q.stride(2) == 1, "consecutive elements", q.stride())
    expect_that("window", kv.window is None or kv.window > 0, "a positive number", kv.window)
