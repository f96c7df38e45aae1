"""Storing keys and values on the CPU: one indexed assignment, or one each where they are not views of one tensor."""

from __future__ import annotations

import torch

from weft.kernels.kv_slots import KvSlots
from weft.kernels.kv_write_reference import check_operands
from weft.kernels.views import distance_within_storage


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: KvSlots,
) -> None:
    """Store the keys and values of a step's tokens in their pages.

    Semantics and arguments: `weft.kernels.kv_write_reference.kv_write`.

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
