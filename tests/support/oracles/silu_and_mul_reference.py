"""The oracle of the gate of a feed-forward layer, in float64."""

from __future__ import annotations

import torch

from weft.kernels.plain.rows import check_silu_and_mul


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`weft.kernels.plain.rows.silu_and_mul` states what it computes."""
    check_silu_and_mul(gate_up)
    gate, up = gate_up.double().chunk(2, 1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
