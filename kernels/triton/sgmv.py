"""SGMV in Triton: two launches per site, shrink and expand, with weights read from scattered pages.

Ranks and offsets are read from device tables, so work is in proportion to true ranks and no address changes when
adapters come and go. There are no atomics: split-K partial sums go to float32 planes, which the expand adds up in a
fixed order, so results are bitwise repeatable. Triton's interpreter computes bfloat16 wrongly; under it every value is
cast to float32 right after its load.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.sgmv import (
    GROUP_ROWS,
    MAX_SLICES,
    UNIT_BYTES,
    SgmvSite,
    SgmvTables,
    Tiles,
    check_operands,
    row_pitch_units,
)


@triton.jit(do_not_specialize=["layer", "num_tokens"])
def shrink_kernel(
    x,
    arena,
    offsets,
    ranks,
    tile_slot,
    tile_start,
    tile_length,
    planes,
    layer,
    num_layers,
    num_modules,
    num_tokens,
    x_stride: tl.int64,
    MODULE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    K: tl.constexpr,
    PITCH: tl.constexpr,
    UNIT: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One block of rank rows of one slice of one tile, over one part of K.

    Semantics: `planes[part, row, slice * max_rank + n] = sum(x[row, k] * A[n, k] for k in part)`, n below the rank.
    Grid: (tile capacity, slices * cdiv(max_rank, BR), SPLIT_K).
    """
    RANK_BLOCKS: tl.constexpr = (GROUPS * 8 + BR - 1) // BR
    WIDTH: tl.constexpr = NUM_SLICES * GROUPS * 8
    tile = tl.program_id(0)
    which = tl.program_id(1) // RANK_BLOCKS
    rank_start = (tl.program_id(1) % RANK_BLOCKS) * BR
    part = tl.program_id(2)
    slot = tl.load(tile_slot + tile)
    if slot < 0:
        return
    entry = (slot.to(tl.int64) * num_layers + layer) * num_modules + MODULE + which
    rank = tl.multiple_of(tl.load(ranks + entry), 8)
    if rank_start >= rank:
        return
    m = tl.arange(0, BM)
    live_m = m < tl.load(tile_length + tile)
    rows = (tl.load(tile_start + tile) + m).to(tl.int64)
    n = rank_start + tl.arange(0, BR)
    live_n = n < rank
    group = tl.load(offsets + entry * (2 * GROUPS) + n // 8, mask=live_n, other=0).to(tl.int64)
    weight_rows = group * UNIT + (n % 8).to(tl.int64) * PITCH
    acc = tl.zeros((BM, BR), tl.float32)
    STEPS: tl.constexpr = ((K + SPLIT_K - 1) // SPLIT_K + BK - 1) // BK
    for step in range(STEPS):
        k = part * (STEPS * BK) + step * BK + tl.arange(0, BK)
        live_k = k < K
        a = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=live_m[:, None] & live_k[None, :], other=0.0)
        w = tl.load(arena + weight_rows[None, :] + k[:, None], mask=live_k[:, None] & live_n[None, :], other=0.0)
        if INTERPRET:
            a = a.to(tl.float32)
            w = w.to(tl.float32)
        acc += tl.dot(a, w, input_precision="ieee")
    out = planes + (part.to(tl.int64) * num_tokens + rows[:, None]) * WIDTH + which * (GROUPS * 8) + n[None, :]
    tl.store(out, acc, mask=live_m[:, None] & live_n[None, :])


@triton.jit(do_not_specialize=["layer", "num_tokens"])
def expand_kernel(
    planes,
    arena,
    offsets,
    ranks,
    scalings,
    tile_slot,
    tile_start,
    tile_length,
    y,
    layer,
    num_layers,
    num_modules,
    num_tokens,
    y_stride: tl.int64,
    MODULE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One block of output columns of one tile.

    Semantics: `y[row, n] += scaling * sum(planes[:, row, r].sum() * BT[r, n] for r in range(rank))`, the bridge rounded
    to the dtype of the weights. Grid: (tile capacity, sum over slices of cdiv(width, BN)). W0 to W2 are slice widths,
    0 where there is no slice; ALIGN divides all of them.
    """
    WIDTH: tl.constexpr = NUM_SLICES * GROUPS * 8
    BLOCKS0: tl.constexpr = (W0 + BN - 1) // BN
    BLOCKS1: tl.constexpr = BLOCKS0 + (W1 + BN - 1) // BN
    tile = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(tile_slot + tile)
    if slot < 0:
        return
    second = block >= BLOCKS0
    third = block >= BLOCKS1
    which = second.to(tl.int32) + third.to(tl.int32)
    width = tl.multiple_of(tl.where(third, W2, tl.where(second, W1, W0)), ALIGN)
    column = tl.multiple_of(tl.where(third, W0 + W1, tl.where(second, W0, 0)), ALIGN)
    n = (block - tl.where(third, BLOCKS1, tl.where(second, BLOCKS0, 0))) * BN + tl.arange(0, BN)
    entry = (slot.to(tl.int64) * num_layers + layer) * num_modules + MODULE + which
    rank = tl.multiple_of(tl.load(ranks + entry), 8)
    if rank == 0:
        return
    pitch = tl.multiple_of((width + UNIT - 1) // UNIT * UNIT, UNIT)
    m = tl.arange(0, BM)
    live_m = m < tl.load(tile_length + tile)
    live_n = n < width
    rows = (tl.load(tile_start + tile) + m).to(tl.int64)
    out = y + rows[:, None] * y_stride + (column + n)[None, :]
    prior = tl.load(out, mask=live_m[:, None] & live_n[None, :], other=0.0).to(tl.float32)
    scaling = tl.load(scalings + entry)
    acc = tl.zeros((BM, BN), tl.float32)
    for rank_start in range(0, rank, BR):
        r = rank_start + tl.arange(0, BR)
        live_r = r < rank
        bridge = tl.zeros((BM, BR), tl.float32)
        for part in tl.static_range(SPLIT_K):
            plane = planes + (part * num_tokens + rows[:, None]) * WIDTH + which * (GROUPS * 8) + r[None, :]
            bridge += tl.load(plane, mask=live_m[:, None] & live_r[None, :], other=0.0)
        group = tl.load(offsets + entry * (2 * GROUPS) + GROUPS + r // 8, mask=live_r, other=0).to(tl.int64)
        weight_rows = group * UNIT + (r % 8).to(tl.int64) * pitch
        w = tl.load(arena + weight_rows[:, None] + n[None, :], mask=live_r[:, None] & live_n[None, :], other=0.0)
        if INTERPRET:
            w = w.to(tl.float32)
        else:
            bridge = bridge.to(w.dtype)
        acc += tl.dot(bridge, w, input_precision="ieee")
    result = prior + acc * scaling
    tl.store(out, result.to(y.dtype.element_ty), mask=live_m[:, None] & live_n[None, :])


INTERPRET = not isinstance(shrink_kernel, triton.runtime.JITFunction)
"""Whether the kernels run through Triton's interpreter; decided by TRITON_INTERPRET when this module is imported."""


def sgmv(
    x: Tensor, y: Tensor, arena_elements: Tensor, tables: SgmvTables, tiles: Tiles, site: SgmvSite, layer: int
) -> None:
    """Add the low-rank products of every tile's adapter to its rows.

    Semantics and arguments: `weft.kernels.plain.sgmv.sgmv`. The grid depends on shapes only, never on what the
    tables hold, so a captured graph stays valid when adapters change. Tile lengths above `tiles.rows` are not computed.

    Raises:
        ValueError: An operand does not fit.
    """
    check_operands(x, y, arena_elements, tables, tiles, site, layer)
    capacity = tiles.slot.shape[0]
    if capacity == 0 or x.shape[0] == 0:
        return
    num_tokens = x.shape[0]
    _, num_layers, num_modules, _, groups = tables.offsets.shape
    num_slices = len(site.modules)
    unit = UNIT_BYTES // arena_elements.element_size()
    widths = site.widths + (0,) * (MAX_SLICES - num_slices)
    rank_block, column_block, k_block, split_k = block_sizes(site.in_features, tiles.rows, capacity, groups)
    planes = x.new_empty((split_k, num_tokens, num_slices * groups * GROUP_ROWS), dtype=torch.float32)
    weights = (arena_elements, tables.offsets, tables.ranks)
    tile = (tiles.slot, tiles.start, tiles.length)
    sizes = (layer, num_layers, num_modules, num_tokens)
    shared = {
        "UNIT": unit,
        "GROUPS": groups,
        "SPLIT_K": split_k,
        "NUM_SLICES": num_slices,
        "MODULE": site.modules[0],
        "BM": tiles.rows,
        "INTERPRET": INTERPRET,
        "num_warps": 4,
    }
    pitch = row_pitch_units(site.in_features, arena_elements.element_size()) * unit
    blocks = {"K": site.in_features, "PITCH": pitch, "BR": rank_block, "BK": k_block}
    shrink_kernel[(capacity, num_slices * -(-groups * GROUP_ROWS // rank_block), split_k)](
        x, *weights, *tile, planes, *sizes, x.stride(0), **blocks, num_stages=3, **shared
    )
    blocks = {"W0": widths[0], "W1": widths[1], "W2": widths[2], "BN": column_block, "BR": 16}
    shared["ALIGN"] = gcd(16, *site.widths)
    expand_kernel[(capacity, sum(-(-width // column_block) for width in widths))](
        planes, *weights, tables.scalings, *tile, y, *sizes, y.stride(0), **blocks, num_stages=2, **shared
    )


def block_sizes(in_features: int, tile_rows: int, capacity: int, groups: int) -> tuple[int, int, int, int]:
    """Choose (rank block, column block, k block, split-K) from shapes alone.

    Few tiles leave most of a GPU idle, so K is split among more programs; long tiles have work enough without.
    """
    if tile_rows > 16:
        rank_block = 16 if groups <= 2 else 32 if groups <= 4 else 64
        return rank_block, 128, 64, 1
    k_block = 256 if in_features >= 8192 else 128
    wanted = 8 if capacity <= 2 else 4 if capacity <= 16 else 2 if capacity < 64 else 1
    return 16, 128, k_block, max(1, min(wanted, -(-in_features // k_block)))
