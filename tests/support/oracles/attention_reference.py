"""The oracle of paged attention: one query row at a time, in float64."""

from __future__ import annotations

import torch

from weft.kernels.attention_batch import AttentionBatch
from weft.kernels.plain.attention import check_operands


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """`weft.kernels.plain.attention.paged_attention` states what it computes."""
    check_operands(q, k_pages, v_pages, batch, sliding_window)
    out = torch.zeros_like(q)
    group = q.shape[1] // k_pages.shape[1]
    row = 0
    for request, (rows, context) in enumerate(zip(batch.query_lens, batch.context_lens_host, strict=True)):
        for index in range(rows if context else 0):
            end = context - rows + index + 1
            start = max(0, end - sliding_window) if sliding_window else 0
            pages = batch.block_table[request, torch.arange(start, end, device=q.device) // batch.page_tokens].long()
            offsets = torch.arange(start, end, device=q.device) % batch.page_tokens
            keys = k_pages[pages, :, offsets].double().repeat_interleave(group, 1)  # [n, Hq, D]
            values = v_pages[pages, :, offsets].double().repeat_interleave(group, 1)
            scores = torch.einsum("hd,nhd->hn", q[row + index].double(), keys) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[row + index] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values).to(q.dtype)
        row += rows
    return out
