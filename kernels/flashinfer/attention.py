"""Paged attention with FlashInfer for chunks of prompts; items are left to another implementation.

FlashInfer (arXiv:2501.01005) reads the arena's pages in place, by their strides. It plans on the host what each thread
block computes, once for all layers that share pages and window. It must not split keys, so that a row's result does not
depend on the chunks beside it. Before Hopper, the size of its tiles still does, which may change the last bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manylora.kernels.attention_batch import AttentionBatch
from manylora.kernels.kv_layer import KvLayer

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends. All plans share it: the launches of a stream run one after another."""
NUM_PLANS = 4
"""Plans that are kept at once, each with 8 MiB on the device and on the host. With fewer, the host would wait for the
step before where layers differ in their windows."""
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
Arrays = list[Tensor]


@dataclass(slots=True, eq=False)
class _Planner:
    """One of FlashInfer's wrappers, and what it was planned for last."""

    wrapper: Any
    plan: object | None = None
    read: torch.cuda.Event | None = None
    """When the device has read the plan from the wrapper's pinned memory."""


class FlashInferAttention:
    """Holds what FlashInfer needs on one device.

    Args:
        flashinfer: The module.
        device: Where the tensors are.
        others: Computes items, and all rows where FlashInfer does not take the operands.
    """

    def __init__(
        self, flashinfer: Any, device: torch.device, others: Callable[..., Tensor]
    ) -> None:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._others = others
        self._planners = deque(_Planner(wrapper(workspace, "HND")) for _ in range(NUM_PLANS))

    def paged_attention(
        self, q: Tensor, kv: KvLayer, batch: AttentionBatch, scale: float
    ) -> Tensor:
        """Causal attention of a step's query rows over keys and values in pages.

        Semantics and arguments: `manylora.kernels.plain.attention.paged_attention`.

        Raises:
            ValueError: A shape, dtype, device or stride does not fit.
        """
        if not batch.chunks or refusal(q.dtype, q.shape[2], is_int8=kv.scales is not None):
            return self._others(q, kv, batch, scale)
        out = self._others(q, kv, batch.items(), scale)
        rows, arrays = batch.keep("flashinfer", lambda: chunk_arrays(batch))
        run = self._planner(q, kv, batch, arrays, scale).wrapper.run
        if isinstance(rows, slice):
            run(q[rows], (kv.k, kv.v), out=out[rows])
        else:
            out.index_copy_(0, rows, run(q.index_select(0, rows), (kv.k, kv.v)))
        return out

    def _planner(
        self, q: Tensor, kv: KvLayer, batch: AttentionBatch, arrays: Arrays, scale: float
    ) -> _Planner:
        """One that is planned for a batch and its layers of one window."""
        sizes = (q.shape[1], kv.k.shape[1], q.shape[2], batch.page_tokens)
        plan = batch.keep(("flashinfer", *sizes, q.dtype, scale, kv.window), object)
        if planner := next((planner for planner in self._planners if planner.plan is plan), None):
            return planner
        planner = self._planners[0]  # the one that was planned first
        self._planners.rotate(-1)
        if planner.read is not None:
            planner.read.synchronize()
        planner.plan = None  # if planning fails, it is for nothing
        left = -1 if kv.window is None else kv.window - 1  # without the row itself
        options = {"causal": True, "sm_scale": scale, "window_left": left, "disable_split_kv": True}
        planner.wrapper.plan(*arrays, *sizes, q_data_type=q.dtype, **options)
        planner.plan, planner.read = plan, _mark(q.device)
        return planner


def chunk_arrays(batch: AttentionBatch) -> tuple[slice | Tensor, Arrays]:
    """The chunks of a batch, at least one, as FlashInfer takes them.

    Returns:
        Their query rows, one chunk after another; and int32 on the host, so that it need not wait for a device: the
        number of rows before each chunk and in all, [C + 1]; the number of pages likewise; the pages of all chunks that
        hold some of their context; and how many tokens are in the last page of each, [C], at least 1.
    """
    contexts = np.array([chunk.context_len for chunk in batch.chunks], dtype=np.int32)
    num_pages = -(-contexts // batch.page_tokens)
    tables = zip(batch.chunks, num_pages.tolist(), strict=True)
    rows = np.concatenate(
        [np.arange(chunk.row, chunk.row + chunk.query_len) for chunk in batch.chunks]
    )
    arrays = (
        np.cumsum([0, *(chunk.query_len for chunk in batch.chunks)], dtype=np.int32),
        np.cumsum([0, *num_pages], dtype=np.int32),
        np.concatenate(
            [batch.block_table.numpy()[chunk.request, :count] for chunk, count in tables]
        ),
        contexts - (num_pages - 1) * np.int32(batch.page_tokens),
    )
    is_run = bool((np.diff(rows) == 1).all())
    return (
        slice(int(rows[0]), int(rows[-1]) + 1)
        if is_run
        else torch.from_numpy(rows).to(batch.device),
        [torch.from_numpy(array) for array in arrays],
    )


def refusal(dtype: torch.dtype, head_dim: int, *, is_int8: bool) -> str | None:
    """Why FlashInfer is not used for such queries and pages; None where it is."""
    if is_int8:
        return "it does not read keys and values of int8; leave memory.kv_dtype at auto"
    if dtype not in DTYPES:
        return f"it computes float16 and bfloat16, but model.dtype is {str(dtype).removeprefix('torch.')}"
    return (
        None
        if head_dim in HEAD_DIMS
        else f"it computes heads of 64, 128 and 256, but the model's are {head_dim}"
    )


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """An event that occurs when the device has done what was launched so far; None on a CPU, which has."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
