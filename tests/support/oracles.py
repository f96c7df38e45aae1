"""What each kernel computes, written plainly and in float64: the results that tests compare kernels with."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from manylora.kernels.attend import HeadNorms, Rotation
from manylora.kernels.attention_batch import AttentionBatch
from manylora.kernels.dispatch import torch_kernels
from manylora.kernels.kv_layer import KvLayer


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()).to(
        x.dtype
    )


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    for x in (q, k):
        wide = x.double()
        x.copy_(
            wide * cos.double()[:, None] + wide.roll(x.shape[2] // 2, -1) * sin.double()[:, None]
        )


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, 1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def kv_write(k: torch.Tensor, v: torch.Tensor, kv: KvLayer, slot_mapping: torch.Tensor) -> None:
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, kv.k.shape[2])
            for part, (pages, x) in enumerate(((kv.k, k[token]), (kv.v, v[token]))):
                if kv.scales is None:
                    pages[page, :, offset] = x
                else:
                    for head, vector in enumerate(x.tolist()):
                        stored, scale = int8_vector(vector)
                        pages[page, head, offset] = torch.tensor(stored, dtype=torch.int8)
                        kv.scales[part][page, head, offset] = scale


def int8_vector(vector: list[float]) -> tuple[list[int], float]:
    """Its elements in 8 bits and their scale, by Python's integers and numpy's float32."""
    if not all(map(math.isfinite, vector)):
        return [0] * len(vector), math.nan
    scale = np.float32(max(map(abs, vector))) / np.float32(127)
    if scale == 0:
        return [0] * len(vector), 0.0
    return [max(-127, min(127, round(float(np.float32(x) / scale)))) for x in vector], float(scale)


def paged_attention(
    q: torch.Tensor, kv: KvLayer, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """One query row at a time."""
    k_pages, v_pages = kv.k, kv.v
    if kv.scales is not None:
        k_pages, v_pages = (
            pages.double() * scales.double()[..., None]
            for pages, scales in zip((k_pages, v_pages), kv.scales, strict=True)
        )
    out = torch.zeros_like(q)
    group = q.shape[1] // k_pages.shape[1]
    for row, rows, first, table in batch.runs.T.tolist():
        for index in range(rows):
            end = first + index + 1
            start = max(0, end - kv.window) if kv.window else 0
            positions = torch.arange(start, end, device=q.device)
            pages = batch.block_table[table:].to(q.device)[positions // batch.page_tokens].long()
            offsets = positions % batch.page_tokens
            keys = k_pages[pages, :, offsets].double().repeat_interleave(group, 1)  # [n, Hq, D]
            values = v_pages[pages, :, offsets].double().repeat_interleave(group, 1)
            scores = torch.einsum("hd,nhd->hn", q[row + index].double(), keys) * scale
            out[row + index] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values).to(q.dtype)
    return out


def attend(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotation: Rotation,
    kv: KvLayer,
    slot_mapping: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    kv_heads, head_dim = kv.k.shape[1], kv.k.shape[3]
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    cos, sin = rotation.cos[rotation.positions.long()], rotation.sin[rotation.positions.long()]
    rope(q, k, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    kv_write(k, v, kv, slot_mapping)
    return paged_attention(q, kv, batch, scale).flatten(1)


def probabilities(
    row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """The filtered distribution of one row of logits by full sorts, [V], float64, summing to 1.

    Each filter also keeps what is exactly as likely as the last that it keeps.
    """
    p = (row.float() / temperature).double().softmax(0)
    if 0 < top_k < len(p):
        p = torch.where(p >= p.sort(descending=True).values[top_k - 1], p, 0.0)
    if top_p < 1:
        ordered = p.sort(descending=True).values
        reached = ordered.cumsum(0) >= top_p * ordered.sum()
        last = int(reached.nonzero()[0]) if bool(reached.any()) else len(p) - 1
        p = torch.where(p >= ordered[last], p, 0.0)
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = logits.double().log_softmax(-1)
    chosen = scores.gather(1, token_ids[:, None])
    ordered = scores.sort(dim=-1, descending=True, stable=True)
    rank = (scores > chosen).sum(-1) + 1
    return (
        chosen[:, 0].float(),
        rank,
        ordered.indices[:, :num_top],
        ordered.values[:, :num_top].float(),
    )


ORACLES = replace(
    torch_kernels(),
    rms_norm=rms_norm,
    fused_add_rms_norm=fused_add_rms_norm,
    silu_and_mul=silu_and_mul,
    paged_attention=paged_attention,
    attend=attend,
    logprobs=logprobs,
)
"""For tensors on any device; what SGMV and sampling yield is said in other words by their tests."""
