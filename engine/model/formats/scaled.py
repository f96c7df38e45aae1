"""int8 and float8 weights with one scale, or one for each row or block: compressed-tensors, fine-grained FP8, others.

A value is `weight` times `weight_scale`, which DeepSeek calls `weight_scale_inv`. Scales of inputs are not used.
`Quantisation.variant` is the dtype of the weight.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from manylora.engine.model.formats.stored import FLOATS, ExpectedTensor, StoredLinear, shaped

SCALE = "weight_scale"
INVERSE = "weight_scale_inv"
ZERO = "weight_zero_point"
UNUSED = (
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "activation_scale",
    "output_scale",
    "output_zero_point",
)


def parts(linear: StoredLinear, stored: Collection[str]) -> dict[str, ExpectedTensor]:
    """See `Format`."""
    rows = linear.out_features
    columns = linear.in_features
    block = linear.quantisation.block
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (rows,), (rows, 1))
    if block:
        shapes = ((-(-rows // block[0]), -(-columns // block[1])),)
    scale = INVERSE if INVERSE in stored else SCALE
    unused = ExpectedTensor((*FLOATS, "I8"), is_optional=True)
    return {
        "weight": shaped((linear.quantisation.variant,), rows, columns),
        scale: ExpectedTensor((*FLOATS, "F8_E8M0"), shapes),
        ZERO: ExpectedTensor(("I8",), shapes, is_optional=True),
        **dict.fromkeys(UNUSED, unused),
    }


def weight(linear: StoredLinear) -> torch.Tensor:
    """See `Format`."""
    values = linear["weight"].float()
    if ZERO in linear.tensors:
        values -= _spread(linear, ZERO)
    return values * scales(linear)


def scales(linear: StoredLinear) -> torch.Tensor:
    """Scales of the stored weight, float32, in a shape that broadcasts over it."""
    return _spread(linear, INVERSE if INVERSE in linear.tensors else SCALE)


def _spread(linear: StoredLinear, part: str) -> torch.Tensor:
    """A part in float32, in a shape that broadcasts over the weight."""
    values = linear[part].float()
    block = linear.quantisation.block
    if block is None:
        return values.reshape(-1, 1)
    values = values.repeat_interleave(min(block[0], linear.out_features), 0)[: linear.out_features]
    return values.repeat_interleave(min(block[1], linear.in_features), 1)[:, : linear.in_features]
