"""Sampling in Triton: one program per row, in passes over the vocabulary instead of a sort.

Logits are compared as integers of the same order. Top-k and top-p each are the largest bound that still leaves enough
tokens, or enough mass, at or above it; the bound is found bit by bit. The draw walks the tokens in order of their ids.
Every sum has a fixed order, so a row's token is repeatable and does not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.checks import expect_that
from weft.kernels.plain.sampling import check_masks, check_operands, chosen_logprobs
from weft.kernels.sampling import MAX_LOGIT, NON_FINITE, NOTHING_LEFT, SamplingColumns


@triton.jit
def _ordered(z):
    # Bits of a float as an integer of the same order; both zeros become one.
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load_scaled(row, start, V, temperature, BLOCK: tl.constexpr):
    i = start + tl.arange(0, BLOCK)
    return tl.load(row + i, mask=i < V, other=float("-inf")) / temperature


@triton.jit
def _tail(row, V, temperature, top, bound, BLOCK: tl.constexpr):
    # Number and mass of the tokens whose ordered logit reaches the bound.
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        z = _load_scaled(row, start, V, temperature, BLOCK)
        reached = (_ordered(z).to(tl.int64) >= bound) & (start + tl.arange(0, BLOCK) < V)
        count += reached.to(tl.int32)
        mass += tl.where(reached, tl.exp(z - top), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def sample_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    tokens,
    V,
    stride: tl.int64,
    MAX_LOGIT: tl.constexpr,
    NON_FINITE: tl.constexpr,
    NOTHING_LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose the token of one row. Grid: (B,)."""
    program = tl.program_id(0)
    row = logits + program * stride
    temperature = tl.load(temperatures + program)
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    num_nan = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < V, other=float("-inf"))
        block_best = tl.max(x, axis=0)  # ignores NaN
        num_nan += tl.sum((x != x).to(tl.int32), axis=0)
        place = tl.min(tl.where((x == block_best) & (i < V), i, V), axis=0)
        token = tl.where(block_best > best, place, token)
        best = tl.maximum(best, block_best)
    is_sound = (num_nan == 0) & (tl.abs(best) < MAX_LOGIT)
    token = tl.where(is_sound, token, tl.where((best == float("-inf")) & (num_nan == 0), NOTHING_LEFT, NON_FINITE))
    if is_sound & (temperature > 0.0):
        token = _draw(row, V, temperature, best, token, top_ks, top_ps, min_ps, uniforms, program, BLOCK)
    tl.store(tokens + program, token)


@triton.jit
def _draw(row, V, temperature, best, likeliest, top_ks, top_ps, min_ps, uniforms, program, BLOCK: tl.constexpr):
    top_k = tl.load(top_ks + program)
    top_p = tl.load(top_ps + program)
    min_p = tl.load(min_ps + program)
    top = best / temperature
    ceiling = _ordered(top).to(tl.int64)
    bound = tl.full((), -2147483648, tl.int64)
    if (top_k > 0) & (top_k < V):
        high = ceiling
        while bound < high:
            middle = bound + (high - bound + 1) // 2
            count, _ = _tail(row, V, temperature, top, middle, BLOCK)
            bound = tl.where(count >= top_k, middle, bound)
            high = tl.where(count >= top_k, high, middle - 1)
    if top_p < 1.0:
        _, kept = _tail(row, V, temperature, top, bound, BLOCK)
        high = ceiling
        while bound < high:
            middle = bound + (high - bound + 1) // 2
            _, mass = _tail(row, V, temperature, top, middle, BLOCK)
            enough = mass >= top_p * kept
            bound = tl.where(enough, middle, bound)
            high = tl.where(enough, high, middle - 1)
    if min_p > 0.0:
        bound = tl.maximum(bound, _ordered(top + tl.log(min_p)).to(tl.int64))
    _, total = _tail(row, V, temperature, top, bound, BLOCK)
    target = tl.load(uniforms + program) * total
    before = tl.full((), 0.0, tl.float32)
    found = V + tl.full((), 0, tl.int32)
    last = likeliest
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = _load_scaled(row, start, V, temperature, BLOCK)
        weight = tl.where((_ordered(z).to(tl.int64) >= bound) & (i < V), tl.exp(z - top), 0.0)
        crossed = (before + tl.cumsum(weight, axis=0) > target) & (weight > 0.0)
        found = tl.minimum(found, tl.min(tl.where(crossed, i, V), axis=0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, i, 0), axis=0))
        before += tl.sum(weight, axis=0)
    # Rounding may put the target at the very end: then it is the last token with any weight.
    return tl.where(found < V, found, last)


def sample(logits: Tensor, columns: SamplingColumns, out: Tensor | None = None) -> Tensor:
    """Choose one token per row.

    Semantics, arguments and result: `weft.kernels.plain.sampling.sample`.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check_operands(logits, columns, out)
    expect_that("logits", logits.stride(1) == 1, "rows of consecutive elements", logits.stride())
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device) if out is None else out
    if num_rows:
        filters = (columns.top_k, columns.top_p, columns.min_p, columns.uniform)
        block = min(4096, triton.next_power_of_2(vocab_size))
        sample_kernel[(num_rows,)](
            logits,
            columns.temperature,
            *filters,
            tokens,
            vocab_size,
            logits.stride(0),
            MAX_LOGIT,
            NON_FINITE,
            NOTHING_LEFT,
            BLOCK=block,
            num_warps=8,
        )
    return tokens


@triton.jit
def mask_tokens_kernel(logits, rows, bits, V, W, stride: tl.int64, MAX_LOGIT: tl.constexpr, BLOCK: tl.constexpr):
    """Rule out the tokens of one block of one row. Grid: (n, blocks of V)."""
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + index.to(tl.int64) * W + token // 32, mask=token // 32 < W, other=0)
    is_ruled_out = (((word >> (token % 32)) & 1) == 0) & (token < V)
    places = logits + tl.load(rows + index) * stride + token
    # NaN and what is too large stay: `sample` is to see them.
    is_number = tl.load(places, mask=is_ruled_out, other=0.0) < MAX_LOGIT
    tl.store(places, float("-inf"), mask=is_ruled_out & is_number)


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Rule out the tokens of some rows whose bits are not set.

    Semantics and arguments: `weft.kernels.plain.sampling.mask_tokens`.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check_masks(logits, rows, bits)
    block = min(1024, triton.next_power_of_2(logits.shape[1]))
    grid = (len(rows), triton.cdiv(logits.shape[1], block))
    mask_tokens_kernel[grid](
        logits, rows, bits, logits.shape[1], bits.shape[1], logits.stride(0), MAX_LOGIT, BLOCK=block
    )


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of the unfiltered distribution, with torch operators: it is rare, and no step waits for it.

    Semantics, arguments and results: `weft.kernels.plain.sampling.logprobs`, but which of several equals at the
    end of the list are reported is left to torch.topk.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    chosen, rank, total = chosen_logprobs(logits, token_ids)
    ids = logits.topk(num_top, dim=-1).indices.sort(-1).values
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return chosen, rank, ids.gather(1, order.indices), order.values - total[:, None]
