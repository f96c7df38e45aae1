"""The one place that chooses an implementation: Triton on a GPU, C++ on a CPU, or torch operators without that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from manylora.errors import ConfigError
from manylora.kernels.attention_batch import AttentionBatch
from manylora.kernels.kv_layer import KvLayer
from manylora.kernels.native.levels import BF16_LEVELS
from manylora.kernels.native.library import NATIVE_DTYPES, level_of, native_library
from manylora.kernels.quantised import Int8Weight, QuantisedWeight
from manylora.kernels.sgmv import LoraDelta, SgmvOperands

PagedAttention = Callable[[Tensor, KvLayer, AttentionBatch, float], Tensor]
Sgmv = Callable[[Tensor, Tensor, SgmvOperands], None]
Shrink = Callable[[Tensor, SgmvOperands], LoraDelta]
Linear = Callable[[Tensor], Tensor]
"""x [rows, in_features] to a new, contiguous [rows, out_features] of x's dtype."""


def _no_quantised(*_: object) -> Linear:
    raise ValueError("weights: expected bf16; this device has no layers in 8 or 4 bits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The operations of one kind of device. `manylora.kernels.plain` defines what each computes.

    Where there is `shrink`, `fused_add_rms_norm`, `silu_and_mul` and `attend` take a `LoraDelta` as their last operand
    and first add it to their first operand. The result is bit for bit that of `sgmv` followed by the operation.
    """

    embed: Callable[[Tensor, Tensor | None, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    fused_add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    silu_and_mul: Callable[..., Tensor]
    paged_attention: PagedAttention
    sgmv: Sgmv
    sample: Callable[..., Tensor]
    logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]
    mask_tokens: Callable[[Tensor, Tensor, Tensor], None]
    attend: Callable[..., Tensor]
    """The part of a layer between its projections, as `manylora.kernels.attend.attend` defines it."""
    shrink: Shrink | None = None
    """The first half of `sgmv`; the next operation does the second half. None where `sgmv` does both."""
    quantised_linear: Callable[[QuantisedWeight, Tensor | None], Linear] = _no_quantised
    """Makes a layer with weights in 8 or 4 bits. Raises ValueError where there are none."""
    quantised_head: Callable[[Int8Weight], Linear] = _no_quantised
    """Makes a layer of logits in float32 with weights in 8 bits. Raises ValueError where there are none."""
    widening_linear: Callable[[Tensor, Tensor | None], Linear] | None = None
    """Makes a layer with weights in bfloat16 that become floats in registers. None where the CPU multiplies them."""


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the operations for tensors on `device`.

    Args:
        device: Where the tensors are.
        dtype: Dtype of weights and activations.

    Raises:
        ValueError: There are no operations for this kind of device.
        ConfigError: The device needs Triton, which is not installed.
    """
    if device.type == "cpu":
        return native_kernels() if dtype in NATIVE_DTYPES and native_library() else torch_kernels()
    if device.type == "cuda":
        return triton_kernels()
    raise ValueError(f"device: expected cpu or cuda, got {device.type}")


@functools.cache
def native_kernels() -> Kernels:
    """The operations in C++, for a CPU and for dtypes in `NATIVE_DTYPES`. Sampling, but for masks, uses torch."""
    from manylora.kernels.native import attention, linear, masks, quantised, rows, sgmv

    library = native_library()
    is_widened = library is not None and level_of(library) not in BF16_LEVELS
    return replace(
        torch_kernels(),
        rms_norm=rows.rms_norm,
        fused_add_rms_norm=rows.fused_add_rms_norm,
        silu_and_mul=rows.silu_and_mul,
        paged_attention=attention.paged_attention,
        sgmv=sgmv.sgmv,
        attend=attention.attend,
        mask_tokens=masks.mask_tokens,
        quantised_linear=quantised.QuantisedLinear,
        quantised_head=quantised.QuantisedHead,
        widening_linear=linear.WideningLinear if is_widened else None,
    )


@functools.cache
def torch_kernels() -> Kernels:
    """The operations in torch operators, for a CPU without the C++ library and for dtypes that it does not know."""
    from manylora.kernels import attend
    from manylora.kernels.plain import attention, quantised, rows, sampling, sgmv

    return replace(
        _kernels_of(rows, attend, attention, sgmv, sampling),
        quantised_linear=quantised.quantised_linear,
        quantised_head=quantised.quantised_head,
    )


@functools.cache
def triton_kernels() -> Kernels:
    """The operations in Triton. Triton is an optional dependency: it is large, and only a GPU needs it.

    On CPU tensors they run only where TRITON_INTERPRET=1 was set before Triton was first imported.

    Raises:
        ConfigError: Triton is not installed.
    """
    try:
        from manylora.kernels.triton import attend, attention, rows, sampling, sgmv
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError(
            "model.device: a CUDA device needs Triton, which is not installed: pip install 'manylora[triton]'",
            param="model.device",
        ) from error
    return replace(_kernels_of(rows, attend, attention, sgmv, sampling), shrink=sgmv.shrink)


def _kernels_of(
    rows: ModuleType,
    attend: ModuleType,
    attention: ModuleType,
    sgmv: ModuleType,
    sampling: ModuleType,
) -> Kernels:
    """The operations by their names, which are the same in the modules of every kind."""
    return Kernels(
        embed=rows.embed,
        rms_norm=rows.rms_norm,
        fused_add_rms_norm=rows.fused_add_rms_norm,
        silu_and_mul=rows.silu_and_mul,
        paged_attention=attention.paged_attention,
        attend=attend.attend,
        sgmv=sgmv.sgmv,
        sample=sampling.sample,
        logprobs=sampling.logprobs,
        mask_tokens=sampling.mask_tokens,
    )
