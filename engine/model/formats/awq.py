"""AWQ's GEMM layout: 4 bits in words along the outputs, a scale and a zero point per output and group of inputs."""

from __future__ import annotations

from collections.abc import Collection

import torch

from manylora.engine.model.formats.stored import (
    FLOATS,
    WORDS,
    ExpectedTensor,
    StoredLinear,
    shaped,
    unpack,
)

BITS = 4
PER_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of the 4 bits of its first, second, ... output."""


def parts(linear: StoredLinear, _stored: Collection[str]) -> dict[str, ExpectedTensor]:
    """See `Format`."""
    rows = linear.out_features
    groups = linear.num_groups
    return {
        "qweight": shaped(WORDS, linear.in_features, rows // PER_WORD),
        "qzeros": shaped(WORDS, groups, rows // PER_WORD),
        "scales": shaped(FLOATS, groups, rows),
    }


def weight(linear: StoredLinear) -> torch.Tensor:
    """See `Format`."""
    return linear.by_groups(
        _unpack(linear["qweight"]), _unpack(linear["qzeros"]), linear["scales"].T
    )


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack words to [outputs, inputs or groups]."""
    return unpack(packed, BITS).view(len(packed), -1, PER_WORD)[..., PLACES].flatten(1).T
