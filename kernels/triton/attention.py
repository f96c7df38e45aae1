"""Paged attention in Triton: a split-KV kernel for single query rows, a tiled kernel for prompt chunks.

Flash-Decoding (Dao et al., 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html) for items, FlashAttention
(arXiv:2205.14135) with the heads of a KV group as rows of a tile for chunks. A row's keys are divided at multiples of a
fixed number of tokens, so its result does not depend on what else is in the batch. Page ids and all strides of the
arena are int64: an arena may be larger than 2^31 elements. Out-of-range keys and values are replaced by select. Keys of
int8 are multiplied as they are and their scales multiply the scores; values are multiplied by theirs first, because
their products with weights may be too small for float16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.attention_batch import SPLIT_TOKENS, TILE_HEADS, AttentionBatch, AttentionRows
from weft.kernels.kv_scales import KvScales
from weft.kernels.plain.attention import check_operands


@triton.jit
def _scores(q, k, live, scale):
    # In units of log2, so that exp2 can be used; masked by select, never by arithmetic.
    s = tl.dot(q, k, input_precision="ieee") * scale
    return tl.where(live, s * 1.4426950408889634, float("-inf"))


@triton.jit
def _load(pointers, live, INTERPRET: tl.constexpr):
    """What is live of a block, zero elsewhere; the interpreter computes other dtypes than float32 wrongly."""
    values = tl.load(pointers, mask=live, other=0.0)
    if INTERPRET:
        values = values.to(tl.float32)
    return values


@triton.jit
def _scaled(q, k, v, k_scales, v_scales, place, live, scale):
    """Keys and values of int8 in the dtype of q, and the factors of the scores, [1, tokens]."""
    key_scales = tl.load(k_scales + place, mask=live, other=0.0)
    value_scales = tl.load(v_scales + place, mask=live, other=0.0)
    values = v.to(tl.float32) * value_scales[:, None]
    return k.to(q.dtype), values.to(q.dtype), scale * key_scales[None, :]


@triton.jit
def _add_block(s, v, top, total, acc):
    """Take in a block of scores and values: the running maximum, the sum of weights and the weighted sum of values."""
    new_top = tl.maximum(top, tl.max(s, axis=1))
    # A row that has seen no key yet keeps -inf; the difference of two infinities is not a number.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - base)
    p = tl.exp2(s - base[:, None])
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return new_top, total * shrink + tl.sum(p, axis=1), acc


@triton.jit
def item_kernel(
    q,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    out,
    partial,
    partial_max,
    partial_sum,
    block_table,
    item_rows,
    item_tables,
    item_lens,
    scale,
    q_row: tl.int64,
    q_head: tl.int64,
    out_row: tl.int64,
    out_head: tl.int64,
    page_stride: tl.int64,
    head_stride: tl.int64,
    token_stride: tl.int64,
    scale_page_stride: tl.int64,
    scale_head_stride: tl.int64,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of one item's heads of one KV group over one split of its keys. Grid: (items, Hkv, NUM_SPLITS).

    With one split the result goes to `out`; else the unnormalised sum, the running maximum and the sum of weights go to
    the partial tensors, [items, Hq, NUM_SPLITS(, D)].
    """
    item = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(item_lens + item)
    begin = split * SPLIT
    end = tl.minimum(length, begin + SPLIT)
    if WINDOW > 0:
        begin = tl.maximum(begin, length - WINDOW)
    if (begin >= end) & (NUM_SPLITS > 1):
        return
    row = tl.load(item_rows + item).to(tl.int64)
    table = block_table + tl.load(item_tables + item)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    live_g = g < GROUP
    live_d = d < D
    head = kv_head * GROUP + g
    live = live_g[:, None] & live_d[None, :]
    query = _load(q + row * q_row + head[:, None] * q_head + d[None, :], live, INTERPRET)
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live_n = n < end
        page = tl.load(table + n // PAGE_TOKENS, mask=live_n, other=0).to(tl.int64)
        token = (n % PAGE_TOKENS).to(tl.int64)
        tokens = kv_head * head_stride + page * page_stride + token * token_stride
        k = _load(k_pages + tokens[None, :] + d[:, None], live_d[:, None] & live_n[None, :], INTERPRET)
        v = _load(v_pages + tokens[:, None] + d[None, :], live_n[:, None] & live_d[None, :], INTERPRET)
        factors = scale
        if k_scales is not None:
            place = kv_head * scale_head_stride + page * scale_page_stride + token
            k, v, factors = _scaled(query, k, v, k_scales, v_scales, place, live_n, scale)
        s = _scores(query, k, live_n[None, :], factors)
        top, total, acc = _add_block(s, v, top, total, acc)
    if NUM_SPLITS == 1:
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        place = out + row * out_row + head[:, None] * out_head + d[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=live)
    else:
        heads = tl.num_programs(1) * GROUP
        place = (item * heads + head) * NUM_SPLITS + split
        tl.store(partial + place[:, None] * D + d[None, :], acc, mask=live)
        tl.store(partial_max + place, top, mask=live_g)
        tl.store(partial_sum + place, total, mask=live_g)


@triton.jit
def reduce_kernel(
    partial,
    partial_max,
    partial_sum,
    out,
    item_rows,
    item_lens,
    out_row: tl.int64,
    out_head: tl.int64,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Merge the splits of one head of one item. Grid: (items, Hq). Splits that were not computed are not read."""
    item = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(item_lens + item)
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    s = tl.arange(0, BLOCK_S)
    live_s = (s < NUM_SPLITS) & (s * SPLIT < length) & ((s + 1) * SPLIT > first)
    d = tl.arange(0, BLOCK_D)
    place = (item * tl.num_programs(1) + head) * NUM_SPLITS + s
    top = tl.load(partial_max + place, mask=live_s, other=float("-inf"))
    best = tl.max(top, axis=0)
    weight = tl.where(live_s, tl.exp2(top - best), 0.0)
    total = tl.sum(weight * tl.load(partial_sum + place, mask=live_s, other=0.0), axis=0)
    values = tl.load(partial + place[:, None] * D + d[None, :], mask=live_s[:, None] & (d < D)[None, :], other=0.0)
    result = tl.sum(weight[:, None] * values, axis=0) / tl.where(total > 0.0, total, 1.0)
    row = tl.load(item_rows + item).to(tl.int64)
    tl.store(out + row * out_row + head * out_head + d, result.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def chunk_kernel(
    q,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    out,
    block_table,
    tiles,
    scale,
    q_row: tl.int64,
    q_head: tl.int64,
    out_row: tl.int64,
    out_head: tl.int64,
    page_stride: tl.int64,
    head_stride: tl.int64,
    token_stride: tl.int64,
    scale_page_stride: tl.int64,
    scale_head_stride: tl.int64,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of BLOCK_M // GROUP query rows of one request and the heads of one KV group. Grid: (tiles, Hkv)."""
    ROWS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    num_tiles = tl.num_programs(0)
    first_row = tl.load(tiles + tile)
    num_rows = tl.load(tiles + num_tiles + tile)
    first_position = tl.load(tiles + 2 * num_tiles + tile)
    table = block_table + tl.load(tiles + 3 * num_tiles + tile)
    m = tl.arange(0, BLOCK_M)
    index = m // GROUP
    live_m = (m < ROWS * GROUP) & (index < num_rows)
    position = first_position + index
    row = (first_row + index).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    live_d = d < D
    live = live_m[:, None] & live_d[None, :]
    query = _load(q + row[:, None] * q_row + head[:, None] * q_head + d[None, :], live, INTERPRET)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = first_position + num_rows
    begin = end * 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live_n = n < end
        page = tl.load(table + n // PAGE_TOKENS, mask=live_n, other=0).to(tl.int64)
        token = (n % PAGE_TOKENS).to(tl.int64)
        tokens = kv_head * head_stride + page * page_stride + token * token_stride
        k = _load(k_pages + tokens[None, :] + d[:, None], live_d[:, None] & live_n[None, :], INTERPRET)
        v = _load(v_pages + tokens[:, None] + d[None, :], live_n[:, None] & live_d[None, :], INTERPRET)
        seen = (n[None, :] <= position[:, None]) & live_n[None, :]
        if WINDOW > 0:
            seen = seen & (n[None, :] > position[:, None] - WINDOW)
        factors = scale
        if k_scales is not None:
            place = kv_head * scale_head_stride + page * scale_page_stride + token
            k, v, factors = _scaled(query, k, v, k_scales, v_scales, place, live_n, scale)
        s = _scores(query, k, seen, factors)
        top, total, acc = _add_block(s, v, top, total, acc)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    place = out + row[:, None] * out_row + head[:, None] * out_head + d[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=live)


INTERPRET = not isinstance(item_kernel, triton.runtime.JITFunction)
"""Whether the kernels run through Triton's interpreter; decided by TRITON_INTERPRET when this module is imported."""


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    kv_scales: KvScales | None = None,
) -> Tensor:
    """Causal attention of a step's query rows over keys and values in pages.

    Semantics and arguments: `weft.kernels.plain.attention.paged_attention`. The grid depends on the numbers of
    items and tiles and on `batch.max_item_len`, not on the lengths themselves.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    check_operands(q, k_pages, v_pages, batch, sliding_window, kv_scales)
    rows = batch.rows(q.shape[1] // k_pages.shape[1], sliding_window or 0)
    out = q.new_empty(q.shape) if batch.num_rows == q.shape[0] else q.new_zeros(q.shape)
    tensors = (q, k_pages, v_pages, *(kv_scales or (None, None)), out)
    scale_strides = (0, 0) if kv_scales is None else kv_scales[0].stride()[:2]
    strides = (*q.stride()[:2], *out.stride()[:2], *k_pages.stride()[:3], *scale_strides)
    numbers = (scale, *strides)
    shared = {
        "GROUP": q.shape[1] // k_pages.shape[1],
        "D": q.shape[2],
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[2])),
        "BLOCK_N": 64,
        "PAGE_TOKENS": batch.page_tokens,
        "WINDOW": sliding_window or 0,
        "INTERPRET": INTERPRET,
        "num_warps": 4,
        "num_stages": 2,
    }
    if len(rows.item_rows):
        _launch_items(tensors, rows, int(batch.items_host[2].max()), numbers, shared)
    if rows.tiles.shape[1]:
        _launch_chunks(tensors, rows, numbers, shared)
    return out


def _launch_items(tensors, rows: AttentionRows, max_len: int, numbers, shared) -> None:
    q, k_pages, *_, out = tensors
    num_items, num_heads, head_dim = len(rows.item_rows), q.shape[1], q.shape[2]
    num_splits = max(1, -(-max_len // SPLIT_TOKENS))
    split = SPLIT_TOKENS if num_splits > 1 else max(SPLIT_TOKENS, max_len)
    wide = {"dtype": torch.float32, "device": q.device}
    cells = (num_items, num_heads, num_splits) if num_splits > 1 else (0, 0, 0)
    partials = (torch.empty((*cells, head_dim), **wide), torch.empty(cells, **wide), torch.empty(cells, **wide))
    splits = {"SPLIT": split, "NUM_SPLITS": num_splits}
    block_g = max(16, triton.next_power_of_2(shared["GROUP"]))
    items = (rows.item_rows, rows.item_tables, rows.item_lens)
    item_kernel[(num_items, k_pages.shape[1], num_splits)](
        *tensors, *partials, rows.block_table, *items, *numbers, BLOCK_G=block_g, **splits, **shared
    )
    if num_splits > 1:
        sizes = {name: shared[name] for name in ("D", "BLOCK_D", "WINDOW", "num_warps")}
        block_s = triton.next_power_of_2(num_splits)
        reduce_kernel[(num_items, num_heads)](
            *partials, out, rows.item_rows, rows.item_lens, *out.stride()[:2], BLOCK_S=block_s, **splits, **sizes
        )


def _launch_chunks(tensors, rows: AttentionRows, numbers, shared) -> None:
    block_m = max(TILE_HEADS, triton.next_power_of_2(shared["GROUP"]))
    chunk_kernel[(rows.tiles.shape[1], tensors[1].shape[1])](
        *tensors, rows.block_table, rows.tiles, *numbers, BLOCK_M=block_m, **shared
    )
