"""The gate of a feed-forward layer on the CPU with torch operators."""

from __future__ import annotations

import torch

from weft.kernels.silu_and_mul_reference import check_operands


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply each element by its gate.

    Semantics and arguments: `weft.kernels.silu_and_mul_reference.silu_and_mul`; the gate is rounded before the product.

    Raises:
        ValueError: The shape or stride does not fit.
    """
    check_operands(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return torch.nn.functional.silu(gate).mul_(up)
