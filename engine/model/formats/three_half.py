"""3.5 bits: each weight is one of 11 levels, two share 7 bits, and 64 inputs of an output have a minimum and a step.

The levels and blocks are Inferflow's. Eight pairs take seven bytes: the low bits of a byte are the code of a pair,
`first + 11 * second`, and the high bits of all seven are the code of the eighth pair. A block has four groups of eight
pairs. Their bytes i are neighbours, so that one word of 32 bits has four codes. With minimum and step in float16, a
block takes 32 bytes, which is 4 bits a weight.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from manylora.engine.model.formats.stored import OCTETS, ExpectedTensor, StoredLinear, shaped

BLOCK = 64
LEVELS = 11
GROUPS = 4
BYTES = 7
"""Bytes of a group of pairs; a block has `GROUPS` of them."""
PACKED = "weight_packed"
MINIMUM = "weight_minimum"
STEP = "weight_step"


def parts(linear: StoredLinear, _stored: Collection[str]) -> dict[str, ExpectedTensor]:
    """See `Format`."""
    blocks = -(-linear.in_features // BLOCK)
    floats = shaped(("F16",), linear.out_features, blocks)
    packed = shaped(OCTETS, linear.out_features, blocks * BYTES * GROUPS)
    return {PACKED: packed, MINIMUM: floats, STEP: floats}


def weight(linear: StoredLinear) -> torch.Tensor:
    """See `Format`."""
    levels = unpack(linear[PACKED])
    if levels.max() >= LEVELS:
        raise linear.error(PACKED, f"has levels above {LEVELS - 1}")
    values = levels * linear[STEP].float().unsqueeze(-1) + linear[MINIMUM].float().unsqueeze(-1)
    return values.flatten(1)[:, : linear.in_features]


def encoded(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Encode a weight, float32 [out_features, in_features], to its parts. The last input fills up the last block."""
    padding = -weight.shape[1] % BLOCK
    blocks = torch.cat((weight, weight[:, -1:].expand(-1, padding)), 1).view(len(weight), -1, BLOCK)
    low, high = blocks.aminmax(dim=-1)
    minimum = low.half()
    step = ((high - low) / (LEVELS - 1)).half()
    step = step.clamp(min=torch.finfo(torch.float16).tiny)  # a block of equal values
    levels = ((blocks - minimum.float().unsqueeze(-1)) / step.float().unsqueeze(-1) + 0.5).floor()
    return {PACKED: pack(levels.clamp(0, LEVELS - 1).to(torch.uint8)), MINIMUM: minimum, STEP: step}


def pack(levels: torch.Tensor) -> torch.Tensor:
    """Pack levels [rows, blocks, 64] to bytes [rows, blocks * 28], uint8."""
    codes = (levels[..., 0::2] + LEVELS * levels[..., 1::2]).view(
        *levels.shape[:2], GROUPS, BYTES + 1
    )
    bits = torch.arange(BYTES, dtype=torch.uint8)
    high = (codes[..., BYTES:] >> bits) & 1
    return (codes[..., :BYTES] | high << 7).transpose(-1, -2).flatten(1)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes [rows, blocks * 28] to levels [rows, blocks, 64], uint8."""
    octets = packed.view(len(packed), -1, BYTES, GROUPS)
    last = torch.stack([(octets[:, :, bit] >> 7) << bit for bit in range(BYTES)]).sum(
        0, dtype=torch.uint8
    )
    codes = torch.cat((octets & 127, last.unsqueeze(2)), 2).transpose(-1, -2).int()
    # A table of pairs of bytes is used, because a look-up is faster than a division.
    code = torch.arange(128, dtype=torch.uint8)
    pairs = torch.stack((code % LEVELS, code // LEVELS), 1).view(torch.int16).flatten()
    return pairs.index_select(0, codes.flatten()).view(torch.uint8).view(len(packed), -1, BLOCK)
