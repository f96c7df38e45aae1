"""The oracle of RMSNorm, in float64."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weft.kernels.plain.rows.rms_norm` states what it computes."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weft.kernels.plain.rows.fused_add_rms_norm` states what it computes."""
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual
