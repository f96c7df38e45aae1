"""What storing keys and values is: the check of its operands, and the oracle, one token at a time."""

from __future__ import annotations

import torch

from weft.kernels.checks import expect, expect_that
from weft.kernels.kv_slots import KvSlots


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: KvSlots,
) -> None:
    """Store the keys and values of a step's tokens in their pages.

    Semantics:
        for t in range(T), slot_mapping.mapping[t] >= 0:
            page, offset = divmod(slot_mapping.mapping[t], page_tokens)
            k_pages[page, :, offset], v_pages[page, :, offset] = k[t], v[t]

    Args:
        k: [T, Hkv, D].
        v: Like k.
        k_pages: The layer's keys in the arena, [num_pages, Hkv, page_tokens, D], any strides. Mutated.
        v_pages: The same for values. Mutated.
        slot_mapping: KV slots of the T tokens, for pages of page_tokens tokens; none twice.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check_operands(k, v, k_pages, v_pages, slot_mapping)
    for token, slot in enumerate(slot_mapping.mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, k_pages.shape[2])
            k_pages[page, :, offset] = k[token]
            v_pages[page, :, offset] = v[token]


def check_operands(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: KvSlots,
) -> None:
    """Check what a call to `kv_write` was given.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    num_tokens, heads, head_dim = k.shape
    expect("v", v, k.shape, k.dtype, k.device)
    expect("k_pages", k_pages, (None, heads, None, head_dim), k.dtype, k.device)
    expect("v_pages", v_pages, k_pages.shape, k.dtype, k.device)
    expect("slot_mapping", slot_mapping.mapping, (num_tokens,), torch.int64, k.device)
    expect_that("k_pages", k_pages.stride(3) == 1 == v_pages.stride(3), "consecutive elements", k_pages.stride())
