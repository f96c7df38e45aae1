"""A linear layer whose weight is laid out for the device once, at load.

On a CPU oneDNN can reorder a weight into the blocks its matrix kernels want; a step is then up to 2.8 times faster than
with the plain weight. The ops are those that torch's Inductor uses; they are internal, so this is their only place, and
each number format is probed once and falls back to the plain op. Knows nothing of models.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from functools import cache, partial

import torch

logger = logging.getLogger(__name__)

PACK_ROWS = 32
"""Rows of x that a packed weight is laid out for; any number works."""
EXACT_ROW_BITS = 4
"""oneDNN compiles a kernel for each number of rows and keeps it: half a MB and a millisecond, for each shape of weight.
So rows are padded to numbers that differ in their leading bits only: all up to 16, then even ones, and so on."""

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x [rows, in_features] to a new, contiguous [rows, out_features] of x's dtype."""


class PackedLinear:
    """`x @ weight.T + bias` on a copy of the weight in oneDNN's layout, which cannot be indexed.

    Args:
        weight: [out_features, in_features], on the CPU; not kept.
        bias: [out_features] or None.
    """

    __slots__ = ("_bias", "_linear", "_packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x [rows, in_features]."""
        num_rows = x.shape[0]
        padding = padded_rows(num_rows) - num_rows
        if padding:
            x = torch.nn.functional.pad(x, (0, 0, 0, padding))
        y: torch.Tensor = self._linear(x, self._packed, self._bias, "none", [], "")
        return y[:num_rows] if padding else y


def padded_rows(num_rows: int) -> int:
    """The number of rows that is computed for `num_rows` rows: at most an eighth more."""
    unit_bits = max((num_rows - 1).bit_length() - EXACT_ROW_BITS, 0)
    return -(-num_rows >> unit_bits) << unit_bits


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Make the fastest layer for the weight's device and dtype.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return partial(torch.nn.functional.linear, weight=weight, bias=bias)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this CPU and this torch multiply with packed weights of `dtype`, and rightly; a no is logged once."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    x = torch.randn(3, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    try:
        y = PackedLinear(weight, bias)(x)
        expected = torch.nn.functional.linear(x, weight, bias)
    except (RuntimeError, AttributeError, TypeError) as error:  # the op is missing, or takes other arguments or dtypes
        logger.warning("weights of %s are not packed, so steps are slower: %s", dtype, error)
        return False
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    is_right = y.shape == expected.shape and torch.allclose(y.float(), expected.float(), rtol=tolerance, atol=tolerance)
    if not is_right:
        logger.warning("weights of %s are not packed, so steps are slower: packed products come out wrong", dtype)
    return is_right


@cache
def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; elsewhere it is emulated and slower than float32."""
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def has_native_float16() -> bool:
    """Whether this CPU multiplies float16; elsewhere oneDNN refuses it."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
