"""Keys and values in 8 bits, and the check of pages in either format.

A token's key, or value, of one head has one scale, made of that vector alone. So what is stored of a token does not
depend on the batch, on the order of steps, or on how its prompt was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.checks import expect, expect_that

KvScales = tuple[Tensor, Tensor]
"""Scales of a layer's keys and of its values, [num_pages, Hkv, page_tokens], float32, the same strides."""
LARGEST = 127
"""Largest magnitude of an element; -128 is not used."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors in 8 bits.

    Semantics:
        scale = max(abs(x[..., :])) / 127                  # NaN where an element is infinite or NaN
        q[..., i] = x[..., i] / scale                      # to the nearest integer, of two the even one; 0 if scale is
                                                           # 0 or NaN

    A scale of NaN makes all of the vector NaN when it is read, so that what is not finite is not lost.

    Args:
        x: [..., D].

    Returns:
        q, int8 [..., D], and the scales, float32 [...].
    """
    wide = x.float()
    scales = wide.abs().amax(-1) / LARGEST
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    steps = (wide / scales.unsqueeze(-1)).where(scales.unsqueeze(-1) > 0, 0)
    return steps.round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def dequantise(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors from 8 bits: q [..., D] times scales [...], rounded to `dtype`."""
    return (q.float() * scales.unsqueeze(-1)).to(dtype)


def check_pages(
    k_pages: Tensor,
    v_pages: Tensor,
    kv_scales: KvScales | None,
    shape: tuple[int | None, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Check a layer's pages.

    Args:
        k_pages: Keys.
        v_pages: Values.
        kv_scales: Their scales; None where keys and values are of `dtype` and not int8.
        shape: What is known of [num_pages, Hkv, page_tokens, D].
        dtype: Of the keys and values of a step.
        device: Where they must be.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    stored = dtype if kv_scales is None else torch.int8
    expect("k_pages", k_pages, shape, stored, device)
    expect("v_pages", v_pages, k_pages.shape, stored, device)
    expect_that("k_pages", k_pages.stride(3) == 1, "consecutive elements", k_pages.stride())
    expect_that("v_pages", v_pages.stride() == k_pages.stride(), f"strides {k_pages.stride()}", v_pages.stride())
    if kv_scales is not None:
        for scales in kv_scales:
            expect("kv_scales", scales, k_pages.shape[:3], torch.float32, device)
            expect_that("kv_scales", scales.stride(2) == 1, "consecutive tokens", scales.stride())
        strides = kv_scales[0].stride()
        expect_that("kv_scales", kv_scales[1].stride() == strides, f"strides {strides}", kv_scales[1].stride())
