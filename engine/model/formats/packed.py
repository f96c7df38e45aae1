"""compressed-tensors' pack-quantized: 4 or 8 bits in words of 32, with a scale for a row or for a group of inputs."""

from __future__ import annotations

from collections.abc import Collection

import torch

from manylora.engine.model.formats.stored import (
    FLOATS,
    WHOLE,
    WORD_BITS,
    WORDS,
    ExpectedTensor,
    StoredLinear,
    shaped,
    unpack,
)

PACKED = "weight_packed"
SCALE = "weight_scale"
ZERO = "weight_zero_point"
GROUPS = "weight_g_idx"
SHAPE = "weight_shape"


def parts(linear: StoredLinear, _stored: Collection[str]) -> dict[str, ExpectedTensor]:
    """See `Format`."""
    rows = linear.out_features
    columns = linear.in_features
    groups = linear.num_groups
    per_word = WORD_BITS // linear.quantisation.bits
    return {
        PACKED: shaped(WORDS, rows, -(-columns // per_word)),
        SCALE: shaped(FLOATS, rows, groups),
        SHAPE: shaped(WHOLE, 2),
        ZERO: shaped(WORDS, -(-rows // per_word), groups, is_optional=True),
        GROUPS: shaped(WHOLE, columns, is_optional=True),
    }


def weight(linear: StoredLinear) -> torch.Tensor:
    """See `Format`."""
    rows = linear.out_features
    columns = linear.in_features
    bits = linear.quantisation.bits
    if linear[SHAPE].tolist() != [rows, columns]:
        raise linear.error(SHAPE, f"must be {[rows, columns]}, got {linear[SHAPE].tolist()}")
    values = unpack(linear[PACKED], bits)[:, :columns]
    zeros = torch.full((rows, linear.num_groups), 1 << (bits - 1))
    if ZERO in linear.tensors:  # packed along the rows
        zeros = unpack(linear[ZERO].T, bits).T[:rows]
    return linear.by_groups(values, zeros, linear[SCALE], GROUPS)
