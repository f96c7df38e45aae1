"""Linear layers with quantised weights, in torch operators: the definition of the operation for all kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from manylora.kernels.checks import expect
from manylora.kernels.quantised import Int8Weight, QuantisedWeight, check_layer

SMALLEST = 1e-30
"""Rows with a smaller largest magnitude count as zeros."""


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Turn activations into codes, each row by its own largest magnitude.

    Args:
        x: [T, N], any float dtype.

    Returns:
        (codes, scales): int8 from -127 to 127, [T, N], and float32, [T, 1]; x is nearly codes * scales. A row that is
        not finite has the scale NaN.
    """
    x = x.float()
    magnitudes = x.abs().amax(1, keepdim=True).clamp(min=SMALLEST)
    magnitudes = magnitudes.where(magnitudes.isfinite(), torch.nan)
    inverses = (
        torch.full_like(magnitudes, 127) / magnitudes
    )  # torch makes 127 / x two operations, rounded twice
    return (x * inverses).round_().nan_to_num_(0).to(torch.int8), magnitudes / 127


def quantised_linear(weight: QuantisedWeight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Make a linear layer whose products are sums of integers.

    Semantics:
        codes, scales = quantise_rows(x)
        int8: y[t, n] = (codes[t] @ weight.codes[n]) * weight.scales[n] * scales[t] + bias[n]
        int4: y[t, n] = sum over groups g of ((codes[t, g] @ (weight.codes[n, g] - 8)) * weight.scales[n, g])
                        * scales[t] + bias[n]

    The products of codes are exact; the rest is float32, rounded once more, to the dtype of x. So a row's result does
    not depend on the other rows.

    Args:
        weight: [out_features, in_features].
        bias: [out_features], any float dtype, or None.

    Returns:
        A function of x [T, in_features], of rows with consecutive elements, that returns [T, out_features], contiguous.
        A row of x that is not finite becomes NaN.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    check_layer(weight, bias)

    def linear(x: Tensor) -> Tensor:
        expect("x", x, (None, weight.in_features))
        codes, scales = quantise_rows(x)
        if isinstance(weight, Int8Weight):
            y = _product(codes, weight.codes.t()).float() * weight.scales
        else:
            y = (codes.double() @ weight.dequantised().double().t()).float()
        y *= scales
        return (y if bias is None else y + bias).to(x.dtype)

    return linear


def _product(codes: Tensor, others: Tensor) -> Tensor:
    """Multiply matrices of codes exactly."""
    return torch._int_mm(codes, others) if has_exact_int_mm() else codes.double() @ others.double()


@functools.cache
def has_exact_int_mm() -> bool:
    """Find out whether torch multiplies int8 exactly here: without VNNI, oneDNN cuts sums of two products at 32,767."""
    codes = torch.full((2, 64), 127, dtype=torch.int8)
    others = torch.full((64, 2), -128, dtype=torch.int8)
    return bool((torch._int_mm(codes, others) == 64 * 127 * -128).all())


def quantised_head(weight: Int8Weight) -> Callable[[Tensor], Tensor]:
    """Make a layer of logits: weights in 8 bits, and an input in 15.

    The head's input is the sum of all layers, in which a few elements are much larger than the rest, and its output is
    the answer. So what the codes of a row leave out is multiplied as well.

    Semantics:
        codes, scales = quantise_rows(x)
        rest, rest_scales = quantise_rows(x - codes * scales)
        y[t, n] = (codes[t] @ weight.codes[n]) * weight.scales[n] * scales[t]
                  + (rest[t] @ weight.codes[n]) * weight.scales[n] * rest_scales[t]

    Args:
        weight: [out_features, in_features].

    Returns:
        A function of x [T, in_features], as that of `quantised_linear`, that returns [T, out_features], float32.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    linear = quantised_linear(weight, None)

    def head(x: Tensor) -> Tensor:
        codes, scales = quantise_rows(x)
        coarse = codes * scales  # from which the layer makes the same codes
        return linear(coarse) + linear(x - coarse)

    return head
