"""RMSNorm in Triton: one program per vector, which is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.kernels.checks import expect, expect_that


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    new_residual,
    heads,
    x_row: tl.int64,
    x_head: tl.int64,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """`out[row, head] = rms_norm(x[row, head] (+ residual))`. Grid: (rows * heads,)."""
    program = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    live = n < N
    source = x + (program // heads) * x_row + (program % heads) * x_head + n
    value = tl.load(source, mask=live, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + program * N + n, mask=live, other=0.0).to(tl.float32)
        rounded = value.to(new_residual.dtype.element_ty)
        tl.store(new_residual + program * N + n, rounded, mask=live)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / N + eps)
    value = value * scale * tl.load(weight + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + program * N + n, value.to(out.dtype.element_ty), mask=live)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale every vector of the last dimension to unit root mean square, then by `weight`.

    Semantics: `weft.kernels.norm_cpu.rms_norm`.

    Args:
        x: [T, N] or [T, H, N]; rows and heads may be strided (a slice of a fused projection), vectors may not.
        weight: [N], dtype of x.
        eps: Added to the mean square.

    Returns:
        Like x, contiguous.

    Raises:
        ValueError: A shape, dtype or stride does not fit.
    """
    expect("weight", weight, (x.shape[-1],), x.dtype, x.device)
    expect_that("x", x.dim() in (2, 3) and x.stride(-1) == 1, "[T, N] or [T, H, N], consecutive vectors", x.shape)
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, out, out, heads, eps, add=False)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual stream, then normalise, in one pass.

    Semantics: `weft.kernels.norm_cpu.fused_add_rms_norm`. Neither input is changed.

    Raises:
        ValueError: A shape, dtype or stride does not fit.
    """
    expect("x", x, (None, weight.shape[0]))
    expect("residual", residual, x.shape, x.dtype, x.device)
    expect("weight", weight, (x.shape[1],), x.dtype, x.device)
    expect_that("residual", residual.is_contiguous() and x.stride(-1) == 1, "consecutive rows", residual.stride())
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = torch.empty_like(out)
    _launch(x, residual, weight, out, new_residual, 1, eps, add=True)
    return out, new_residual


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    new_residual: torch.Tensor,
    heads: int,
    eps: float,
    add: bool,
) -> None:
    if x.numel() == 0:
        return
    features = x.shape[-1]
    block = triton.next_power_of_2(features)
    rms_norm_kernel[(x.shape[0] * heads,)](
        x,
        residual,
        weight,
        out,
        new_residual,
        heads,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        eps,
        N=features,
        BLOCK=block,
        ADD=add,
        num_warps=min(16, max(1, block // 256)),
    )
