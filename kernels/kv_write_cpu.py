"""Storing keys and values on the CPU: one indexed assignment, or one each where they are not views of one tensor."""

from __future__ import annotations

import torch

from weft.kernels.checks import expect, expect_that
from weft.kernels.kv_slots import KvSlots
from weft.kernels.views import distance_within_storage


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
    rows = slot_mapping.rows
    both, both_pages = _stacked(k, v), _stacked(k_pages, v_pages)
    if both is not None and both_pages is not None:
        stored = both if rows is None else both.index_select(0, rows)
        both_pages[slot_mapping.pages, :, :, slot_mapping.offsets] = stored  # [S, 2, Hkv, D]
        return
    for pages, values in ((k_pages, k), (v_pages, v)):
        stored = values if rows is None else values.index_select(0, rows)
        pages[slot_mapping.pages, :, slot_mapping.offsets] = stored  # [S, Hkv, D]


def _stacked(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    # Keys and values of a fused projection, or of a page, are one view with a further dimension.
    distance = distance_within_storage(first, second)
    if distance is None or distance <= 0:
        return None
    return first.as_strided((first.shape[0], 2, *first.shape[1:]), (first.stride(0), distance, *first.stride()[1:]))


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
