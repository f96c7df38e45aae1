"""Operations on single rows, in Triton. Semantics and operands: `weft.kernels.plain.rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.kv_scales import LARGEST, KvScales
from weft.kernels.plain.rows import (
    check_add_norm,
    check_embed,
    check_kv_write,
    check_norm,
    check_rope,
    check_silu_and_mul,
)

ROW_BLOCK = 1024
"""Elements of a row that one program copies or computes."""


@triton.jit(do_not_specialize_on_alignment=["tokens", "sampled"])
def embed_kernel(tokens, sampled, table, out, table_row: tl.int64, N: tl.constexpr, BLOCK: tl.constexpr):
    """`out[row] = table[token of the row]`. Grid: (rows, cdiv(N, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row).to(tl.int64)
    if sampled is not None:
        known = tl.load(sampled - 1 - token, mask=token < 0, other=0).to(tl.int64)
        token = tl.where(token < 0, tl.maximum(known, 0), token)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * N + n, tl.load(table + token * table_row + n, mask=n < N), mask=n < N)


def embed(tokens: Tensor, sampled: Tensor | None, table: Tensor) -> Tensor:
    """See `weft.kernels.plain.rows.embed`."""
    check_embed(tokens, sampled, table)
    out = table.new_empty((len(tokens), table.shape[1]))
    if out.numel():
        grid = (len(tokens), triton.cdiv(table.shape[1], ROW_BLOCK))
        embed_kernel[grid](tokens, sampled, table, out, table.stride(0), N=table.shape[1], BLOCK=ROW_BLOCK)
    return out


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    new_residual,
    heads,
    x_row: tl.int64,
    x_head: tl.int64,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """`out[row, head] = rms_norm(x[row, head] (+ residual))`. Grid: (rows * heads,)."""
    program = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    live = n < N
    source = x + (program // heads) * x_row + (program % heads) * x_head + n
    value = tl.load(source, mask=live, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + program * N + n, mask=live, other=0.0).to(tl.float32)
        rounded = value.to(new_residual.dtype.element_ty)
        tl.store(new_residual + program * N + n, rounded, mask=live)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / N + eps)
    value = value * scale * tl.load(weight + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + program * N + n, value.to(out.dtype.element_ty), mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `weft.kernels.plain.rows.rms_norm`."""
    check_norm(x, weight)
    return _norm(x, None, weight, eps)[0]


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `weft.kernels.plain.rows.fused_add_rms_norm`."""
    check_add_norm(x, residual, weight)
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = out if residual is None else torch.empty_like(out)
    if x.numel():
        heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        block = triton.next_power_of_2(x.shape[-1])
        sizes = {"N": x.shape[-1], "BLOCK": block, "num_warps": min(16, max(1, block // 256))}
        operands = (x, x if residual is None else residual, weight, out, new_residual)
        rms_norm_kernel[(x.shape[0] * heads,)](
            *operands, heads, x.stride(0), head_stride, eps, ADD=residual is not None, **sizes
        )
    return out, new_residual


@triton.jit
def rope_kernel(
    q,
    k,
    cos,
    sin,
    q_heads,
    k_heads,
    q_token: tl.int64,
    q_head: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate all heads of one token. Grid: (T, cdiv(Hq, BLOCK_H) + cdiv(Hkv, BLOCK_H))."""
    token = tl.program_id(0).to(tl.int64)
    q_blocks = tl.cdiv(q_heads, BLOCK_H)
    block = tl.program_id(1)
    i = tl.arange(0, BLOCK_D)
    live_i = i < HALF
    c = tl.load(cos + token * 2 * HALF + i, mask=live_i, other=0.0)[None, :]
    s = tl.load(sin + token * 2 * HALF + HALF + i, mask=live_i, other=0.0)[None, :]  # the first half's are negative
    if block < q_blocks:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        _rotate(q + token * q_token + head[:, None] * q_head + i[None, :], head < q_heads, live_i, c, s, HALF)
    else:
        head = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        _rotate(k + token * k_token + head[:, None] * k_head + i[None, :], head < k_heads, live_i, c, s, HALF)


@triton.jit
def _rotate(pointers, live_head, live_i, c, s, HALF: tl.constexpr):
    live = live_head[:, None] & live_i[None, :]
    stored = tl.load(pointers, mask=live, other=0.0)
    first = stored.to(tl.float32)
    second = tl.load(pointers + HALF, mask=live, other=0.0).to(tl.float32)
    tl.store(pointers, (first * c - second * s).to(stored.dtype), mask=live)
    tl.store(pointers + HALF, (second * c + first * s).to(stored.dtype), mask=live)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See `weft.kernels.plain.rows.rope`."""
    check_rope(q, k, cos, sin)
    num_tokens, q_heads, head_dim = q.shape
    if num_tokens == 0:
        return
    half, block_h = head_dim // 2, min(16, triton.next_power_of_2(q_heads))
    sizes = {"HALF": half, "BLOCK_H": block_h, "BLOCK_D": triton.next_power_of_2(half), "num_warps": 4}
    rope_kernel[(num_tokens, -(-q_heads // block_h) + -(-k.shape[1] // block_h))](
        q, k, cos, sin, q_heads, k.shape[1], *q.stride()[:2], *k.stride()[:2], **sizes
    )


@triton.jit
def silu_and_mul_kernel(gate_up, out, N: tl.constexpr, BLOCK: tl.constexpr):
    """`out[row, n] = silu(gate_up[row, n]) * gate_up[row, N + n]`. Grid: (rows, cdiv(N, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = n < N
    gate = tl.load(gate_up + row * 2 * N + n, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=live)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `weft.kernels.plain.rows.silu_and_mul`."""
    check_silu_and_mul(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    if out.numel():
        silu_and_mul_kernel[(rows, triton.cdiv(width, ROW_BLOCK))](gate_up, out, N=width, BLOCK=ROW_BLOCK)
    return out


@triton.jit
def kv_write_kernel(
    k,
    v,
    k_pages,
    v_pages,
    slot_mapping,
    k_token: tl.int64,
    k_head: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    page_stride: tl.int64,
    head_stride: tl.int64,
    token_stride: tl.int64,
    PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy all heads of one token. Grid: (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    page = slot // PAGE_TOKENS
    offset = slot % PAGE_TOKENS
    i = tl.arange(0, BLOCK)
    live = i < HEADS * D
    head = (i // D).to(tl.int64)
    d = i % D
    key = tl.load(k + token * k_token + head * k_head + d, mask=live)
    value = tl.load(v + token * v_token + head * v_head + d, mask=live)
    place = page * page_stride + head * head_stride + offset * token_stride + d
    tl.store(k_pages + place, key, mask=live)
    tl.store(v_pages + place, value, mask=live)


@triton.jit
def _store_int8(pages, scales, place, scale_place, x, live, LARGEST: tl.constexpr):
    """Store one vector, zero where it is not live, in 8 bits."""
    scale = tl.div_rn(tl.max(tl.abs(x), axis=0), LARGEST) + tl.sum(x * 0.0, axis=0)  # NaN where x is not finite
    steps = tl.where(scale > 0.0, tl.div_rn(x, scale), 0.0)
    steps = tl.minimum(tl.maximum(steps, -LARGEST), LARGEST)
    rounded = (steps + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no fraction, and is rounded to even
    tl.store(pages + place, rounded.to(tl.int8), mask=live)
    tl.store(scales + scale_place, scale)


@triton.jit
def kv_write_int8_kernel(
    k,
    v,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    slot_mapping,
    k_token: tl.int64,
    k_head: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    page_stride: tl.int64,
    head_stride: tl.int64,
    token_stride: tl.int64,
    scale_page_stride: tl.int64,
    scale_head_stride: tl.int64,
    PAGE_TOKENS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Store one head of one token in 8 bits. Grid: (T, Hkv)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    page = slot // PAGE_TOKENS
    offset = slot % PAGE_TOKENS
    d = tl.arange(0, BLOCK)
    live = d < D
    key = tl.load(k + token * k_token + head * k_head + d, mask=live, other=0.0).to(tl.float32)
    value = tl.load(v + token * v_token + head * v_head + d, mask=live, other=0.0).to(tl.float32)
    place = page * page_stride + head * head_stride + offset * token_stride + d
    scale_place = page * scale_page_stride + head * scale_head_stride + offset
    _store_int8(k_pages, k_scales, place, scale_place, key, live, LARGEST)
    _store_int8(v_pages, v_scales, place, scale_place, value, live, LARGEST)


def kv_write(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor, kv_scales: KvScales | None = None
) -> None:
    """See `weft.kernels.plain.rows.kv_write`."""
    check_kv_write(k, v, k_pages, v_pages, slot_mapping, kv_scales)
    num_tokens, heads, head_dim = k.shape
    if num_tokens == 0:
        return
    strides = (*k.stride()[:2], *v.stride()[:2], *k_pages.stride()[:3])
    sizes = {"PAGE_TOKENS": k_pages.shape[2], "D": head_dim}
    if kv_scales is not None:
        block = triton.next_power_of_2(head_dim)
        kv_write_int8_kernel[(num_tokens, heads)](
            *(k, v, k_pages, v_pages, *kv_scales, slot_mapping, *strides, *kv_scales[0].stride()[:2]),
            **{**sizes, "BLOCK": block, "LARGEST": float(LARGEST), "num_warps": 1},
        )
        return
    block = triton.next_power_of_2(heads * head_dim)
    kv_write_kernel[(num_tokens,)](
        k, v, k_pages, v_pages, slot_mapping, *strides, HEADS=heads, BLOCK=block, num_warps=4, **sizes
    )
