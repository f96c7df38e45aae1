"""A linear layer whose weight is laid out for the device once, when it is loaded.

On a CPU oneDNN can reorder a weight into blocks for its matrix kernels. A step is then up to 2.8 times faster than with
the plain weight. The operations are those of torch's Inductor. They are internal to torch, so only this module uses
them; each number format is tried once, and the plain operation is used if that fails. Knows nothing of models.
"""

from __future__ import annotations

import logging
import platform
from functools import cache, partial

import torch

from manylora.kernels.dispatch import Linear as Linear
from manylora.kernels.dispatch import kernels_for
from manylora.kernels.quantised import Int4Weight, Int8Weight
from manylora.kernels.weight_format import WeightFormat

logger = logging.getLogger(__name__)

PACK_ROWS = 32
"""Number of rows of x that a packed weight is laid out for. Other numbers work too."""
EXACT_ROW_BITS = 4
"""Leading bits in which numbers of rows may differ: all numbers up to 16, then even ones, and so on. oneDNN compiles
and keeps a kernel for each number of rows, half a MB and a millisecond for each shape of weight, so rows are padded."""


class PackedLinear:
    """`x @ weight.T + bias` on a copy of the weight in oneDNN's layout, which cannot be indexed.

    Args:
        weight: [out_features, in_features], on the CPU. It is not kept.
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
    """Number of rows that is computed for `num_rows` rows, at most an eighth more."""
    unit_bits = max((num_rows - 1).bit_length() - EXACT_ROW_BITS, 0)
    return -(-num_rows >> unit_bits) << unit_bits


def make_linear(
    weight: torch.Tensor | Int8Weight,
    bias: torch.Tensor | None = None,
    weights: WeightFormat = "bf16",
) -> Linear:
    """Make the fastest layer for the weight's device and dtype, in the given format.

    Args:
        weight: [out_features, in_features]. For the format bf16 it has the activations' dtype. For others it has any
            float dtype, or 8 bits already, which the format int8 keeps.
        bias: [out_features] or None.
        weights: The format.

    Raises:
        TypeError: A weight in 8 bits is to be kept as bf16.
        ValueError: The device has no layers of this format.
    """
    if weights != "bf16":
        make = kernels_for(_device(weight), torch.float32).quantised_linear
        if weights == "int8":
            return make(_in_int8(weight), bias)
        floats = weight.dequantised() if isinstance(weight, Int8Weight) else weight
        return make(Int4Weight.of(floats), bias)
    if isinstance(weight, Int8Weight):
        raise TypeError("weight: expected floats to keep as bf16, got codes of 8 bits")
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
        widening = kernels_for(weight.device, weight.dtype).widening_linear
        if widening is not None:
            return widening(weight, bias)
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return partial(torch.nn.functional.linear, weight=weight, bias=bias)


def make_head(weight: torch.Tensor | Int8Weight, weights: WeightFormat) -> Linear:
    """Make the layer of the logits for a model with layers in the format `weights`."""
    if weights == "bf16":
        return make_linear(weight)
    return kernels_for(_device(weight), torch.float32).quantised_head(_in_int8(weight))


def _device(weight: torch.Tensor | Int8Weight) -> torch.device:
    return weight.codes.device if isinstance(weight, Int8Weight) else weight.device


def _in_int8(weight: torch.Tensor | Int8Weight) -> Int8Weight:
    return weight if isinstance(weight, Int8Weight) else Int8Weight.of(weight)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """True if this CPU and this torch multiply correctly with packed weights of `dtype`; a failure is logged once."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    x = torch.randn(3, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    try:
        y = PackedLinear(weight, bias)(x)
        expected = torch.nn.functional.linear(x, weight, bias)
    except (
        RuntimeError,
        AttributeError,
        TypeError,
    ) as error:  # the operation is missing, or takes other arguments or dtypes
        logger.warning("weights of %s are not packed, so steps are slower: %s", dtype, error)
        return False
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    is_right = y.shape == expected.shape and torch.allclose(
        y.float(), expected.float(), rtol=tolerance, atol=tolerance
    )
    if not is_right:
        logger.warning(
            "weights of %s are not packed, so steps are slower: packed products come out wrong",
            dtype,
        )
    return is_right


@cache
def has_fast_bfloat16() -> bool:
    """True if layers in bfloat16 are no slower than in float32: this CPU multiplies it, or kernels widen it."""
    if kernels_for(torch.device("cpu"), torch.bfloat16).widening_linear is not None:
        return True
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def has_native_float16() -> bool:
    """True if this CPU multiplies float16. If not, oneDNN refuses it."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
