"""The gate of a feed-forward layer (SwiGLU, arXiv:2002.05202) on the CPU with torch operators."""

from __future__ import annotations

import torch

from weft.kernels.checks import expect_that


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply each element by its gate.

    Semantics:
        out[t, n] = silu(gate_up[t, n]) * gate_up[t, N + n], silu(x) = x / (1 + exp(-x))

    Args:
        gate_up: [T, 2 * N], contiguous: the gates, then what they let through.

    Returns:
        [T, N], dtype of gate_up, rounded once; in this implementation the gate is rounded before the product, too.

    Raises:
        ValueError: The shape or stride does not fit.
    """
    check_operands(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return torch.nn.functional.silu(gate).mul_(up)


def check_operands(gate_up: torch.Tensor) -> None:
    """Check what a call to `silu_and_mul` was given.

    Raises:
        ValueError: The shape or stride does not fit.
    """
    fits = gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0
    expect_that("gate_up", fits, "two dimensions, the second even", list(gate_up.shape))
    expect_that("gate_up", gate_up.is_contiguous(), "contiguous rows", gate_up.stride())
