"""The one place that chooses an implementation: Triton on a GPU, on a CPU C++, or torch operators without that.

On a GPU, attention of prompts may be computed by FlashInfer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from manylora.errors import ConfigError
from manylora.kernels.attention_batch import AttentionBatch
from manylora.kernels.kv_layer import AttentionNeeds, KvLayer
from manylora.kernels.native.library import NATIVE_DTYPES, native_library
from manylora.kernels.quantised import Int8Weight, QuantisedWeight
from manylora.kernels.sgmv import LoraDelta, SgmvOperands

logger = logging.getLogger(__name__)

PagedAttention = Callable[[Tensor, KvLayer, AttentionBatch, float], Tensor]
Sgmv = Callable[[Tensor, Tensor, SgmvOperands], None]
Shrink = Callable[[Tensor, SgmvOperands], LoraDelta]
Linear = Callable[[Tensor], Tensor]
"""x [rows, in_features] to a new, contiguous [rows, out_features] of x's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The operations of one kind of device. What each computes is stated in `manylora.kernels.plain`.

    Where there is `shrink`, `fused_add_rms_norm`, `silu_and_mul` and `attend` take a `LoraDelta` as their last operand
    and add it to the first before anything else: bit for bit what `sgmv` and then the operation yield.
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
    """All of a layer between its projections. In torch operators it is `manylora.kernels.attend.attend`."""
    shrink: Shrink | None = None
    """The first half of `sgmv`, whose second half is done by the next operation; None where `sgmv` does both."""
    quantised_linear: Callable[[QuantisedWeight, Tensor | None], Linear] | None = None
    """Makes a layer with weights in 8 or 4 bits; None where there are none."""
    quantised_head: Callable[[Int8Weight], Linear] | None = None
    """Makes a layer of logits with weights in 8 bits, in float32; None where there are none."""


def kernels_for(
    device: torch.device, dtype: torch.dtype, attention: AttentionNeeds | None = None
) -> Kernels:
    """Return the operations for tensors on `device`.

    Args:
        device: Where the tensors are.
        dtype: Of weights and activations.
        attention: Of the model that runs; None for those who do not need attention, or that of Triton on a GPU.

    Raises:
        ValueError: There are none for this kind of device.
        ConfigError: The device needs Triton, which is not installed, or does not compute attention as it is asked to.
    """
    if device.type == "cpu":
        if attention is not None and attention.setting != "auto":
            raise ConfigError(
                f"model.attention: {attention.setting} computes on a CUDA device only; take auto, or model.device cuda",
                param="model.attention",
            )
        return native_kernels() if dtype in NATIVE_DTYPES and native_library() else torch_kernels()
    if device.type == "cuda":
        return (
            triton_kernels()
            if attention is None
            else with_flashinfer(triton_kernels(), device, dtype, attention)
        )
    raise ValueError(f"device: expected cpu or cuda, got {device.type}")


@functools.cache
def native_kernels() -> Kernels:
    """The operations in C++, for a CPU and for dtypes in `NATIVE_DTYPES`.

    Sampling uses torch operators, but for masks.
    """
    from manylora.kernels.native import attention, masks, quantised, rows, sgmv

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
    )


@functools.cache
def torch_kernels() -> Kernels:
    """The operations in torch operators, for a CPU without C++ ones and for dtypes that these do not know."""
    from manylora.kernels import attend
    from manylora.kernels.plain import attention, quantised, rows, sampling, sgmv

    return replace(
        _kernels_of(rows, attend, attention, sgmv, sampling),
        quantised_linear=quantised.quantised_linear,
        quantised_head=quantised.quantised_head,
    )


@functools.cache
def triton_kernels() -> Kernels:
    """The Triton operations. Triton is an optional dependency: it is large, and only a GPU needs it.

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


def with_flashinfer(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, attention: AttentionNeeds
) -> Kernels:
    """The operations with FlashInfer for prompts, where it can be used and is not ruled out; else as they are.

    Raises:
        ConfigError: FlashInfer is asked for and cannot be used; the message says why and what to do.
    """
    if attention.setting == "triton":
        return kernels
    from manylora.kernels.flashinfer.probe import open_flashinfer

    found = open_flashinfer(attention, device, dtype, kernels.paged_attention)
    if not isinstance(found, str):
        logger.info("attention of prompts runs in FlashInfer")
        own = found.paged_attention
        return replace(
            kernels,
            paged_attention=own,
            attend=functools.partial(kernels.attend, paged_attention=own),
        )
    if attention.setting == "flashinfer":
        raise ConfigError(
            f"model.attention: flashinfer cannot be used: {found}; or take auto or triton",
            param="model.attention",
        )
    logger.info("attention of prompts runs in Triton, not in FlashInfer: %s", found)
    return kernels


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
