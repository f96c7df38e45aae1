"""RMSNorm on the CPU, in float32 whatever the dtype, with fewer operations than torch's own takes."""

from __future__ import annotations

import functools

import torch

from weft.kernels.checks import expect


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

    Raises:
        ValueError: `weight` does not fit the last dimension of `x`.
    """
    expect("weight", weight, (x.shape[-1],), x.dtype, x.device)
    wide = x.float()
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scales = torch.addcmul(_constant(eps), norms, norms, value=1 / x.shape[-1]).rsqrt_()
    normed = torch.mul(wide, scales) if wide is x else wide.mul_(scales)
    return normed.mul_(weight).to(x.dtype)


@functools.cache
def _constant(value: float) -> torch.Tensor:
    return torch.full((1,), value)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual stream, then normalise.

    Semantics:
        new_residual = x + residual                      # rounded to the dtype of x
        normed = rms_norm(new_residual, weight, eps)

    Returns:
        (normed, new_residual), both like x. Neither input is changed.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    expect("residual", residual, x.shape, x.dtype, x.device)
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual
