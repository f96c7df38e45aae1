"""RMSNorm on the CPU through torch's fused operator, which computes in float32 whatever the dtype."""

from __future__ import annotations

import torch
from torch.nn import functional

from weft.kernels.checks import expect


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale every vector of the last dimension to unit root mean square, then by `weight`.

    Semantics and arguments: `weft.kernels.norm_reference.rms_norm`.

    Raises:
        ValueError: `weight` does not fit the last dimension of `x`.
    """
    expect("weight", weight, (x.shape[-1],), x.dtype, x.device)
    return functional.rms_norm(x, weight.shape, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual stream, then normalise.

    Semantics and arguments: `weft.kernels.norm_reference.fused_add_rms_norm`. Neither input is changed.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    expect("residual", residual, x.shape, x.dtype, x.device)
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual
