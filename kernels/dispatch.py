"""The one place that chooses an implementation: Triton on a GPU, torch operators on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.kernels.attention_batch import AttentionBatch
from weft.kernels.kv_slots import KvSlots
from weft.kernels.sampling import PenaltyTensors, SamplingTensors, apply_penalties
from weft.kernels.sgmv import SgmvSite, SgmvTables, Tiles


class PagedAttention(Protocol):
    """`weft.kernels.attention_reference.paged_attention` states what it computes."""

    def __call__(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attend."""


KvWrite = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, KvSlots], None]
RmsNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
FusedAddRmsNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
Rope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
Sgmv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SgmvTables, Tiles, SgmvSite, int], None]
Sample = Callable[[torch.Tensor, SamplingTensors], torch.Tensor]
Logprobs = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The operations of one kind of device. What each computes stands in `<op>_reference.py`."""

    rms_norm: RmsNorm
    fused_add_rms_norm: FusedAddRmsNorm
    rope: Rope
    kv_write: KvWrite
    paged_attention: PagedAttention
    sgmv: Sgmv
    sample: Sample
    logprobs: Logprobs
    apply_penalties: Callable[[torch.Tensor, PenaltyTensors], None] = apply_penalties


def kernels_for(device: torch.device) -> Kernels:
    """Return the operations for tensors on `device`.

    Raises:
        ValueError: There are none for this kind of device.
    """
    if device.type == "cpu":
        return _cpu_kernels()
    if device.type == "cuda":
        return triton_kernels()
    raise ValueError(f"device: expected cpu or cuda, got {device.type}")


@functools.cache
def _cpu_kernels() -> Kernels:
    from weft.kernels import attention_cpu, kv_write_cpu, norm_cpu, rope_cpu, sampling_cpu, sgmv_cpu

    return Kernels(
        rms_norm=norm_cpu.rms_norm,
        fused_add_rms_norm=norm_cpu.fused_add_rms_norm,
        rope=rope_cpu.rope,
        kv_write=kv_write_cpu.kv_write,
        paged_attention=attention_cpu.paged_attention,
        sgmv=sgmv_cpu.sgmv,
        sample=sampling_cpu.sample,
        logprobs=sampling_cpu.logprobs,
    )


@functools.cache
def triton_kernels() -> Kernels:
    """The Triton operations; Triton is imported only here, because it is large and the CPU does without it.

    On CPU tensors they run only where TRITON_INTERPRET=1 was set before Triton was first imported.
    """
    from weft.kernels import attention_triton, kv_write_triton, norm_triton, rope_triton, sampling_triton, sgmv_triton

    return Kernels(
        rms_norm=norm_triton.rms_norm,
        fused_add_rms_norm=norm_triton.fused_add_rms_norm,
        rope=rope_triton.rope,
        kv_write=kv_write_triton.kv_write,
        paged_attention=attention_triton.paged_attention,
        sgmv=sgmv_triton.sgmv,
        sample=sampling_triton.sample,
        logprobs=sampling_triton.logprobs,
    )


@functools.cache
def reference_kernels() -> Kernels:
    """The oracles, for tests on any device."""
    from weft.kernels import (
        attention_reference,
        kv_write_reference,
        norm_reference,
        rope_reference,
        sampling_reference,
        sgmv_reference,
    )

    return Kernels(
        rms_norm=norm_reference.rms_norm,
        fused_add_rms_norm=norm_reference.fused_add_rms_norm,
        rope=rope_reference.rope,
        kv_write=kv_write_reference.kv_write,
        paged_attention=attention_reference.paged_attention,
        sgmv=sgmv_reference.sgmv,
        sample=sampling_reference.sample,
        logprobs=sampling_reference.logprobs,
    )
