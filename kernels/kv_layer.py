"""The keys and values of a layer in pages, their form in 8 bits, and what attention over them has to compute.

A token's key, or value, of one head has one scale, made of that vector alone. So what is stored of a token does not
depend on the batch, on the order of steps, or on how its prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from manylora.config import Attention
from manylora.kernels.checks import expect, expect_that

LARGEST = 127
"""Largest magnitude of an element; -128 is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """The attention of a model: its sizes, and the setting that chooses what computes it on a GPU."""

    setting: Attention
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    windows: tuple[int | None, ...]
    """The sliding windows of its layers; None for none."""
    is_kv_int8: bool


@dataclass(slots=True, eq=False)
class KvLayer:
    """The arena as the attention of one layer reads and writes it. Made once for a layer, and used in every step."""

    k: Tensor
    """Keys, [num_pages, Hkv, page_tokens, D], any page, head and token stride; int8 where there are scales."""
    v: Tensor
    """Values; the same shape, dtype and strides."""
    scales: tuple[Tensor, Tensor] | None = None
    """Of int8 keys and of values, [num_pages, Hkv, page_tokens], float32, any page and head stride, both the same."""
    window: int | None = None
    """The sliding window: how many positions a row sees, itself included; None for all."""
    kind: tuple[object, ...] = field(init=False, repr=False)
    """Equal for layers for which the same can be prepared: window, shapes, strides, dtypes and devices."""
    strides: tuple[int, ...] = field(init=False, repr=False)
    """From one page, head and token to the next, and from one page and head of scales; 0 without scales."""
    address: int = field(init=False, repr=False)
    """Where `_pages` lies: all of this as the kernels in C++ read it."""
    _pages: np.ndarray = field(init=False, repr=False)
    """`Pages` of native/rows.h, [10], int64."""

    def __post_init__(self) -> None:
        tensors = (self.k, self.v, *(self.scales or ()))
        self.kind = (
            self.window,
            *((each.shape, each.stride(), each.dtype, each.device) for each in tensors),
        )
        self.strides = (
            *self.k.stride()[:3],
            *(self.scales[0].stride()[:2] if self.scales else (0, 0)),
        )
        addresses = [0 if each is None else each.data_ptr() for each in self.tensors]
        self._pages = np.array([*addresses, *self.strides, self.k.shape[2]], dtype=np.int64)
        self.address = self._pages.ctypes.data

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys, values, and their scales or None."""
        return self.k, self.v, *(self.scales or (None, None))

    def check(
        self, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Check the pages that an operation was given.

        Args:
            shape: What is known of [num_pages, Hkv, page_tokens, D].
            dtype: Of the keys and values of a step, and of those in the pages where these are not int8.
            device: Where they must be.

        Raises:
            ValueError: A shape, dtype, device or stride does not fit.
        """
        k, v, stored = self.k, self.v, dtype if self.scales is None else torch.int8
        expect("k_pages", k, shape, stored, device)
        expect("v_pages", v, k.shape, stored, device)
        expect_that("k_pages", k.stride(3) == 1, "consecutive elements", k.stride())
        expect_that("v_pages", v.stride() == k.stride(), f"strides {k.stride()}", v.stride())
        if self.scales is not None:
            for scales in self.scales:
                expect("kv_scales", scales, k.shape[:3], torch.float32, device)
                expect_that(
                    "kv_scales", scales.stride(2) == 1, "consecutive tokens", scales.stride()
                )
            of_k, of_v = (scales.stride() for scales in self.scales)
            expect_that("kv_scales", of_v == of_k, f"strides {of_k}", of_v)


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
