"""Paged attention on the CPU with torch operators.

Keys and values are gathered token by token, for one chunk of a prompt or for a bucket of items of similar length. The
heads of a KV group are query rows of one batched product, so keys are read once per group. A chunk is computed in
blocks of query rows, which bounds the memory for scores and skips most masked positions. Nothing beyond a request's
context is read: padding reads a token of the request itself and is masked. The first layer of a step plans all this,
and the batch keeps the plan for the other layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manylora.kernels.attention_batch import MAX_ITEM_ROWS, AttentionBatch, cut, item_runs
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


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Query rows that are computed together: the same number of each run of a gather."""

    rows: Tensor | slice
    keys: slice
    """The gathered keys of each run that the block sees."""
    mask: Tensor | None
    """[runs, 1, rows of a run, 1, m], dtype of the queries, added to the scores of the last m keys; all rows see the
    keys before them. None adds nothing."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Keys and values of some runs, each padded to the same length with those of its first token."""

    count: int
    """Number of runs."""
    length: int
    places: Tensor
    """[count * Hkv * length], int64, in rows of D elements from the layer's first. Values have equal places."""
    scale_places: Tensor | None
    """Places in scales; None without scales."""
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The part of a step that its layers share."""

    gathers: tuple[Gather, ...]
    num_arena_rows: int
    """Rows of D elements from a layer's first to its last."""
    num_scales: int
    """Scales from a layer's first to its last; 0 without scales."""
    room: tuple[Tensor, Tensor]
    """Room for the keys and values of the largest gather, [rows, D], used by one layer after the other."""


def paged_attention(q: Tensor, kv: KvLayer, batch: AttentionBatch, scale: float) -> Tensor:
    """Causal attention of a step's query rows over keys and values in pages (PagedAttention, arXiv:2309.06180).

    Semantics:
        for run r, its query row i, at position p = runs[2, r] + i, head h of KV group g:
            keys = positions max(0, p - kv.window + 1) to p, in the pages of run r
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
    for gather in plan.gathers:
        found = [
            torch.index_select(each, 0, gather.places, out=room[: len(gather.places)])
            for each, room in zip(rows, plan.room, strict=True)
        ]
        if gather.scale_places is not None:
            found = [
                dequantise(each, of_all[gather.scale_places], q.dtype)
                for each, of_all in zip(found, scales, strict=True)
            ]
        k, v = (each.view(gather.count * heads, gather.length, head_dim) for each in found)
        for block in gather.blocks:
            _attend(q, k[:, block.keys], v[:, block.keys], block, gather.count, scale, out)
    return out


def plan_key(q: Tensor, kv: KvLayer) -> tuple[object, ...]:
    """Key of a `GatherPlan` in a batch: everything of the operands that the plan depends on."""
    return "cpu", q.shape, q.dtype, q.device, kv.kind


def _attend(
    q: Tensor, k: Tensor, v: Tensor, block: QueryBlock, count: int, scale: float, out: Tensor
) -> None:
    """Compute the rows of a block over its keys and values, [count * Hkv, L, D]."""
    queries = q[block.rows] if isinstance(block.rows, slice) else q.index_select(0, block.rows)
    heads = len(k) // count
    shape = (count, len(queries) // count, heads, q.shape[1] // heads, q.shape[2])
    by_head = queries.unflatten(0, shape[:2]).unflatten(2, shape[2:4]).transpose(1, 2)
    scores = _scores(
        by_head.reshape(len(k), -1, q.shape[2]), k, scale
    )  # [n * Hkv, rows * group, L]
    if block.mask is not None:
        masked = scores[..., scores.shape[2] - block.mask.shape[4] :]
        masked.unflatten(1, (shape[1], shape[3])).unflatten(0, (count, heads)).add_(block.mask)
    result = _weighted(scores, v).view(count, heads, shape[1], shape[3], shape[4]).transpose(1, 2)
    if isinstance(block.rows, slice):
        out[block.rows].view(shape).copy_(result)
    else:
        out.index_copy_(0, block.rows, result.reshape(queries.shape))


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
    batch.expect_runs()
    head_dim = q.shape[2]
    strides = kv.strides[:3]
    expect_that(
        "k_pages",
        all(s % head_dim == 0 for s in strides),
        f"strides in multiples of {head_dim}",
        strides,
    )
    steps = [stride // head_dim for stride in strides]
    scale_steps = [] if kv.scales is None else list(kv.scales[0].stride())
    bucket_tokens = BUCKET_BYTES // (kv.k.shape[1] * head_dim * q.element_size())
    groups = [
        *_buckets(item_runs(batch.runs), kv.window, bucket_tokens),
        *(run[:, None] for run in batch.runs.T if run[1] > MAX_ITEM_ROWS),
    ]
    gathers = tuple(
        _gather(group.astype(np.int64), batch, kv, steps, scale_steps, q.dtype) for group in groups
    )
    largest = max((len(gather.places) for gather in gathers), default=0)
    return GatherPlan(
        gathers=gathers,
        num_arena_rows=_extent(kv.k.shape, steps),
        num_scales=_extent(kv.k.shape, scale_steps) if scale_steps else 0,
        room=(kv.k.new_empty((largest, head_dim)), kv.k.new_empty((largest, head_dim))),
    )


def _extent(shape: torch.Size, steps: list[int]) -> int:
    """Places from a layer's first to its last."""
    return 1 + sum((extent - 1) * step for extent, step in zip(shape[:3], steps, strict=True))


def _buckets(items: np.ndarray, window: int | None, max_tokens: int) -> Iterator[np.ndarray]:
    """Items of similar length, the longest first. A bucket ends where padding costs more than a new one."""
    lens = items[2] + 1 if window is None else np.minimum(items[2] + 1, window)
    order = np.argsort(-lens, kind="stable")
    start = waste = 0
    for place, length in enumerate(lens[order].tolist()):
        longest = int(lens[order[start]])
        waste += longest - length
        if waste > BUCKET_WASTE_TOKENS or (place + 1 - start) * longest > max(max_tokens, longest):
            yield items[:, np.sort(order[start:place])]
            start = place
            waste = 0
    if len(order):
        yield items[:, np.sort(order[start:])]


def _gather(
    runs: np.ndarray,
    batch: AttentionBatch,
    kv: KvLayer,
    steps: list[int],
    scale_steps: list[int],
    dtype: torch.dtype,
) -> Gather:
    """Plan the gather of one chunk, or of a bucket of items."""
    _, counts, firsts, tables = runs
    ends = firsts + counts
    begins = np.zeros_like(firsts) if kv.window is None else np.maximum(firsts + 1 - kv.window, 0)
    length = int((ends - begins).max())
    positions = begins[:, None] + np.arange(length)  # [n, L]
    positions = np.where(positions < ends[:, None], positions, begins[:, None])
    pages = batch.block_table.numpy()[tables[:, None] + positions // batch.page_tokens]
    pages = pages.astype(np.int64)

    def places(steps: list[int]) -> Tensor:
        page_step, head_step, token_step = steps
        found = pages * page_step + positions % batch.page_tokens * token_step
        of_heads = found[:, None] + (np.arange(kv.k.shape[1]) * head_step)[:, None]
        return torch.from_numpy(of_heads.reshape(-1))

    blocks = (
        _block(piece, begins, kv.window, dtype)
        for piece in ([runs] if len(counts) > 1 else cut(runs, QUERY_ROWS).T[:, :, None])
    )
    return Gather(
        count=len(counts),
        length=length,
        places=places(steps),
        scale_places=places(scale_steps) if scale_steps else None,
        blocks=tuple(blocks),
    )


def _block(
    runs: np.ndarray, begins: np.ndarray, window: int | None, dtype: torch.dtype
) -> QueryBlock:
    """Plan a block of runs with equal numbers of rows, whose gathered keys begin at these positions."""
    rows = (runs[0][:, None] + np.arange(runs[1, 0])).reshape(-1)
    last_seen = runs[2][:, None] + np.arange(runs[1, 0])  # [n, rows]
    end = int((last_seen[:, -1] - begins).max()) + 1
    begin = 0 if window is None else max(int((last_seen[:, 0] - begins).min()) - window + 1, 0)
    positions = begins[:, None, None] + np.arange(begin, end)  # [n, 1, L]
    is_hidden = positions > last_seen[:, :, None]
    if window is not None:
        is_hidden |= positions <= last_seen[:, :, None] - window
    masked = np.flatnonzero(is_hidden.any((0, 1)))
    mask = None
    if len(masked):
        hidden = is_hidden[:, None, :, None, masked[0] :]
        mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(dtype)
    first = int(rows[0])
    is_slice = int(rows[-1]) - first == len(rows) - 1
    return QueryBlock(
        rows=slice(first, first + len(rows)) if is_slice else torch.from_numpy(rows),
        keys=slice(begin, end),
        mask=mask,
    )


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
