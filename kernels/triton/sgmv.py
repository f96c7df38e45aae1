"""SGMV in Triton: shrink, and expand as part of the operation that reads the site's output, or alone.

Ranks and offsets are read from device tables, so work is in proportion to true ranks and no address changes when
adapters come and go. There are no atomics: split-K partial sums go to float32 planes, which the expand adds up in a
fixed order, so results are bitwise repeatable. Triton's interpreter computes bfloat16 wrongly; under it every value is
cast to float32 right after its load.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.sgmv import LoraDelta, SgmvOperands, check_operands
from manylora.kernels.triton.plans import plan
from manylora.lora_rows import GROUP_ROWS, PITCH_BYTES, row_pitch_bytes


@triton.jit(do_not_specialize=["layer", "num_tokens"], do_not_specialize_on_alignment=["tiles"])
def shrink_kernel(
    x,
    delta,
    tiles,
    layer,
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
    Grid: (tiles, slices * cdiv(max_rank, BR), SPLIT_K).
    """
    RANK_BLOCKS: tl.constexpr = (GROUPS * 8 + BR - 1) // BR
    WIDTH: tl.constexpr = NUM_SLICES * GROUPS * 8
    which = tl.program_id(1) // RANK_BLOCKS
    rank_start = (tl.program_id(1) % RANK_BLOCKS) * BR
    part = tl.program_id(2)
    slot, _, _, rows, live_m = tile_of(tiles, num_tokens, BM)
    planes, arena, offsets, _, _, _, _ = delta
    entry, rank = entry_of(delta, slot, layer, MODULE + which)
    if rank_start >= rank:
        return
    n = rank_start + tl.arange(0, BR)
    live_n = n < rank
    group = tl.load(offsets + entry * (2 * GROUPS) + n // 8, mask=live_n, other=0).to(tl.int64)
    weight_rows = group * UNIT + (n % 8).to(tl.int64) * PITCH
    acc = tl.zeros((BM, BR), tl.float32)
    STEPS: tl.constexpr = ((K + SPLIT_K - 1) // SPLIT_K + BK - 1) // BK
    for step in range(STEPS):
        k = part * (STEPS * BK) + step * BK + tl.arange(0, BK)
        live_k = k < K
        a = tl.load(
            x + rows[:, None] * x_stride + k[None, :],
            mask=live_m[:, None] & live_k[None, :],
            other=0.0,
        )
        w = tl.load(
            arena + weight_rows[None, :] + k[:, None],
            mask=live_k[:, None] & live_n[None, :],
            other=0.0,
        )
        if INTERPRET:
            a = a.to(tl.float32)
            w = w.to(tl.float32)
        acc += tl.dot(a, w, input_precision="ieee")
    out = (
        planes
        + (part.to(tl.int64) * num_tokens + rows[:, None]) * WIDTH
        + which * (GROUPS * 8)
        + n[None, :]
    )
    tl.store(out, acc, mask=live_m[:, None] & live_n[None, :])


@triton.jit
def tile_of(tiles, num_tokens, BM: tl.constexpr):
    """A program's tile: slot, first row, number of rows, rows [BM] and which of them it has.

    Grid: (tiles, ...). Without tiles, they are BM rows of the base after the other.
    """
    tile = tl.program_id(0)
    if tiles is None:
        slot = tl.full((), -1, tl.int32)
        start = tile * BM
        length = tl.minimum(num_tokens - start, BM)
    else:
        slot = tl.load(tiles + tile)
        start = tl.load(tiles + tl.num_programs(0) + tile)
        length = tl.load(tiles + 2 * tl.num_programs(0) + tile)
    m = tl.arange(0, BM)
    return slot, start, length, (start + m).to(tl.int64), m < length


@triton.jit
def entry_of(delta, slot, layer, module):
    """Where an adapter's module stands in the tables, and its rank; 0 for the base."""
    _, _, _, ranks, _, num_layers, num_modules = delta
    entry = (slot.to(tl.int64) * num_layers + layer) * num_modules + module
    return entry, tl.multiple_of(tl.load(ranks + entry, mask=slot >= 0, other=0), 8)


@triton.jit
def add_delta(
    y, delta, tile, which, n, live_n, width, BN: tl.constexpr, BM: tl.constexpr, SITE: tl.constexpr
):
    """Add what an adapter adds to columns `n` of a slice of `width` to y [BM, BN], in its dtype; at rank 0, y as it is.

    A tile is its slot, the layer, its rows, which of them it has, and the number of rows of all tiles.

    Semantics: `y + scaling * sum(planes[:, row, r].sum() * BT[r, n] for r in range(rank))`, the sum of the planes
    rounded to the dtype of the weights.
    """
    UNIT: tl.constexpr = SITE[1]
    GROUPS: tl.constexpr = SITE[2]
    SPLIT_K: tl.constexpr = SITE[3]
    BR: tl.constexpr = SITE[4]
    WIDTH: tl.constexpr = SITE[0] * GROUPS * 8
    planes, arena, offsets, _, scalings, _, _ = delta
    slot, layer, rows, live_m, num_tokens = tile
    entry, rank = entry_of(delta, slot, layer, SITE[6] + which)
    pitch = (width + UNIT - 1) // UNIT * UNIT
    scaling = tl.load(scalings + entry, mask=rank > 0, other=0.0)
    acc = tl.zeros((BM, BN), tl.float32)
    for rank_start in range(0, rank, BR):
        r = rank_start + tl.arange(0, BR)
        live_r = r < rank
        bridge = tl.zeros((BM, BR), tl.float32)
        for part in tl.static_range(SPLIT_K):
            plane = (
                planes
                + (part * num_tokens + rows[:, None]) * WIDTH
                + which * (GROUPS * 8)
                + r[None, :]
            )
            bridge += tl.load(plane, mask=live_m[:, None] & live_r[None, :], other=0.0)
        group = tl.load(offsets + entry * (2 * GROUPS) + GROUPS + r // 8, mask=live_r, other=0).to(
            tl.int64
        )
        weight_rows = group * UNIT + (r % 8).to(tl.int64) * pitch
        w = tl.load(
            arena + weight_rows[:, None] + n[None, :],
            mask=live_r[:, None] & live_n[None, :],
            other=0.0,
        )
        if SITE[5]:
            w = w.to(tl.float32)
        else:
            bridge = bridge.to(w.dtype)
        acc += tl.dot(bridge, w, input_precision="ieee")
    return tl.where(rank > 0, (y.to(tl.float32) + acc * scaling).to(y.dtype), y)


@triton.jit(do_not_specialize=["layer", "num_tokens"], do_not_specialize_on_alignment=["tiles"])
def expand_kernel(
    y,
    delta,
    tiles,
    layer,
    num_tokens,
    y_stride: tl.int64,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    ALIGN: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SITE: tl.constexpr,
):
    """`add_delta` to one block of output columns of one tile, in place.

    Grid: (tiles, sum over slices of cdiv(width, BN)). W0 to W2 are slice widths, 0 where there is no slice; ALIGN
    divides all of them.
    """
    BLOCKS0: tl.constexpr = (W0 + BN - 1) // BN
    BLOCKS1: tl.constexpr = BLOCKS0 + (W1 + BN - 1) // BN
    slot, _, _, rows, live_m = tile_of(tiles, num_tokens, BM)
    block = tl.program_id(1)
    second = block >= BLOCKS0
    third = block >= BLOCKS1
    which = second.to(tl.int32) + third.to(tl.int32)
    width = tl.multiple_of(tl.where(third, W2, tl.where(second, W1, W0)), ALIGN)
    column = tl.multiple_of(tl.where(third, W0 + W1, tl.where(second, W0, 0)), ALIGN)
    n = (block - tl.where(third, BLOCKS1, tl.where(second, BLOCKS0, 0))) * BN + tl.arange(0, BN)
    _, rank = entry_of(delta, slot, layer, SITE[6] + which)
    if rank == 0:
        return
    live_n = n < width
    out = y + rows[:, None] * y_stride + (column + n)[None, :]
    prior = tl.load(out, mask=live_m[:, None] & live_n[None, :], other=0.0)
    tile = slot, layer, rows, live_m, num_tokens
    result = add_delta(prior, delta, tile, which, n, live_n, width, BN, BM, SITE)
    tl.store(out, result, mask=live_m[:, None] & live_n[None, :])


INTERPRET = not isinstance(shrink_kernel, triton.runtime.JITFunction)
"""Whether the kernels run through Triton's interpreter; decided by TRITON_INTERPRET when this module is imported."""
COLUMN_BLOCK = 128
"""Output columns that one program of the expand computes."""
SHRINK_WARPS = 8
"""With 4, a thread has more elements of short tiles than registers that let a GPU hold many programs."""


def shrink(x: Tensor, operands: SgmvOperands) -> LoraDelta:
    """Multiply every tile's rows with its adapter's A; what `sgmv` adds to y can then be added by `expand`.

    The grid depends on shapes only, never on what the tables hold, so a captured graph stays valid when adapters
    change. Tile lengths above `tiles.rows` are not computed.

    Args:
        x: Input of the site, [num_tokens, in_features].
        operands: As for `sgmv`.

    Raises:
        ValueError: An operand does not fit.
    """
    arena_elements, tables, tiles, site, _ = operands
    check_operands(x, operands)
    num_tokens, num_slices, num_tiles = x.shape[0], len(site.modules), tiles.numbers.shape[1]
    groups = tables.offsets.shape[4]
    element_size = arena_elements.element_size()
    unit = PITCH_BYTES // element_size
    sizes = shrink_sizes(site.in_features, tiles.rows, groups, element_size)
    if element_size == 2:  # what fits a GPU then may not in float32
        sizes = plan(f"shrink {site.in_features} {tiles.rows}", **sizes)
    split_k, rank_blocks = sizes["SPLIT_K"], -(-groups * GROUP_ROWS // sizes["BR"])
    planes = x.new_empty(
        (split_k, num_tokens, num_slices * groups * GROUP_ROWS), dtype=torch.float32
    )
    delta = LoraDelta(planes, operands)
    if num_tiles and num_tokens:
        pitch = row_pitch_bytes(site.in_features, element_size) // element_size
        shape = {
            "MODULE": site.modules[0],
            "NUM_SLICES": num_slices,
            "UNIT": unit,
            "GROUPS": groups,
        }
        shrink_kernel[(num_tiles, num_slices * rank_blocks, split_k)](
            *(x, *delta_operands(delta, num_tokens)[1], x.stride(0)),
            **{
                "K": site.in_features,
                "PITCH": pitch,
                "BM": tiles.rows,
                **shape,
                **sizes,
                "INTERPRET": INTERPRET,
            },
            num_warps=SHRINK_WARPS,
        )
    return delta


def expand(y: Tensor, delta: LoraDelta) -> None:
    """Add a delta to its site's output, [num_tokens, sum of widths], in place."""
    site = delta.operands.site
    widths = (*site.widths, 0, 0)[:3]
    num_tiles, operands, constants = delta_operands(delta, len(y))
    if num_tiles and len(y):
        blocks = {"W0": widths[0], "W1": widths[1], "W2": widths[2], "BN": COLUMN_BLOCK}
        expand_kernel[(num_tiles, sum(-(-width // COLUMN_BLOCK) for width in widths))](
            *(y, *operands, y.stride(0)),
            **{**blocks, **constants, "ALIGN": gcd(16, *site.widths)},
            num_warps=num_warps(constants),
            num_stages=2,
        )


def sgmv(x: Tensor, y: Tensor, operands: SgmvOperands) -> None:
    """Add the low-rank products of every tile's adapter to its rows.

    Semantics and arguments: `manylora.kernels.plain.sgmv.sgmv`.

    Raises:
        ValueError: An operand does not fit.
    """
    check_operands(x, operands, y)
    expand(y, shrink(x, operands))


def delta_operands(
    delta: LoraDelta | None, num_tokens: int
) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """What kernels with `add_delta` take.

    Args:
        delta: None for rows of the base alone, which are cut into tiles of 16.
        num_tokens: Rows.

    Returns:
        The number of tiles; `delta`, `tiles`, `layer` and `num_tokens`; constants. `delta` is the planes, the arena,
        the three tables, and how many layers and modules these have. SITE is the number of slices, elements of a unit,
        row groups of the largest rank, planes, rank rows of a block, whether it is interpreted, and the
        first module.
    """
    if delta is None:
        constants = {"BM": 16, "SITE": (0, 1, 0, 0, 16, INTERPRET, 0)}
        return -(-num_tokens // 16), (None, None, 0, num_tokens), constants
    arena, tables, tiles, site, layer = delta.operands
    _, num_layers, num_modules, _, groups = tables.offsets.shape
    weights = (
        delta.planes,
        arena,
        tables.offsets,
        tables.ranks,
        tables.scalings,
        num_layers,
        num_modules,
    )
    sizes = len(site.modules), PITCH_BYTES // arena.element_size(), groups, delta.planes.shape[0]
    return (
        tiles.numbers.shape[1],
        (weights, tiles.numbers, layer, num_tokens),
        {"BM": tiles.rows, "SITE": (*sizes, 16, INTERPRET, site.modules[0])},
    )


def num_warps(constants: Mapping[str, int]) -> int:
    """Of a kernel for tiles of BM rows."""
    return 4 if constants["BM"] <= 16 else 8


@functools.cache
def shrink_sizes(
    in_features: int, tile_rows: int, groups: int, element_size: int
) -> dict[str, int]:
    """The constants of `shrink_kernel` that never change in a bucket, with its stages; not by its number of adapters.

    Few rows leave most of a GPU idle, so K is split among more programs; long tiles have work enough without. There
    are as many buffers of loads as fit shared memory.
    """
    rank_block = min(64, max(16, triton.next_power_of_2(groups * GROUP_ROWS)))
    k_block, split_k = 128 // element_size, 1
    if tile_rows <= 16:
        k_block, split_k = 128, min(8 if in_features >= 8192 else 4, -(-in_features // 128))
    return {
        "BR": rank_block,
        "BK": k_block,
        "SPLIT_K": split_k,
        "num_stages": 4 if element_size == 2 else 3,
    }
