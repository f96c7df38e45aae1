"""Norms and the gate on the CPU in C++ (`rows.cpp`). Semantics and operands: `manylora.kernels.plain.rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from manylora.kernels.native.library import native_function
from manylora.kernels.plain.rows import check_add_norm, check_norm, check_silu_and_mul


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `manylora.kernels.plain.rows.rms_norm`."""
    check_norm(x, weight)
    rows, heads, size = x.shape if x.dim() == 3 else (x.shape[0], 1, x.shape[1])
    out = torch.empty(x.shape, dtype=x.dtype)
    native_function("rms_norm", x.dtype, "iiiiiiifi")(
        x.data_ptr(),
        rows,
        x.stride(0),
        heads,
        x.stride(1),
        size,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
    )
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `manylora.kernels.plain.rows.fused_add_rms_norm`."""
    check_add_norm(x, residual, weight)
    rows, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype)
    new_residual = torch.empty(x.shape, dtype=x.dtype)
    native_function("add_rms_norm", x.dtype, "iiifiiii")(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        eps,
        rows,
        size,
        out.data_ptr(),
        new_residual.data_ptr(),
    )
    return out, new_residual


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `manylora.kernels.plain.rows.silu_and_mul`."""
    check_silu_and_mul(gate_up)
    rows, width = gate_up.shape
    out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
    native_function("silu_and_mul", gate_up.dtype, "iiii")(
        gate_up.data_ptr(), rows, width // 2, out.data_ptr()
    )
    return out
