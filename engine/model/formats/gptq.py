"""GPTQ: 4 or 8 bits in words along the inputs, a scale and a zero point per output and group of inputs.

Version 1 stores zero points less 1. The version in files is not always right, so the values are examined first:
symmetric ones have the same zero point everywhere. `Quantisation.variant` is the config's version, gptq or gptq_v2.
"""

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

ORDER = "g_idx"
BIAS = "bias"


def parts(linear: StoredLinear, _stored: Collection[str]) -> dict[str, ExpectedTensor]:
    """See `Format`."""
    rows = linear.out_features
    columns = linear.in_features
    groups = linear.num_groups
    per_word = WORD_BITS // linear.quantisation.bits
    return {
        "qweight": shaped(WORDS, -(-columns // per_word), rows),
        "qzeros": shaped(WORDS, groups, -(-rows // per_word)),
        "scales": shaped(FLOATS, groups, rows),
        ORDER: shaped(WHOLE, columns, is_optional=True),
        # Some tools write a bias of zeros for a model without biases.
        BIAS: shaped(FLOATS, rows, is_optional=True),
    }


def weight(linear: StoredLinear) -> torch.Tensor:
    """See `Format`."""
    if BIAS in linear.tensors and linear[BIAS].any():
        raise linear.error(BIAS, "must be zeros: the model has no bias there")
    bits = linear.quantisation.bits
    values = unpack(linear["qweight"].T, bits)[:, : linear.in_features]
    zeros = unpack(linear["qzeros"], bits)[:, : linear.out_features].T
    middle = 1 << (bits - 1)
    is_first = linear.quantisation.variant == "gptq"
    if (zeros == zeros[0, 0]).all() and zeros[0, 0] in (middle - 1, middle):
        is_first = bool(zeros[0, 0] == middle - 1)
    if is_first:
        zeros = (zeros + 1) & (2 * middle - 1)
    return linear.by_groups(values, zeros, linear["scales"].T, ORDER)
