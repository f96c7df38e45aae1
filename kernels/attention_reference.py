"""What paged attention is: the check of its operands, and the oracle, one query row at a time in float64."""

from __future__ import annotations

import torch

from weft.kernels.attention_batch import AttentionBatch
from weft.kernels.checks import expect, expect_that


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of a step's query rows over keys and values in pages (PagedAttention, arXiv:2309.06180).

    Semantics:
        for request r, query row i of its n, at position p = context_lens[r] - n + i, head h of KV group g:
            keys = positions max(0, p - sliding_window + 1) to p of request r, through its block table
            scores = scale * q[row, h] @ k[keys, g].T
            if softcap: scores = softcap * tanh(scores / softcap)
            out[row, h] = softmax(scores) @ v[keys, g]

    Args:
        q: [T, Hq, D]; Hq is a multiple of Hkv, head h reads KV head h // (Hq / Hkv).
        k_pages: The layer's keys in the arena, [num_pages, Hkv, page_tokens, D], any page, head and token stride. This
            step's keys must have been written. What lies beyond a request's context is never read into a result.
        v_pages: The same for values.
        batch: Which rows attend to what.
        scale: Factor of the scores.
        sliding_window: How many positions a row sees, itself included; None for all.
        softcap: Bound of the scores; None for none.

    Returns:
        [T, Hq, D], dtype of q. Rows of no request, and of requests without context, are zero.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
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


def check_operands(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: AttentionBatch,
    sliding_window: int | None,
) -> None:
    """Check what a call to `paged_attention` was given.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    expect("q", q, (None, None, k_pages.shape[-1]), None, batch.block_table.device)
    expect("k_pages", k_pages, (None, None, batch.page_tokens, None), q.dtype, q.device)
    expect("v_pages", v_pages, k_pages.shape, q.dtype, q.device)
    expect_that("q", q.shape[0] >= batch.num_rows, f"at least {batch.num_rows} rows", q.shape[0])
    expect_that("q", q.shape[1] % k_pages.shape[1] == 0, f"a multiple of {k_pages.shape[1]} heads", q.shape[1])
    expect_that("k_pages", k_pages.stride(3) == 1 == v_pages.stride(3), "consecutive elements", k_pages.stride())
    expect_that("sliding_window", sliding_window is None or sliding_window > 0, "a positive number", sliding_window)
