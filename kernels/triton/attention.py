"""Paged attention in Triton: a split-KV kernel for single query rows, a tiled kernel for prompt chunks.

Flash-Decoding (Dao et al., 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html) for items, FlashAttention
(arXiv:2205.14135) with the heads of a KV group as rows of a tile for chunks. The splits of an item depend only on the
number of its keys and are merged in order, so its result does not depend on the rest of the batch. Grids and variants
do not depend on lengths, which are read from device memory: a captured launch serves other lengths as well.

Page ids and all strides of the arena are int64: an arena may be larger than 2^31 elements. Out-of-range keys and values
are replaced by select. Keys of int8 are multiplied as they are, and their scales multiply the scores. Values of int8
are multiplied by their scales first, because their products with weights may be too small for float16. Products and
sums are not fused, so that a row has the same bits in every place of a tile.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.attention_batch import (
    MAX_SPLITS,
    PARTIAL_PAD,
    SPLIT_TOKENS,
    AttentionBatch,
    chunk_tile_rows,
)
from manylora.kernels.kv_layer import KvLayer
from manylora.kernels.plain.attention import check_operands
from manylora.kernels.triton.attention_blocks import attend, load, shrunk
from manylora.kernels.triton.plans import architecture, plan

MERGED = 2048
"""Elements of partial sums that are read at once: 16 of each thread."""
PROGRAMS_PER_SM = 4
WARP_GROUPS = ("sm90", "sm100", "sm103")
"""Architectures on which four warps multiply together, from shared memory."""
BLACKWELL = WARP_GROUPS[1:]
SPILLING = (torch.float16, torch.int8)
"""Dtypes of queries and keys with which items need more registers on these GPUs than the compiler takes by itself."""


@triton.jit
def _item_of(work, num_items, unit, BLOCK: tl.constexpr):
    """The item of a split: the number of items that end before it, counted without a chain of loads."""
    found = num_items * 0
    for start in range(0, num_items, BLOCK):
        i = start + tl.arange(0, BLOCK)
        ends = tl.load(work + 1 + i, mask=i < num_items, other=2147483647)
        found += tl.sum((ends <= unit).to(tl.int32), axis=0)
    return found


@triton.jit
def _merged(
    partials,
    first,
    count,
    kv_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ALL_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The result of an item's heads of one KV group from its splits, [ALL_G, BLOCK_D]."""
    g = tl.arange(0, ALL_G)
    d = tl.arange(0, BLOCK_D)
    top = tl.full((ALL_G,), float("-inf"), tl.float32)
    total = tl.zeros((ALL_G,), tl.float32)
    acc = tl.zeros((ALL_G, BLOCK_D), tl.float32)
    for start in range(0, count, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        live = (s < count)[:, None] & (g < GROUP)[None, :]
        place = (
            partials
            + (((first + s).to(tl.int64) * HEADS + kv_head) * GROUP)[:, None] * PITCH
            + g[None, :] * PITCH
        )
        # Other programs wrote them, so they are read from the cache that all programs share.
        tops = tl.load(place + D, mask=live, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(place + D + 1, mask=live, other=0.0, cache_modifier=".cg")
        live_values = live[:, :, None] & (d < D)[None, None, :]
        values = tl.load(
            place[:, :, None] + d[None, None, :], mask=live_values, other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        shrink, base = shrunk(top, new_top)
        weights = tl.exp2(tops - base[None, :])
        total = total * shrink + tl.sum(weights * totals, axis=0)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * values, axis=0)
        top = new_top
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit(
    do_not_specialize=["num_items"],
    do_not_specialize_on_alignment=["block_table", "item_rows", "item_tables", "item_lens", "work"],
)
def item_kernel(
    q,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    out,
    partials,
    counters,
    block_table,
    item_rows,
    item_tables,
    item_lens,
    work,
    num_items,
    factor,
    q_row: tl.int64,
    q_head: tl.int64,
    out_row: tl.int64,
    out_head: tl.int64,
    page_stride: tl.int64,
    head_stride: tl.int64,
    token_stride: tl.int64,
    scale_page_stride: tl.int64,
    scale_head_stride: tl.int64,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ALL_G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PITCH: tl.constexpr,
    WINDOW: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of single rows. Grid: any number of programs, which take splits of items and KV heads in turn.

    The result of an item with one split goes to `out`. With more splits, the unnormalised sum, the running maximum and
    the sum of weights of each go to the partials, [splits of all items, Hq, PITCH]. The program that finishes an item's
    last split of a KV head merges them. No program waits for another.
    """
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    live = (g < GROUP)[:, None] & (d < D)[None, :]
    for task in range(tl.program_id(0), tl.load(work + num_items) * HEADS, tl.num_programs(0)):
        unit = task // HEADS
        kv_head = tl.cast(task % HEADS, tl.int64)
        item = _item_of(work, num_items, unit, 128)
        first = tl.load(work + item)
        count = tl.load(work + item + 1) - first
        length = tl.load(item_lens + item)
        row = tl.load(item_rows + item).to(tl.int64)
        table = block_table + tl.load(item_tables + item)
        head = kv_head * GROUP + g
        query = load(q + row * q_row + head[:, None] * q_head + d[None, :], live, INTERPRET)
        seen = length
        if WINDOW > 0:
            seen = tl.minimum(length, WINDOW)
        size = seen * 0 + SPLIT
        while size * SPLITS < seen:
            size *= 2
        begin = length - seen + (unit - first) * size
        top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        position = tl.zeros((BLOCK_G,), tl.int32) + length
        end = tl.minimum(length, begin + size)
        k_head = k_pages + kv_head * head_stride
        v_head = v_pages + kv_head * head_stride
        k_scale = k_scales
        v_scale = v_scales
        if k_scales is not None:
            k_scale = k_scales + kv_head * scale_head_stride
            v_scale = v_scales + kv_head * scale_head_stride
        top, total, acc = attend(
            query,
            top,
            total,
            acc,
            k_head,
            v_head,
            k_scale,
            v_scale,
            table,
            begin,
            end,
            length,
            position,
            factor,
            page_stride,
            token_stride,
            scale_page_stride,
            D,
            BLOCK_D,
            PAGE_TOKENS,
            BLOCK_N,
            0,
            True,
            INTERPRET,
        )
        if count == 1:
            result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            place = out + row * out_row + head[:, None] * out_head + d[None, :]
            tl.store(place, result.to(out.dtype.element_ty), mask=live)
        else:
            partial = partials + (tl.cast(unit, tl.int64) * HEADS * GROUP + head) * PITCH
            tl.store(partial[:, None] + d[None, :], acc, mask=live)
            tl.store(partial + D, top, mask=g < GROUP)
            tl.store(partial + D + 1, total, mask=g < GROUP)
            tl.debug_barrier()  # all threads have stored before one of them counts the split
            counter = counters + item * HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                tl.store(counter, 0)
                merged = _merged(
                    partials, first, count, kv_head, HEADS, GROUP, ALL_G, D, BLOCK_D, PITCH, BLOCK_S
                )
                all_g = tl.arange(0, ALL_G)
                target = (
                    out + row * out_row + (kv_head * GROUP + all_g)[:, None] * out_head + d[None, :]
                )
                tl.store(
                    target,
                    merged.to(out.dtype.element_ty),
                    mask=(all_g < GROUP)[:, None] & (d < D)[None, :],
                )


@triton.jit(
    do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["block_table", "tiles"]
)
def chunk_kernel(
    q,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    out,
    block_table,
    tiles,
    num_tiles,
    factor,
    q_row: tl.int64,
    q_head: tl.int64,
    out_row: tl.int64,
    out_head: tl.int64,
    page_stride: tl.int64,
    head_stride: tl.int64,
    token_stride: tl.int64,
    scale_page_stride: tl.int64,
    scale_head_stride: tl.int64,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of BLOCK_M // GROUP rows of a tile and the heads of one KV group. Grid: (Hkv * PARTS, tiles)."""
    ROWS: tl.constexpr = BLOCK_M // GROUP
    tile = tiles + tl.program_id(1)
    kv_head = (tl.program_id(0) // PARTS).to(tl.int64)
    before = tl.program_id(0) % PARTS * ROWS
    num_rows = tl.minimum(tl.load(tile + num_tiles) - before, ROWS)
    if num_rows <= 0:
        return
    first = tl.load(tile + 2 * num_tiles) + before
    last = first + num_rows
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    live = (m // GROUP < num_rows)[:, None] & (d < D)[None, :]
    position = first + m // GROUP
    row = (tl.load(tile) + before + m // GROUP).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    query = load(q + row[:, None] * q_row + head[:, None] * q_head + d[None, :], live, INTERPRET)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = block_table + tl.load(tile + 3 * num_tiles)
    k_pages += kv_head * head_stride
    v_pages += kv_head * head_stride
    if k_scales is not None:
        k_scales += kv_head * scale_head_stride
        v_scales += kv_head * scale_head_stride
    # All rows see the blocks from `full` to `diagonal`.
    begin = first * 0
    full = begin
    diagonal = (first + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full = tl.maximum(last - WINDOW + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        diagonal = tl.maximum(diagonal, full)
    borders = begin, full, diagonal, last
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        top, total, acc = attend(
            query,
            top,
            total,
            acc,
            k_pages,
            v_pages,
            k_scales,
            v_scales,
            table,
            borders[part],
            borders[part + 1],
            last,
            position,
            factor,
            page_stride,
            token_stride,
            scale_page_stride,
            D,
            BLOCK_D,
            PAGE_TOKENS,
            BLOCK_N,
            0 if part == 1 else WINDOW,
            part != 1,
            INTERPRET,
        )
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    place = out + row[:, None] * out_row + head[:, None] * out_head + d[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=live)


INTERPRET = not isinstance(item_kernel, triton.runtime.JITFunction)
"""True if the kernels run in Triton's interpreter: TRITON_INTERPRET decides when this module is imported."""


@functools.cache
def item_sizes(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> dict[str, int]:
    """Constants of `item_kernel` that follow from shapes and dtypes, with its warps and stages.

    Five stages load the pages of a block two blocks ahead, and its keys and values one block ahead.
    """
    group = num_heads // num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    # Each of 128 threads stores two numbers at least.
    all_g = max(triton.next_power_of_2(group), 256 // block_d)
    return {
        "HEADS": num_kv_heads,
        "GROUP": group,
        "ALL_G": all_g,
        "BLOCK_G": max(16, all_g),
        "D": head_dim,
        "BLOCK_D": block_d,
        # Registers limit the blocks for int8; shared memory limits those for float32 and wide heads.
        "BLOCK_N": 64 if kv_dtype.itemsize == 2 and head_dim <= 128 else 32,
        "SPLIT": SPLIT_TOKENS,
        "SPLITS": MAX_SPLITS,
        "BLOCK_S": min(MAX_SPLITS, max(1, MERGED // (all_g * block_d))),
        "PITCH": head_dim + PARTIAL_PAD,
        "num_warps": 4,
        "num_stages": 5,
        **(
            {"maxnreg": 240}
            if (dtype, kv_dtype) == SPILLING and architecture() in BLACKWELL
            else {}
        ),
    }


@functools.cache
def chunk_sizes(
    group: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> dict[str, int]:
    """Constants of `chunk_kernel` that follow from shapes and dtypes, with its warps and stages."""
    rows = (
        16 if dtype == torch.float32 else 128 if head_dim <= 128 else 64
    )  # float32: no tensor cores
    block_m = max(rows, triton.next_power_of_2(group))
    return {
        "PARTS": triton.cdiv(chunk_tile_rows(group), block_m // group),
        "GROUP": group,
        "BLOCK_M": block_m,
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        # Registers limit the block.
        "BLOCK_N": 16
        if kv_dtype == torch.int8 and (head_dim > 128 or architecture() not in WARP_GROUPS)
        else 32,
        "num_warps": 8,
        "num_stages": 5,
    }


def paged_attention(q: Tensor, kv: KvLayer, batch: AttentionBatch, scale: float) -> Tensor:
    """Causal attention of a step's query rows over keys and values in pages.

    Semantics and arguments: `manylora.kernels.plain.attention.paged_attention`. The grids depend on
    the largest numbers of items and tiles, not on lengths.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    check_operands(q, kv, batch)
    window = kv.window or 0
    num_kv_heads = kv.k.shape[1]
    kept = kv.k.dtype
    group = q.shape[1] // num_kv_heads
    head_dim = q.shape[2]
    rows = batch.rows(group, window)
    out = q.new_empty(q.shape) if batch.num_rows == q.shape[0] else q.new_zeros(q.shape)
    tensors = (q, *kv.tensors, out)
    numbers = (scale * math.log2(math.e), *q.stride()[:2], *out.stride()[:2], *kv.strides)
    shared = {
        "PAGE_TOKENS": batch.page_tokens,
        "WINDOW": window,
        "INTERPRET": INTERPRET,
        "enable_fp_fusion": False,
    }
    if num_items := len(rows.item_rows):
        shape = (rows.num_partials, q.shape[1], head_dim + PARTIAL_PAD)
        partials = torch.empty(shape, dtype=torch.float32, device=q.device)
        items = (rows.item_rows, rows.item_tables, rows.item_lens, rows.work[window], num_items)
        item_kernel[(_num_programs(q.device),)](
            *tensors,
            partials,
            rows.counters(num_kv_heads),
            rows.block_table,
            *items,
            *numbers,
            **_planned(
                "items", item_sizes(q.shape[1], num_kv_heads, head_dim, q.dtype, kept), kept
            ),
            **shared,
        )
    if num_tiles := rows.tiles.shape[1]:
        sizes = chunk_sizes(group, head_dim, torch.bfloat16 if INTERPRET else q.dtype, kept)
        chunk_kernel[(num_kv_heads * sizes["PARTS"], num_tiles)](
            *tensors,
            rows.block_table,
            rows.tiles,
            num_tiles,
            *numbers,
            **_planned("chunks", sizes, kept),
            **shared,
        )
    return out


def _planned(kernel: str, sizes: dict[str, int], kv_dtype: torch.dtype) -> dict[str, int]:
    """Sizes with the measured constants of the kernel, which hold for heads of up to 128 numbers of two bytes."""
    if INTERPRET:
        return {**sizes, "BLOCK_N": 64}  # the interpreter is fastest with few large blocks
    if sizes["BLOCK_D"] > 128 or kv_dtype.itemsize != 2:
        return sizes
    return {
        **sizes,
        **plan(kernel, **{name: sizes[name] for name in ("BLOCK_N", "num_stages", "num_warps")}),
    }


@functools.cache
def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # interpreted, one after the other
    return PROGRAMS_PER_SM * int(torch.cuda.get_device_properties(device).multi_processor_count)
