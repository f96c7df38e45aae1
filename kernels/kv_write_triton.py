"""Storing keys and values in Triton: one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.kernels.checks import expect_that
from weft.kernels.kv_slots import KvSlots
from weft.kernels.kv_write_cpu import check_operands


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
    k_page: tl.int64,
    k_page_head: tl.int64,
    k_page_token: tl.int64,
    v_page: tl.int64,
    v_page_head: tl.int64,
    v_page_token: tl.int64,
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
    tl.store(k_pages + page * k_page + head * k_page_head + offset * k_page_token + d, key, mask=live)
    tl.store(v_pages + page * v_page + head * v_page_head + offset * v_page_token + d, value, mask=live)


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: KvSlots,
) -> None:
    """Store the keys and values of a step's tokens in their pages.

    Semantics and arguments: `weft.kernels.kv_write_cpu.kv_write`.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check_operands(k, v, k_pages, v_pages, slot_mapping)
    expect_that("k", k.stride(2) == 1 == v.stride(2), "heads of consecutive elements", k.stride())
    num_tokens, heads, head_dim = k.shape
    if num_tokens == 0:
        return
    kv_write_kernel[(num_tokens,)](
        k,
        v,
        k_pages,
        v_pages,
        slot_mapping.mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        PAGE_TOKENS=k_pages.shape[2],
        HEADS=heads,
        D=head_dim,
        BLOCK=triton.next_power_of_2(heads * head_dim),
        num_warps=4,
    )
