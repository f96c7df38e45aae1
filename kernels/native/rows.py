"""Operations that pass over rows once, on the CPU in C++ (`native/rows.cpp`). They compute in float32."""

from __future__ import annotations

import torch

from weft.kernels.checks import expect, expect_that
from weft.kernels.kv_slots import KvSlots
from weft.kernels.native.library import native_function
from weft.kernels.plain import rows as rows_cpu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale every vector of the last dimension to unit root mean square, then by `weight`.

    Semantics and arguments: `weft.kernels.plain.rows.rms_norm`; x has two or three dimensions.

    Raises:
        ValueError: `weight` does not fit the last dimension of `x`, or that is not contiguous.
    """
    expect_that("x", x.dim() in (2, 3), "two or three dimensions", list(x.shape))
    rows, heads, size = x.shape if x.dim() == 3 else (x.shape[0], 1, x.shape[1])
    _expect_weight(weight, size, x)
    expect_that("x", x.stride(-1) == 1, "consecutive elements", x.stride())
    out = torch.empty(x.shape, dtype=x.dtype)
    native_function("rms_norm", x.dtype, "iiiiiiifi")(
        x.data_ptr(), rows, x.stride(0), heads, x.stride(1), size, weight.data_ptr(), eps, out.data_ptr()
    )
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual stream, then normalise.

    Semantics and arguments: `weft.kernels.plain.rows.fused_add_rms_norm`. Neither input is changed.

    Raises:
        ValueError: A shape, dtype or device does not fit, or a tensor is not contiguous.
    """
    rows, size = x.shape
    expect("residual", residual, x.shape, x.dtype, x.device)
    _expect_weight(weight, size, x)
    expect_that("x", x.is_contiguous(), "contiguous rows", x.stride())
    expect_that("residual", residual.is_contiguous(), "contiguous rows", residual.stride())
    out, new_residual = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    native_function("add_rms_norm", x.dtype, "iiifiiii")(
        *(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, rows, size),
        *(out.data_ptr(), new_residual.data_ptr()),
    )
    return out, new_residual


def _expect_weight(weight: torch.Tensor, size: int, x: torch.Tensor) -> None:
    expect("weight", weight, (size,), x.dtype, x.device)
    expect_that("weight", weight.stride(0) == 1, "consecutive elements", weight.stride())


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate queries and keys by their positions, in place.

    Semantics and arguments: `weft.kernels.plain.rows.rope`.

    Raises:
        ValueError: A shape, dtype or stride does not fit.
    """
    rows_cpu.check_rope(q, k, cos, sin)
    expect_that("q", q.stride(2) == 1 == k.stride(2), "consecutive elements", q.stride())
    expect_that("cos", cos.is_contiguous() and sin.is_contiguous(), "contiguous rows", cos.stride())
    native_function("rope", q.dtype, "i" * 12)(
        *(q.data_ptr(), q.stride(0), q.stride(1), q.shape[1]),
        *(k.data_ptr(), k.stride(0), k.stride(1), k.shape[1]),
        *(q.shape[0], q.shape[2], cos.data_ptr(), sin.data_ptr()),
    )


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The gate of a feed-forward layer.

    Semantics and arguments: `weft.kernels.plain.rows.silu_and_mul`.

    Raises:
        ValueError: The shape or stride does not fit.
    """
    rows_cpu.check_silu_and_mul(gate_up)
    rows, width = gate_up.shape
    out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
    native_function("silu_and_mul", gate_up.dtype, "iiii")(gate_up.data_ptr(), rows, width // 2, out.data_ptr())
    return out


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slot_mapping: KvSlots
) -> None:
    """Store the keys and values of a step's tokens in their pages.

    Semantics and arguments: `weft.kernels.plain.rows.kv_write`. Pages of keys and values must have the same
    strides.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    rows_cpu.check_kv_write(k, v, k_pages, v_pages, slot_mapping)
    expect_that("k", k.stride(2) == 1 == v.stride(2), "consecutive elements", k.stride())
    expect_that("v_pages", v_pages.stride() == k_pages.stride(), f"strides {k_pages.stride()}", v_pages.stride())
    rows, heads, head_dim = k.shape
    native_function("kv_write", k.dtype, "i" * 16)(
        *(k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1), rows, heads, head_dim),
        *(k_pages.data_ptr(), v_pages.data_ptr(), k_pages.stride(0), k_pages.stride(1), k_pages.stride(2)),
        *(slot_mapping.mapping.data_ptr(), k_pages.shape[2]),
    )
