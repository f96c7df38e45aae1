"""compressed-tensors' pack-quantized: 4 or 8 bits in words of 32, with a scale for a row or for a group of inputs."""

from __future__ import annotations

from collections.abc import Collection

import torch

from manylora.engine.model.formats.stored import (
    FLOATS,
    WORD_BITS,
    ExpectedTensor,
    StoredLinear,
    unpack,
)

PACKED = "weight_packed"
SCALE = "weight_scale"
ZERO = "weight_zero_point"
GROUPS = "weight_g_idx"
SHAPE = "weight_shape"


def parts(linear: StoredLinear, stored: Collection[str]) -> dict[str, ExpectedTensor]:
    """See `Format`."""
    rows = linear.out_features
    columns = linear.in_features
    groups = linear.num_groups
    per_word = WORD_BITS // linear.quantisation.bits
    found = {
        PACKED: ExpectedTensor(("I32",), ((rows, -(-columns // per_word)),)),
        SCALE: ExpectedTensor(FLOATS, ((rows, groups),)),
        SHAPE: ExpectedTensor(("I64", "I32"), ((2,),)),
        ZERO: ExpectedTensor(("I32",), ((-(-rows // per_word), groups),)),
        GROUPS: ExpectedTensor(("I32", "I64"), ((columns,),)),
    }
    return {
        name: part for name, part in found.items() if name in stored or name not in (ZERO, GROUPS)
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
