"""Masks of grammars on the CPU in C++ (`masks.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from manylora.kernels.native.library import native_function
from manylora.kernels.plain.sampling import check_masks


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """See `manylora.kernels.plain.sampling.mask_tokens`."""
    check_masks(logits, rows, bits)
    native_function("mask_tokens", torch.float32, "iiiiiii")(
        logits.data_ptr(),
        logits.shape[1],
        logits.stride(0),
        rows.data_ptr(),
        len(rows),
        bits.data_ptr(),
        bits.shape[1],
    )
