"""FlashInfer's wrapper for prompts in torch operators: signatures, checks and results of 0.6.1 and 0.7.2.

It also refuses what the real one takes at a price: index tensors on the device, for which the host waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass
class FakeFlashInfer:
    """The module."""

    __spec__ = object()  # as all modules that were found have one

    spoil: float = 0.0
    """Added to each result."""
    failure: Exception | None = None
    """Raised by each plan."""
    num_wrappers: int = 0
    num_plans: int = 0
    num_runs: int = 0

    def BatchPrefillWithPagedKVCacheWrapper(  # noqa: N802 - the real name
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD"
    ) -> Wrapper:
        assert (float_workspace_buffer.dtype, float_workspace_buffer.dim()) == (torch.uint8, 1)
        assert kv_layout == "HND", "the stand-in has no other"
        self.num_wrappers += 1
        return Wrapper(self)


@dataclass
class Planned:
    """What a wrapper keeps of its last plan."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: list[int]
    sizes: tuple[int, int, int, int]
    """Heads of queries, heads of keys, head_dim and page_size."""
    scale: float
    window_left: int
    dtype: torch.dtype


class Wrapper:
    """Causal attention of runs of query rows, which are the last of their contexts."""

    def __init__(self, module: FakeFlashInfer) -> None:
        self._module = module
        self._plan: Planned | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        disable_split_kv: bool = False,
    ) -> None:
        self._module.num_plans += 1
        if self._module.failure is not None:
            raise self._module.failure
        for index in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert (index.dtype, index.device, index.dim()) == (torch.int32, CPU, 1)
        requests = len(qo_indptr) - 1
        assert requests > 0, "the real one takes the largest of no lengths"
        assert (len(paged_kv_indptr), len(paged_kv_last_page_len)) == (requests + 1, requests)
        assert int(qo_indptr[0]) == int(paged_kv_indptr[0]) == 0
        assert (qo_indptr.diff() >= 0).all()
        assert (paged_kv_indptr.diff() >= 0).all()
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim_qk in (64, 128, 256), "those of its kernels for Hopper"
        assert q_data_type in (torch.float16, torch.bfloat16)
        assert window_left >= -1
        assert causal
        assert disable_split_kv, "else a row's result depends on the chunks beside it"
        kv_lens = (paged_kv_indptr.diff() - 1).clamp(min=0) * page_size + paged_kv_last_page_len
        assert (qo_indptr.diff() <= kv_lens).all()
        self._plan = Planned(
            *(
                qo_indptr.clone(),
                paged_kv_indptr.clone(),
                paged_kv_indices.clone(),
                kv_lens.tolist(),
            ),
            sizes=(num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            scale=head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            window_left=window_left,
            dtype=q_data_type,
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._module.num_runs += 1
        plan, (k, v) = expected(self._plan), paged_kv_cache
        num_heads, num_kv_heads, head_dim, page_size = plan.sizes
        assert q.shape == (int(plan.qo_indptr[-1]), num_heads, head_dim)
        assert k.shape[1:] == v.shape[1:] == (num_kv_heads, page_size, head_dim)
        assert q.dtype == k.dtype == v.dtype == plan.dtype
        assert k.stride() == v.stride()
        assert k.stride(3) == q.stride(2) == 1
        assert k.stride(0) < 1 << 32, "it is kept in a uint32"
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
        assert out.is_contiguous(), "its strides are not looked at"
        for request, kv_len in enumerate(plan.kv_lens):
            rows = slice(*plan.qo_indptr[request : request + 2].tolist())
            pages = plan.kv_indices[slice(*plan.kv_indptr[request : request + 2].tolist())].long()
            out[rows] = attend(q[rows], k[pages], v[pages], kv_len, plan) + self._module.spoil
        return out


def expected(value: T | None) -> T:
    assert value is not None
    return value


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_len: int, plan: Planned
) -> torch.Tensor:
    """Rows of one request over its pages, [pages, Hkv, page_size, D]."""
    group = plan.sizes[0] // plan.sizes[1]
    keys, values = (
        each.transpose(0, 1).flatten(1, 2)[:, :kv_len].float().repeat_interleave(group, 0)
        for each in (k, v)
    )
    scores = q.float().transpose(0, 1) @ keys.mT * plan.scale
    position, place = torch.arange(kv_len - len(q), kv_len)[:, None], torch.arange(kv_len)
    hidden = place > position
    if plan.window_left >= 0:
        hidden |= place + plan.window_left < position
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ values).transpose(0, 1).to(q.dtype)
