"""The oracle of storing keys and values: one token at a time."""

from __future__ import annotations

import torch

from weft.kernels.kv_slots import KvSlots
from weft.kernels.plain.rows import check_kv_write


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: KvSlots,
) -> None:
    """`weft.kernels.plain.rows.kv_write` states what it computes."""
    check_kv_write(k, v, k_pages, v_pages, slot_mapping)
    for token, slot in enumerate(slot_mapping.mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, k_pages.shape[2])
            k_pages[page, :, offset] = k[token]
            v_pages[page, :, offset] = v[token]
