"""The gate of a feed-forward layer in Triton: one pass instead of two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.kernels.silu_and_mul_cpu import check_operands

BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(gate_up, out, N: tl.constexpr, BLOCK: tl.constexpr):
    """`out[row, n] = silu(gate_up[row, n]) * gate_up[row, N + n]`. Grid: (rows, cdiv(N, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = n < N
    gate = tl.load(gate_up + row * 2 * N + n, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=live)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply each element by its gate.

    Semantics and arguments: `weft.kernels.silu_and_mul_cpu.silu_and_mul`.

    Raises:
        ValueError: The shape or stride does not fit.
    """
    check_operands(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    if out.numel():
        silu_and_mul_kernel[(rows, triton.cdiv(width, BLOCK))](gate_up, out, N=width, BLOCK=BLOCK)
    return out
