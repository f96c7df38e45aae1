"""Operations on single rows, in Triton. Semantics and operands: `manylora.kernels.plain.rows`."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.plain.rows import check_add_norm, check_embed, check_norm, check_silu_and_mul
from manylora.kernels.sgmv import LoraDelta
from manylora.kernels.triton.sgmv import COLUMN_BLOCK, add_delta, delta_operands, expand, tile_of

ROW_BLOCK = 1024
"""Elements of a row that one program copies."""
NORM_BLOCK_BYTES = 512
"""Bytes of a row that one program adds to the residual before the norm."""
SILU_WARPS = 8
"""Warps of a program. With 4, threads need more registers, and fewer programs run at once."""
MAX_NORM_ROWS = 16
"""Largest tile that one program normalises after all others have ended; more rows are worth a launch of their own."""


@triton.jit(do_not_specialize_on_alignment=["tokens", "sampled"])
def embed_kernel(
    tokens, sampled, table, out, table_row: tl.int64, N: tl.constexpr, BLOCK: tl.constexpr
):
    """`out[row] = table[token of the row]`. Grid: (rows, cdiv(N, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row).to(tl.int64)
    if sampled is not None:
        known = tl.load(sampled - 1 - token, mask=token < 0, other=0).to(tl.int64)
        token = tl.where(token < 0, tl.maximum(known, 0), token)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * N + n, tl.load(table + token * table_row + n, mask=n < N), mask=n < N)


def embed(tokens: Tensor, sampled: Tensor | None, table: Tensor) -> Tensor:
    """See `manylora.kernels.plain.rows.embed`."""
    check_embed(tokens, sampled, table)
    out = table.new_empty((len(tokens), table.shape[1]))
    if out.numel():
        grid = (len(tokens), triton.cdiv(table.shape[1], ROW_BLOCK))
        embed_kernel[grid](
            tokens, sampled, table, out, table.stride(0), N=table.shape[1], BLOCK=ROW_BLOCK
        )
    return out


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
    _store_normed(value, weight, out + program * N, eps, n, N)


@triton.jit
def _store_normed(value, weight, out, eps, n, N: tl.constexpr):
    """Normalise one vector, zero from N on, and store it.

    The order of the sum depends on the number of warps, so all kernels have the same number.
    """
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / N + eps)
    value = value * scale * tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, value.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["layer", "num_tokens"], do_not_specialize_on_alignment=["tiles"])
def expand_add_norm_kernel(
    y,
    residual,
    weight,
    out,
    new_residual,
    counters,
    delta,
    tiles,
    layer,
    num_tokens,
    eps,
    N: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    SITE: tl.constexpr,
):
    """Add the delta, then the residual, to one block of columns of one tile. Grid: (tiles, cdiv(N, BN)).

    The program of a tile that ends last normalises its rows, each as `rms_norm_kernel` does, and resets the counter.
    """
    slot, start, length, rows, live_m = tile_of(tiles, num_tokens, BM)
    if length <= 0:
        return
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    live_n = n < N
    live = live_m[:, None] & live_n[None, :]
    place = rows[:, None] * N + n[None, :]
    x = tl.load(y + place, mask=live, other=0.0)
    tile = slot, layer, rows, live_m, num_tokens
    x = add_delta(x, delta, tile, 0, n, live_n, N, BN, BM, SITE)
    value = x.to(tl.float32) + tl.load(residual + place, mask=live, other=0.0).to(tl.float32)
    tl.store(new_residual + place, value.to(new_residual.dtype.element_ty), mask=live)
    tl.debug_barrier()  # all elements of the program are stored before it counts itself
    counter = counters + tl.program_id(0)
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        c = tl.arange(0, BLOCK)
        for row in tl.range(start, start + length, num_stages=3):
            first = tl.cast(row, tl.int64) * N
            stored = tl.load(new_residual + first + c, mask=c < N, other=0.0, cache_modifier=".cg")
            _store_normed(stored.to(tl.float32), weight, out + first, eps, c, N)
        tl.store(counter, 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `manylora.kernels.plain.rows.rms_norm`."""
    check_norm(x, weight)
    return _norm(x, None, weight, eps)[0]


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, delta: LoraDelta | None = None
) -> tuple[Tensor, Tensor]:
    """See `manylora.kernels.plain.rows.fused_add_rms_norm`; the delta is added to x first. x may be changed then."""
    check_add_norm(x, residual, weight)
    if delta is None:
        return _norm(x, residual, weight, eps)
    if delta.operands.tiles.rows > MAX_NORM_ROWS:
        expand(x, delta)
        return _norm(x, residual, weight, eps)
    out = torch.empty_like(x)
    new_residual = torch.empty_like(x)
    num_tiles, operands, constants = delta_operands(delta, len(x))
    if x.numel():
        columns = NORM_BLOCK_BYTES // x.element_size()
        counters = _counters(x.device, triton.next_power_of_2(max(num_tiles, 256)))
        expand_add_norm_kernel[(num_tiles, triton.cdiv(x.shape[1], columns))](
            x,
            residual,
            weight,
            out,
            new_residual,
            counters,
            *operands,
            eps,
            **{**_norm_sizes(x.shape[1]), **constants, "BN": columns, "num_stages": 2},
        )
    return out, new_residual


@functools.cache
def _counters(device: torch.device, capacity: int) -> Tensor:
    """Number of ended programs of each tile, 0 before and after each launch. Kept, because captured graphs use it."""
    return torch.zeros(capacity, dtype=torch.int32, device=device)


def _norm_sizes(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"N": size, "BLOCK": block, "num_warps": min(8, max(1, block // 256))}


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = out if residual is None else torch.empty_like(out)
    if x.numel():
        heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        tensors = (x, x if residual is None else residual, weight, out, new_residual)
        rms_norm_kernel[(x.shape[0] * heads,)](
            *tensors,
            heads,
            x.stride(0),
            head_stride,
            eps,
            ADD=residual is not None,
            **_norm_sizes(x.shape[-1]),
        )
    return out, new_residual


@triton.jit(do_not_specialize=["layer", "num_tokens"], do_not_specialize_on_alignment=["tiles"])
def silu_and_mul_kernel(
    gate_up,
    out,
    delta,
    tiles,
    layer,
    num_tokens,
    N: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SITE: tl.constexpr,
):
    """`out[row, n] = silu(gate_up[row, n]) * gate_up[row, N + n]`, deltas added first. Grid: (tiles, cdiv(N, BN))."""
    slot, _, length, rows, live_m = tile_of(tiles, num_tokens, BM)
    if length <= 0:
        return
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    live_n = n < N
    live = live_m[:, None] & live_n[None, :]
    place = gate_up + rows[:, None] * (2 * N) + n[None, :]
    gate = tl.load(place, mask=live, other=0.0)
    up = tl.load(place + N, mask=live, other=0.0)
    if delta is not None:
        tile = slot, layer, rows, live_m, num_tokens
        gate = add_delta(gate, delta, tile, 0, n, live_n, N, BN, BM, SITE)
        up = add_delta(up, delta, tile, 1, n, live_n, N, BN, BM, SITE)
    wide = gate.to(tl.float32)
    result = wide * tl.sigmoid(wide) * up.to(tl.float32)
    tl.store(out + rows[:, None] * N + n[None, :], result.to(out.dtype.element_ty), mask=live)


def silu_and_mul(gate_up: Tensor, delta: LoraDelta | None = None) -> Tensor:
    """See `manylora.kernels.plain.rows.silu_and_mul`; the delta is added to gate_up first."""
    check_silu_and_mul(gate_up)
    rows = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    num_tiles, operands, constants = delta_operands(delta, rows)
    if out.numel():
        silu_and_mul_kernel[(num_tiles, triton.cdiv(width, COLUMN_BLOCK))](
            gate_up,
            out,
            *operands,
            **{
                **constants,
                "N": width,
                "BN": COLUMN_BLOCK,
                "num_warps": SILU_WARPS,
                "num_stages": 2,
            },
        )
    return out
