"""The oracle of RMSNorm, in float64. For tests."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale every vector of the last dimension to unit root mean square, then by `weight` (arXiv:1910.07467).

    Semantics:
        y[..., n] = x[..., n] / sqrt(mean(x[..., :] ** 2) + eps) * weight[n]

    Args:
        x: [..., N].
        weight: [N], dtype of x.
        eps: Added to the mean square.

    Returns:
        Like x, rounded once.
    """
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual stream, then normalise.

    Semantics:
        new_residual = x + residual                      # rounded to the dtype of x
        normed = rms_norm(new_residual, weight, eps)

    Returns:
        (normed, new_residual), both like x.
    """
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual
