"""Paged attention on the CPU in C++ (`native/attention.cpp`): keys and values are read where they lie in the pages."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from manylora.kernels.attend import HeadNorms, Rotation, check_norms, split_heads
from manylora.kernels.attention_batch import AttentionBatch, cut
from manylora.kernels.checks import expect
from manylora.kernels.kv_layer import KvLayer
from manylora.kernels.native.library import native_function
from manylora.kernels.plain.attention import check_operands
from manylora.kernels.plain.rows import check_kv_write, check_rope

TASK_ROWS = 128
"""Query rows that are computed together, times the heads of a KV group."""
ARGUMENTS = "iiiiiifiiiiiiiiiifii"
"""Types of the arguments of `attend` in C++, as `native_function` takes them."""


def paged_attention(q: Tensor, kv: KvLayer, batch: AttentionBatch, scale: float) -> Tensor:
    """Causal attention of a step's query rows over keys and values in pages.

    Semantics and arguments: `manylora.kernels.plain.attention.paged_attention`. While values are finite, a row's result
    is bit for bit the same, whatever else is in the batch and wherever its prompt was cut.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
        MemoryError: No memory is left.
    """
    check_operands(q, kv, batch)
    out = torch.zeros(q.shape, dtype=q.dtype)  # rows of no request stay zero
    # No rows are normed, rotated and stored.
    projection = (q.data_ptr(), q.stride(0), q.stride(1), 0, 0, 0, 0.0, 0, 0, 0)
    _run(projection, kv, batch, _tasks(batch, q, kv), q.shape[1], scale, out)
    return out


def attend(
    qkv: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation,
    kv: KvLayer,
    slot_mapping: Tensor,
    batch: AttentionBatch,
    scale: float,
) -> Tensor:
    """Compute a layer between its fused projection and its output projection.

    Semantics and arguments: `manylora.kernels.attend.attend`. The result is overwritten by the next call with the
    same batch.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
        MemoryError: No memory is left.
    """
    # Checks cost time in each step, so operands of the same kind as in an earlier layer are not checked again.
    cos, sin = rotation.factors()
    key = (
        "attend",
        qkv.shape,
        qkv.stride(),
        qkv.dtype,
        kv.kind,
        slot_mapping.shape,
        slot_mapping.stride(),
        slot_mapping.dtype,
        cos.shape,
        cos.stride(),
        cos.dtype,
        sin.shape,
        sin.stride(),
        sin.dtype,
    )
    _, heads, _, head_dim = kv.k.shape
    num_heads = qkv.shape[1] // head_dim - 2 * heads

    check_norms(norms, qkv, head_dim)  # other tensors in each layer

    def prepare() -> tuple[np.ndarray, Tensor]:
        q, k, v = split_heads(qkv, kv)
        check_rope(q, k, cos, sin)
        check_kv_write(k, v, kv, slot_mapping)
        check_operands(q, kv, batch)
        expect("slot_mapping", slot_mapping, (len(qkv),), torch.int64)
        return _tasks(batch, q, kv), qkv.new_zeros((len(qkv), num_heads * head_dim))

    prepared: tuple[np.ndarray, Tensor] = batch.keep(key, prepare)  # shared by the layers of a step
    tasks, out = prepared
    q_norm, k_norm, eps = (
        (0, 0, 0.0) if norms is None else (norms.q.data_ptr(), norms.k.data_ptr(), norms.eps)
    )
    projection = (
        qkv.data_ptr(),
        qkv.shape[1],
        head_dim,
        len(qkv),
        q_norm,
        k_norm,
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        slot_mapping.data_ptr(),
    )
    _run(projection, kv, batch, tasks, num_heads, scale, out)
    return out


def _run(
    projection: tuple[float, ...],
    kv: KvLayer,
    batch: AttentionBatch,
    tasks: np.ndarray,
    num_heads: int,
    scale: float,
    out: Tensor,
) -> None:
    _, heads, _, head_dim = kv.k.shape
    is_short = native_function("attend", out.dtype, ARGUMENTS, ctypes.c_bool)(
        *projection,
        kv.address,
        batch.block_table.data_ptr(),
        tasks.ctypes.data,
        len(tasks),
        heads,
        num_heads // heads,
        head_dim,
        scale,
        kv.window or 0,
        out.data_ptr(),
    )
    if is_short:
        raise MemoryError(
            "no memory is left for attention; set memory.gib or memory.host_gib to less"
        )


def _tasks(batch: AttentionBatch, q: Tensor, kv: KvLayer) -> np.ndarray:
    """Runs of at most `TASK_ROWS` rows of all heads of a KV group, [n, 4] int32."""
    batch.expect_runs()
    tasks = cut(batch.runs, max(1, TASK_ROWS * kv.k.shape[1] // q.shape[1])).T
    # The most expensive tasks come first, so that no thread ends with one of them.
    work = tasks[:, 1].astype(np.int64) * (tasks[:, 2] + 1)
    return np.ascontiguousarray(tasks[np.argsort(-work, kind="stable")])
