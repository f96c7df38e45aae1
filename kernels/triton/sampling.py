"""Sampling in Triton: one program per row, in passes over the vocabulary instead of a sort.

Logits are compared as integers of the same order. Top-k and top-p each are the largest bound that still leaves enough
tokens, or enough mass, at or above it; the bound is found bit by bit. The draw walks the tokens in order of their ids.
Every sum has a fixed order, so a row's token is repeatable and does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.checks import expect_that
from weft.kernels.plain.sampling import check_masks, check_operands, chosen_logprobs
from weft.kernels.sampling import RowSampling

MAX_TOP_K = 2**31 - 1


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
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, V, stride: tl.int64, BLOCK: tl.constexpr
):
    """Choose the token of one row. Grid: (B,)."""
    program = tl.program_id(0)
    row = logits + program * stride
    temperature = tl.load(temperatures + program)
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < V, other=float("-inf"))
        block_best = tl.max(x, axis=0)
        place = tl.min(tl.where((x == block_best) & (i < V), i, V), axis=0)
        token = tl.where(block_best > best, place, token)
        best = tl.maximum(best, block_best)
    if temperature > 0.0:
        token = _draw(row, V, temperature, best, token, top_ks, top_ps, min_ps, uniforms, program, BLOCK)
    tl.store(tokens + program, token.to(tl.int64))


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


def sample(logits: Tensor, sampling: Sequence[RowSampling]) -> Tensor:
    """Choose one token per row.

    Semantics and arguments: `weft.kernels.plain.sampling.sample`.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    check_operands(logits, sampling)
    expect_that("logits", logits.stride(1) == 1, "rows of consecutive elements", logits.stride())
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        numbers = [(row.temperature, row.top_p, row.min_p, row.uniform) for row in sampling]
        temperatures, top_ps, min_ps, uniforms = (
            torch.tensor(numbers, dtype=torch.float32).T.contiguous().to(logits.device)
        )
        top_ks = torch.tensor([min(max(row.top_k, 0), MAX_TOP_K) for row in sampling], dtype=torch.int32)
        filters = (top_ks.to(logits.device), top_ps, min_ps, uniforms)
        block = min(4096, triton.next_power_of_2(vocab_size))
        sample_kernel[(num_rows,)](
            logits, temperatures, *filters, tokens, vocab_size, logits.stride(0), BLOCK=block, num_warps=8
        )
    return tokens


@triton.jit
def mask_tokens_kernel(logits, rows, bits, V, W, stride: tl.int64, BLOCK: tl.constexpr):
    """Rule out the tokens of one block of one row. Grid: (n, blocks of V)."""
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + index.to(tl.int64) * W + token // 32, mask=token // 32 < W, other=0)
    is_ruled_out = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + tl.load(rows + index) * stride + token, float("-inf"), mask=is_ruled_out & (token < V))


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Rule out the tokens of some rows whose bits are not set.

    Semantics and arguments: `weft.kernels.plain.sampling.mask_tokens`.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check_masks(logits, rows, bits)
    block = min(1024, triton.next_power_of_2(logits.shape[1]))
    grid = (len(rows), triton.cdiv(logits.shape[1], block))
    mask_tokens_kernel[grid](logits, rows, bits, logits.shape[1], bits.shape[1], logits.stride(0), BLOCK=block)


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
