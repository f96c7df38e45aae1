"""Weights of linear layers as integers: their tensors, their rounding from floats, and the floats they stand for.

Rounding is to the nearest, half to even. It depends on the weights alone, not on the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from manylora.kernels.checks import expect, expect_that
from manylora.kernels.weight_format import GROUP, UNIT

ROWS_AT_ONCE = 1024
"""Rows that are quantised at a time; it bounds the memory for floats."""
MAX_FEATURES = 1 << 16
"""Most inputs of a layer in 8 bits: a sum of this many products of codes of 0 to 255 and of +-127 fits 32 bits."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight in 8 bits, which stands for `codes * scales[:, None]`."""

    codes: Tensor
    """[out_features, in_features], int8."""
    scales: Tensor
    """[out_features], float32."""

    @property
    def in_features(self) -> int:
        """Width of the layer's input."""
        return self.codes.shape[1]

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """Quantise [out_features, in_features], of any float dtype: each row by its largest magnitude, to +-127."""
        return cls(*_in_parts(weight, _int8_rows))

    def dequantised(self) -> Tensor:
        """[out_features, in_features], float32."""
        return self.codes * self.scales[:, None]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight in 4 bits. 32 inputs of an output share a scale; a code, 0 to 15, stands for `(code - 8) * scale`."""

    codes: Tensor
    """[out_features, groups * 16], uint8, two codes in a byte: of 8 inputs, byte i has input i in its lower half and
    input i + 4 in its upper half. Inputs past `in_features` have the code 8."""
    scales: Tensor
    """[out_features, groups], bfloat16."""
    in_features: int
    """Width of the layer's input."""

    @classmethod
    def of(cls, weight: Tensor) -> Int4Weight:
        """Quantise [out_features, in_features], of any float dtype: the largest magnitude of a group gets the code 0.

        Code 0 is furthest from 8, so the scale may be negative.
        """
        return cls(*_in_parts(weight, _int4_rows), weight.shape[1])

    def dequantised(self) -> Tensor:
        """[out_features, in_features], float32."""
        rows, groups = self.scales.shape
        units = self.codes.view(rows, groups, -1, 1, UNIT)
        codes = torch.cat((units & 15, units >> 4), 3).view(rows, groups, GROUP).float() - 8
        return codes.mul_(self.scales[:, :, None]).view(rows, -1)[:, : self.in_features]


QuantisedWeight = Int8Weight | Int4Weight


def side_by_side(weights: Sequence[Tensor | Int8Weight]) -> Tensor | Int8Weight:
    """Join several linears to one whose outputs are side by side; in floats unless all are in 8 bits."""
    rounded = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if len(rounded) == len(weights):
        return Int8Weight(
            torch.cat([each.codes for each in rounded]),
            torch.cat([each.scales for each in rounded]),
        )
    return torch.cat(
        [each.dequantised() if isinstance(each, Int8Weight) else each for each in weights]
    )


def check_layer(weight: QuantisedWeight, bias: Tensor | None) -> None:
    """Check the weight and the bias of a new layer.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    num_rows = weight.codes.shape[0]
    if isinstance(weight, Int8Weight):
        expect("codes", weight.codes, (None, None), torch.int8)
        expect_that(
            "codes",
            weight.in_features <= MAX_FEATURES,
            f"at most {MAX_FEATURES} inputs",
            weight.in_features,
        )
        expect("scales", weight.scales, (num_rows,), torch.float32)
    else:
        groups = -(-weight.in_features // GROUP)
        expect("codes", weight.codes, (None, groups * GROUP // 2), torch.uint8)
        expect("scales", weight.scales, (num_rows, groups), torch.bfloat16)
    if bias is not None:
        expect("bias", bias, (num_rows,))


def _in_parts(
    weight: Tensor, quantise: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    codes, scales = zip(
        *(quantise(rows.float()) for rows in weight.split(ROWS_AT_ONCE)), strict=True
    )
    return torch.cat(codes), torch.cat(scales)


def _int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1) / 127  # NaN where a weight is: then so is the output
    codes = (weight / scales.where(scales != 0, 1)[:, None]).round_().clamp_(-127, 127)
    return codes.nan_to_num_(0).to(torch.int8), scales


def _int4_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(
        1, (-1, GROUP)
    )  # [rows, groups, GROUP]
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (largest / -8).to(torch.bfloat16)
    codes = (
        (groups / scales.where(scales != 0, 1))
        .round_()
        .add_(8)
        .clamp_(0, 15)
        .nan_to_num_(8)
        .to(torch.uint8)
    )
    units = codes.unflatten(2, (-1, 2, UNIT))
    return (units[:, :, :, 0] | units[:, :, :, 1] << 4).flatten(1), scales[:, :, 0]
