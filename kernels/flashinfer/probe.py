"""Whether FlashInfer computes the prompts of a model on this device, found out by a trial before the first request."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manylora.config import environment
from manylora.kernels.attention_batch import AttentionBatch
from manylora.kernels.flashinfer.attention import FlashInferAttention, refusal
from manylora.kernels.kv_layer import AttentionNeeds, KvLayer

OLDEST_DEVICE = (8, 0)
TOOLKIT = "/usr/local/cuda"
ROWS, CONTEXT, WINDOW = 64, 300, 100
"""Of the trial: query rows, KV tokens with them, and the sliding window where the model has any."""
TOLERANCE = 2.0**-7
"""Largest difference of two results, relative to the largest value: two roundings of bfloat16."""


def open_flashinfer(
    needs: AttentionNeeds, device: torch.device, dtype: torch.dtype, others: Callable[..., Tensor]
) -> FlashInferAttention | str:
    """Prepare FlashInfer and compare it with another implementation. Where it compiles, this takes minutes.

    Args:
        needs: What the model's layers compute.
        device: Where the tensors are.
        dtype: Of weights and activations.
        others: The implementation to compare with, which also computes what FlashInfer does not.

    Returns:
        FlashInfer, or why it cannot be used: it does not take what the model needs, it is not installed, device or
        compiler do not suffice, it fails, or its result is another one.
    """
    if reason := refusal(dtype, needs.head_dim, is_int8=needs.is_kv_int8):
        return reason
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed; pip install 'manylora[cuda]'"
    if (capability := torch.cuda.get_device_capability(device)) < OLDEST_DEVICE:
        own = ".".join(map(str, capability))
        return f"it needs a GPU of compute capability 8.0 or more, this one has {own}"
    if not _has_compiler():
        return "it compiles its kernels with nvcc, which is not found; install the CUDA toolkit, or set CUDA_HOME to it"
    try:
        attention = FlashInferAttention(importlib.import_module("flashinfer"), device, others)
        windows = {window and WINDOW for window in needs.windows}
        errors = [
            _error(attention, others, *_operands(needs, device, dtype, window))
            for window in windows
        ]
    except Exception as error:  # noqa: BLE001 - an installation, a compiler, a driver and a changing library are tried
        return f"a trial of it failed: {type(error).__name__}: {error}"
    largest = float(torch.tensor(errors).max())  # NaN if one is
    if largest <= TOLERANCE:
        return attention
    return (
        f"in a trial, it differed from Triton by {largest:.2g} of the largest value, more than {TOLERANCE:.2g}; "
        "install another version of flashinfer-python"
    )


def _has_compiler() -> bool:
    """Whether there is an nvcc where FlashInfer looks for one."""
    settings = environment()
    home = settings.get("CUDA_HOME") or settings.get("CUDA_PATH")
    found = (
        shutil.which(f"{home}/bin/nvcc")
        if home
        else shutil.which("nvcc") or shutil.which(f"{TOOLKIT}/bin/nvcc")
    )
    return found is not None


def _operands(
    needs: AttentionNeeds, device: torch.device, dtype: torch.dtype, window: int | None
) -> tuple[Tensor, KvLayer, AttentionBatch, float]:
    """One chunk over pages whose unused places are NaN: what `paged_attention` takes."""
    generator = torch.Generator().manual_seed(0)
    num_pages = -(-CONTEXT // needs.page_tokens)
    pages = list(range(2 * num_pages, 0, -2))
    arena = torch.full(
        (2 * num_pages + 1, 2, 2, needs.num_kv_heads, needs.page_tokens, needs.head_dim), torch.nan
    )
    arena[0] = 0
    for start, page in zip(range(0, CONTEXT, needs.page_tokens), pages, strict=True):
        live = arena[page, 1, :, :, : CONTEXT - start]
        live.copy_(torch.randn(live.shape, generator=generator))
    keys, values = arena.to(device, dtype)[:, 1].unbind(1)
    qkv = torch.randn(
        (ROWS, needs.num_heads + 2 * needs.num_kv_heads, needs.head_dim), generator=generator
    )
    batch = AttentionBatch.build([pages], [ROWS], [CONTEXT], device, needs.page_tokens)
    kv = KvLayer(keys, values, window=window)
    return qkv.to(device, dtype)[:, : needs.num_heads], kv, batch, needs.head_dim**-0.5


def _error(attention: FlashInferAttention, others: Callable[..., Tensor], *operands: Any) -> float:
    """The largest difference of both, relative to the largest value; NaN if one is."""
    expected = others(*operands).float()
    return float(
        (attention.paged_attention(*operands).float() - expected).abs().max() / expected.abs().max()
    )
