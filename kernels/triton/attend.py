"""The part of a layer between its projections, in Triton: one launch for the heads, and one for the attention.

The first adds the adapters' delta to the projection, norms and rotates the heads, and stores keys and values in their
pages. Semantics: `manylora.kernels.attend`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.attend import HeadNorms, Rotation, check_norms, split_heads
from manylora.kernels.attention_batch import AttentionBatch
from manylora.kernels.checks import expect, expect_that
from manylora.kernels.kv_layer import LARGEST, KvLayer
from manylora.kernels.plain.rows import check_indices, check_kv_write
from manylora.kernels.sgmv import LoraDelta
from manylora.kernels.triton.attention import paged_attention
from manylora.kernels.triton.sgmv import add_delta, delta_operands, num_warps, tile_of


@triton.jit(
    do_not_specialize=["layer", "num_tokens"],
    do_not_specialize_on_alignment=["positions", "slot_mapping", "tiles"],
)
def heads_kernel(
    qkv,
    q_norm,
    k_norm,
    positions,
    cos,
    sin,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    slot_mapping,
    delta,
    tiles,
    layer,
    num_tokens,
    eps,
    page_stride: tl.int64,
    head_stride: tl.int64,
    token_stride: tl.int64,
    scale_page_stride: tl.int64,
    scale_head_stride: tl.int64,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    LARGEST: tl.constexpr,
    BM: tl.constexpr,
    SITE: tl.constexpr,
):
    """One head of the rows of one tile, in two halves. Grid: (tiles, Hq + 2 * Hkv).

    Deltas, norms and scales may be None; they are left out then. Queries are written in place.
    """
    HALF: tl.constexpr = D // 2
    slot, _, length, rows, live_m = tile_of(tiles, num_tokens, BM)
    if length <= 0:
        return
    head = tl.program_id(1)
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    index = head - tl.where(is_v, Q_HEADS + KV_HEADS, tl.where(is_q, 0, Q_HEADS))
    i = tl.arange(0, BLOCK)
    live_i = i < HALF
    live = live_m[:, None] & live_i[None, :]
    place = qkv + rows[:, None] * ((Q_HEADS + 2 * KV_HEADS) * D) + head * D + i[None, :]
    first = tl.load(place, mask=live, other=0.0)
    second = tl.load(place + HALF, mask=live, other=0.0)
    if delta is not None:
        which = tl.where(is_v, 2, tl.where(is_q, 0, 1))
        width = tl.where(is_q, Q_HEADS * D, KV_HEADS * D)
        n = index * D + i
        tile = slot, layer, rows, live_m, num_tokens
        first = add_delta(first, delta, tile, which, n, live_i, width, BLOCK, BM, SITE)
        second = add_delta(second, delta, tile, which, n + HALF, live_i, width, BLOCK, BM, SITE)
    if q_norm is not None:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        scale = 1.0 / tl.sqrt(_sum_of_pairs(tl.fma(a, a, b * b), BM, BLOCK) / D + eps)
        weight = _weight(q_norm, k_norm, i, is_q, live_i)
        first = tl.where(is_v, first, (a * scale[:, None] * weight).to(first.dtype))
        weight = _weight(q_norm + HALF, k_norm + HALF, i, is_q, live_i)
        second = tl.where(is_v, second, (b * scale[:, None] * weight).to(second.dtype))
    angle = (
        tl.load(positions + rows, mask=live_m, other=0).to(tl.int64)[:, None] * HALF + i[None, :]
    )
    c = tl.load(cos + angle, mask=live, other=0.0)
    s = tl.load(sin + angle, mask=live, other=0.0)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    first = tl.where(is_v, first, (a * c - b * s).to(first.dtype))
    second = tl.where(is_v, second, (b * c + a * s).to(second.dtype))
    if is_q:
        tl.store(place, first, mask=live)
        tl.store(place + HALF, second, mask=live)
    token = tl.load(slot_mapping + rows, mask=live_m, other=-1).to(tl.int64)
    is_stored = tl.where(is_q, -1, token) >= 0
    page = token // PAGE_TOKENS
    offset = token % PAGE_TOKENS
    to = page * page_stride + index.to(tl.int64) * head_stride + offset * token_stride
    place_in_page = tl.where(is_v, v_pages, k_pages) + to[:, None] + i[None, :]
    if k_scales is not None:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))
        # The sum is NaN if a number is not finite.
        scale = tl.div_rn(largest, LARGEST) + (tl.sum(a * 0.0, axis=1) + tl.sum(b * 0.0, axis=1))
        scale_to = page * scale_page_stride + index.to(tl.int64) * scale_head_stride + offset
        tl.store(tl.where(is_v, v_scales, k_scales) + scale_to, scale, mask=is_stored)
        stored_first = _codes(a, scale[:, None], LARGEST)
        stored_second = _codes(b, scale[:, None], LARGEST)
    else:
        stored_first = first
        stored_second = second
    tl.store(place_in_page, stored_first, mask=is_stored[:, None] & live_i[None, :])
    tl.store(place_in_page + HALF, stored_second, mask=is_stored[:, None] & live_i[None, :])


@triton.jit
def _sum_of_pairs(x, BM: tl.constexpr, N: tl.constexpr):
    """Sums of rows [BM, N] in a fixed order; the order of `tl.sum` depends on which threads hold x after a delta."""
    if N == 1:
        total = tl.reshape(x, (BM,))
    else:
        even, odd = tl.split(tl.reshape(x, (BM, N // 2, 2)))
        total = _sum_of_pairs(even + odd, BM, N // 2)
    return total


@triton.jit
def _weight(q_norm, k_norm, i, is_q, live_i):
    of_q = tl.load(q_norm + i, mask=live_i, other=0.0).to(tl.float32)
    of_k = tl.load(k_norm + i, mask=live_i, other=0.0).to(tl.float32)
    return tl.where(is_q, of_q, of_k)[None, :]


@triton.jit
def _codes(x, scale, LARGEST: tl.constexpr):
    steps = tl.where(scale > 0.0, tl.div_rn(x, scale), 0.0)
    steps = tl.minimum(tl.maximum(steps, -LARGEST), LARGEST)
    # 1.5 * 2^23: the sum has no fraction, and is rounded to even.
    rounded = (steps + 12582912.0) - 12582912.0
    return rounded.to(tl.int8)


def attend(
    qkv: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation,
    kv: KvLayer,
    slot_mapping: Tensor,
    batch: AttentionBatch,
    scale: float,
    delta: LoraDelta | None = None,
) -> Tensor:
    """Compute a layer between its fused projection and its output projection.

    Semantics and arguments: `manylora.kernels.attend.attend`; the delta is added to qkv first. Only the queries in qkv
    are changed as it says.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    q, k, v = split_heads(qkv, kv)
    head_dim = q.shape[2]
    check_norms(norms, qkv, head_dim)
    check_kv_write(k, v, kv, slot_mapping)
    check_indices("positions", rotation.positions, len(qkv), qkv.device)
    for name, table in (("cos", rotation.cos), ("sin", rotation.sin)):
        expect(name, table, (None, head_dim // 2), torch.float32, qkv.device)
        expect_that(name, table.is_contiguous(), "contiguous rows", table.stride())
    num_tiles, operands, constants = delta_operands(delta, len(qkv))
    if len(qkv):
        weights, eps = ((None, None), 0.0) if norms is None else ((norms.q, norms.k), norms.eps)
        angles = (rotation.positions, rotation.cos, rotation.sin)
        heads_kernel[(num_tiles, q.shape[1] + 2 * k.shape[1])](
            qkv,
            *weights,
            *angles,
            *kv.tensors,
            slot_mapping,
            *operands,
            eps,
            *kv.strides,
            **{
                **constants,
                "Q_HEADS": q.shape[1],
                "KV_HEADS": k.shape[1],
                "D": head_dim,
                "LARGEST": float(LARGEST),
            },
            BLOCK=max(16, triton.next_power_of_2(head_dim // 2)),
            PAGE_TOKENS=kv.k.shape[2],
            num_warps=num_warps(constants),
            num_stages=3,
        )
    return paged_attention(q, kv, batch, scale).flatten(1)
