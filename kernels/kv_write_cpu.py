"""Storing keys and values on the CPU: one indexed assignment each."""

from __future__ import annotations

import torch

from weft.kernels.kv_slots import KvSlots
from weft.kernels.kv_write_reference import check_operands


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
    for pages, values in ((k_pages, k), (v_pages, v)):
        stored = values if rows is None else values.index_select(0, rows)
        pages[slot_mapping.pages, :, slot_mapping.offsets] = stored  # [S, Hkv, D]
