"""Rotary embedding in Triton, in place, queries and keys in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.kernels.checks import expect_that
from weft.kernels.rope_cpu import check_operands


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


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate queries and keys by their positions, in place.

    Semantics and arguments: `weft.kernels.rope_cpu.rope`.

    Raises:
        ValueError: A shape, dtype or stride does not fit.
    """
    check_operands(q, k, cos, sin)
    expect_that("q", q.stride(2) == 1 and k.stride(2) == 1, "heads of consecutive elements", q.stride())
    expect_that("cos", cos.is_contiguous() and sin.is_contiguous(), "contiguous tables", cos.stride())
    num_tokens, q_heads, head_dim = q.shape
    if num_tokens == 0:
        return
    block_h = min(16, triton.next_power_of_2(q_heads))
    rope_kernel[(num_tokens, -(-q_heads // block_h) + -(-k.shape[1] // block_h))](
        q,
        k,
        cos,
        sin,
        q_heads,
        k.shape[1],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        HALF=head_dim // 2,
        BLOCK_H=block_h,
        BLOCK_D=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
