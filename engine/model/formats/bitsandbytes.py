"""bitsandbytes: int8 with a scale per row, and NF4 or FP4 with a scale per block of the flattened weight.

Scales of blocks may be quantised themselves, to 8 bits. `Quantisation.variant` is `nf4` or `fp4`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from manylora import strict_json
from manylora.engine.model.formats.stored import (
    FLOATS,
    OCTETS,
    ExpectedTensor,
    StoredLinear,
    shaped,
)

MOST = 127
"""Largest magnitude of an int8 weight."""
FORMAT = "weight_format"
ABSMAX = "weight.absmax"
NESTED = "weight.nested_absmax"
NESTED_MAP = "weight.nested_quant_map"


def int8_parts(linear: StoredLinear, _stored: Collection[str]) -> dict[str, ExpectedTensor]:
    """See `Format`."""
    return {
        "weight": shaped(("I8",), linear.out_features, linear.in_features),
        "SCB": shaped(FLOATS, linear.out_features),
        FORMAT: ExpectedTensor(OCTETS, ((), (1,)), is_optional=True),
    }


def int8_weight(linear: StoredLinear) -> torch.Tensor:
    """See `Format`."""
    if FORMAT in linear.tensors and linear[FORMAT].any():
        raise linear.error(
            FORMAT, "must be 0, for plain rows: other layouts are for one kind of GPU"
        )
    return linear["weight"].float() * (linear["SCB"].float() / MOST).unsqueeze(1)


def code_parts(linear: StoredLinear, stored: Collection[str]) -> dict[str, ExpectedTensor]:
    """See `Format`."""
    nested = {NESTED: ExpectedTensor(("F32",)), NESTED_MAP: shaped(("F32",), 256)}
    is_nested = bool(nested.keys() & stored)
    found = {
        "weight": shaped(OCTETS, -(-linear.out_features * linear.in_features // 2), 1),
        ABSMAX: ExpectedTensor(OCTETS if is_nested else ("F32",)),
        "weight.quant_map": shaped(("F32",), 16),
        _state(linear): ExpectedTensor(OCTETS),
    }
    return found | nested if is_nested else found


def code_weight(linear: StoredLinear) -> torch.Tensor:
    """See `Format`."""
    shape = [linear.out_features, linear.in_features]
    try:
        state = strict_json.loads(bytes(linear[_state(linear)].tolist()))
        size = int(state["blocksize"])
        kind = state["quant_type"]
        nested_size = int(state.get("nested_blocksize", 1))
        offset = float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise linear.error(_state(linear), f"cannot be read: {error}") from error
    if (
        state.get("shape") != shape
        or kind != linear.quantisation.variant
        or min(size, nested_size) < 1
    ):
        raise linear.error(
            _state(linear),
            f"must be of {linear.quantisation.variant} and shape {shape}, got {state}",
        )
    absmax = linear[ABSMAX].flatten()
    if NESTED in linear.tensors:
        nested = _by_block(linear, NESTED, linear[NESTED], nested_size, absmax.numel())
        absmax = linear[NESTED_MAP][absmax.long()] * nested + offset
    packed = linear["weight"].flatten()
    codes = torch.stack((packed >> 4, packed & 15), 1).flatten()[: shape[0] * shape[1]]
    scales = _by_block(linear, ABSMAX, absmax, size, codes.numel())
    return (linear["weight.quant_map"][codes.long()] * scales).view(shape)


def _state(linear: StoredLinear) -> str:
    return f"weight.quant_state.bitsandbytes__{linear.quantisation.variant}"


def _by_block(
    linear: StoredLinear, part: str, scales: torch.Tensor, size: int, count: int
) -> torch.Tensor:
    """Scale of each of `count` values in blocks of `size`."""
    if scales.numel() != -(-count // size):
        raise linear.error(part, f"must have {-(-count // size)} values, got {scales.numel()}")
    return scales.repeat_interleave(min(size, count))[:count]
