"""The oracle of the gate of a feed-forward layer, in float64."""

from __future__ import annotations

import torch

from weft.kernels.silu_and_mul_cpu import check_operands


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`weft.kernels.silu_and_mul_cpu.silu_and_mul` states what it computes."""
    check_operands(gate_up)
    gate, up = gate_up.double().chunk(2, 1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
