"""Formats of quantised weights in checkpoints: one module per format, which turns the tensors of a linear into floats.

A format knows nothing of files, devices and models. A `Quantisation` has what a checkpoint's config says about it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from manylora.engine.model.formats import awq, bitsandbytes, gptq, packed, scaled, three_half
from manylora.engine.model.formats.stored import ExpectedTensor, StoredLinear, is_finite
from manylora.kernels.quantised import Int8Weight


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store the weight of a linear."""

    parts: Callable[[StoredLinear, Collection[str]], dict[str, ExpectedTensor]]
    """Expected tensors of a linear by the ends of their names. It may depend on the ends of the stored names."""
    weight: Callable[[StoredLinear], torch.Tensor]
    """The weight, float32 [out_features, in_features]. Raises ConfigError if values cannot be right."""


FORMATS: dict[str, Format] = {
    "awq": Format(awq.parts, awq.weight),
    "bnb-4bit": Format(bitsandbytes.code_parts, bitsandbytes.code_weight),
    "bnb-int8": Format(bitsandbytes.int8_parts, bitsandbytes.int8_weight),
    "gptq": Format(gptq.parts, gptq.weight),
    "packed": Format(packed.parts, packed.weight),
    "q3.5": Format(three_half.parts, three_half.weight),
    "scaled": Format(scaled.parts, scaled.weight),
}
"""Formats by `Quantisation.layout`."""


def int8_rows(linear: StoredLinear) -> Int8Weight | None:
    """The weight of a linear that is stored in int8 with a scale for each row; None for other linears.

    Raises:
        ConfigError: As in `dequantised`.
    """
    found = linear.quantisation
    if (
        found.layout != "scaled"
        or found.variant != "I8"
        or found.block
        or scaled.ZERO in linear.tensors
    ):
        return None
    _check_finite(linear)
    scales = scaled.scales(linear).flatten().expand(linear.out_features)
    return Int8Weight(linear["weight"].contiguous(), scales.contiguous())


def _check_finite(linear: StoredLinear) -> None:
    for part, tensor in linear.tensors.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            raise linear.error(part, "has values that are infinite or NaN")


def dequantised(linear: StoredLinear) -> torch.Tensor:
    """The weight of a linear whose tensors were read, float32 [out_features, in_features].

    Raises:
        ConfigError: A value is damaged. The message names the tensor.
    """
    _check_finite(linear)
    weight = FORMATS[linear.quantisation.layout].weight(linear)
    if not is_finite(weight):
        raise linear.error("weight", "has values that are infinite or NaN")
    return weight
