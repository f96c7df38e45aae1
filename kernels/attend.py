"""The part of a layer between its fused projection and its output projection, in torch operators, with its operands."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manylora.kernels.attention_batch import AttentionBatch
from manylora.kernels.checks import expect, expect_that
from manylora.kernels.kv_layer import KvLayer
from manylora.kernels.plain import attention as attention_cpu
from manylora.kernels.plain import rows as rows_cpu


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each head of queries and keys (Qwen3)."""

    q: Tensor
    """[D], dtype of the projection."""
    k: Tensor
    """[D], dtype of the projection."""
    eps: float


@dataclass(slots=True, eq=False)
class Rotation:
    """The rotary embedding of a step's rows: a table by position, and the positions."""

    cos: Tensor
    """[P, D / 2], float32, contiguous: cosines of every position, times the model's attention scaling."""
    sin: Tensor
    """[P, D / 2], float32, contiguous: sines, likewise."""
    positions: Tensor
    """[T], int32 or int64, below P: the position of each row."""
    _factors: tuple[Tensor, Tensor] | None = None

    def factors(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rows, two of [T, D], as `rope` takes them. They are computed once for all layers."""
        if self._factors is None:
            self._factors = rows_cpu.both_halves(
                *(table.index_select(0, self.positions) for table in (self.cos, self.sin))
            )
        return self._factors


def attend(
    qkv: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation,
    kv: KvLayer,
    slot_mapping: Tensor,
    batch: AttentionBatch,
    scale: float,
) -> Tensor:
    """Norm the heads, rotate them, store keys and values, attend.

    Semantics:
        q, k, v = split(qkv)                             # [T, Hq, D], [T, Hkv, D], [T, Hkv, D]
        if norms: q, k = rms_norm(q, norms.q), rms_norm(k, norms.k)
        rope(q, k, *rotation.factors())
        kv_write(k, v, kv, slot_mapping)
        return paged_attention(q, kv, batch, scale)

    Args:
        qkv: [T, (Hq + 2 * Hkv) * D], contiguous: heads of queries, keys and values. Mutated.
        norms: Norms of the heads; None for none.
        rotation: Rotation of the T rows.
        kv: The layer's keys and values in the arena. Mutated.
        slot_mapping: Where the keys and values of the T tokens go, as `kv_write` takes it.
        batch: The rows and the keys that they attend to.
        scale: Factor of the scores.

    Returns:
        [T, Hq * D], dtype of qkv. Rows of no request are zero.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    q, k, v = split_heads(qkv, kv)
    if norms is not None:
        q = rows_cpu.rms_norm(q, norms.q, norms.eps)
        k = rows_cpu.rms_norm(k, norms.k, norms.eps)
    rows_cpu.rope(q, k, *rotation.factors())
    rows_cpu.kv_write(k, v, kv, slot_mapping)
    return attention_cpu.paged_attention(q, kv, batch, scale).flatten(1)


def split_heads(qkv: Tensor, kv: KvLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the queries, keys and values in a fused projection: [T, Hq, D], [T, Hkv, D], [T, Hkv, D].

    Raises:
        ValueError: Its shape or stride does not fit.
    """
    num_kv_heads = kv.k.shape[1]
    head_dim = kv.k.shape[3]
    group_width = num_kv_heads * head_dim
    fits = qkv.dim() == 2 and qkv.shape[1] % group_width == 0 and qkv.shape[1] >= 3 * group_width
    expect_that("qkv", fits, f"[T, (Hq + {2 * num_kv_heads}) * {head_dim}]", list(qkv.shape))
    expect_that("qkv", qkv.is_contiguous(), "contiguous rows", qkv.stride())
    num_heads = qkv.shape[1] // head_dim
    heads = qkv.view(len(qkv), num_heads, head_dim)
    q, k, v = heads.split([num_heads - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def check_norms(norms: HeadNorms | None, qkv: Tensor, head_dim: int) -> None:
    """Check the norms that a call to `attend` was given.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    if norms is not None:
        for name, weight in (("norms.q", norms.q), ("norms.k", norms.k)):
            expect(name, weight, (head_dim,), qkv.dtype, qkv.device)
            expect_that(name, weight.stride(0) == 1, "consecutive elements", weight.stride())
