"""Sampling in Triton: several programs per row, in passes over the vocabulary instead of a sort.

Each filter keeps the tokens whose logit, divided by the temperature, reaches a bound. The bound of top-k and that of
top-p are each found in two passes. The first counts the tokens, or sums their mass, above each of EDGES edges that
divide the range of the logits evenly. The second collects the tokens between the two edges around the bound, which are
few, and halves the interval until the bound is exact. The draw walks the kept tokens in order of their ids.

In each pass the program of a row that finishes last merges the parts of all, in a fixed order. Where the order of
tokens is not fixed, sums are of integers. So a row's token is repeatable and does not depend on the batch. The launches
are always the same: on the device, the programs of a row skip the passes that it does not need.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels import sampling
from weft.kernels.checks import expect_that
from weft.kernels.plain.sampling import check_masks, check_operands, chosen_logprobs
from weft.kernels.sampling import SamplingColumns

MAX_LOGIT = tl.constexpr(sampling.MAX_LOGIT)
NON_FINITE = tl.constexpr(sampling.NON_FINITE)
NOTHING_LEFT = tl.constexpr(sampling.NOTHING_LEFT)
CHUNK = 4096
"""Tokens per program."""
EDGES = tl.constexpr(32)
TILE = 128
"""Tokens that a program compares with all edges at once."""
BLOCK = 1024
"""Tokens between two edges that the last program of a row compares at once."""
WARPS = 8
RANGE = tl.constexpr(32.0)
"""Filters look no further below the largest logit: a million tokens there have less than 2e-8 of the mass."""
FIXED = tl.constexpr(2.0**40)
"""The mass of the likeliest token where masses are integers; those of 2**22 tokens fit in 63 bits."""
LEAST_ROWS = 1024
"""Rows for which counters are made at once."""
STATE = tl.constexpr(6)
"""Numbers kept of a row between passes: its largest and its least logit; the lower and the upper edge around the bound,
the count or mass above both, and the count or mass that is to be kept."""
COLUMNS = ("temperatures", "limits", "min_ps", "uniforms", "sampled")
"""Operands that may lie at any address: they do not make a variant of a kernel."""


@triton.jit
def _ordered(z):
    # Bits of a float as an integer of the same order; both zeros become one.
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _arrives_last(counter):
    # Whether the other programs of this row are done; then what they stored can be read past L1, and the counter is 0.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _load_scaled(logits, row, stride, first, V, temperature, SIZE: tl.constexpr):
    i = first + tl.arange(0, SIZE)
    return tl.load(logits + row * stride + i, mask=i < V, other=float("-inf")) / temperature


@triton.jit
def _is_drawn(sampled, temperatures, row):
    return (tl.load(temperatures + row) > 0.0) & (tl.load(sampled + row) >= 0)


@triton.jit
def _needs_bound(sampled, temperatures, limits, row, V, MASS: tl.constexpr):
    # Whether top-p (MASS) or top-k rules anything out in this row.
    limit = tl.load(limits + row)
    is_needed = limit < 1.0 if MASS else (limit > 0) & (limit < V)
    return is_needed & _is_drawn(sampled, temperatures, row)


@triton.jit
def _fixed(z, top, bound):
    # Mass of the tokens that reach a bound, as an integer.
    return tl.where(_ordered(z) >= bound, (tl.exp(z - top) * FIXED).to(tl.int64), 0)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def stats_kernel(
    logits,
    sampled,
    state,
    bounds,
    counters,
    partial_max,
    partial_min,
    partial_place,
    V,
    stride: tl.int64,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Largest and least logit of a row, and the code or the likeliest token. Grid of all: (B, chunks of V)."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + i, mask=i < V, other=float("-inf"))
    is_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    x = tl.where(x == x, x, float("-inf"))
    largest = tl.max(x, axis=0)
    part = row * tl.num_programs(1) + chunk
    tl.store(partial_max + part, tl.where(is_nan, float("nan"), largest))
    tl.store(partial_min + part, tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0))
    tl.store(partial_place + part, tl.min(tl.where((x == largest) & (i < V), i, V), axis=0))
    if _arrives_last(counters + row):
        c = tl.arange(0, CHUNKS)
        parts, is_part = row * tl.num_programs(1) + c, c < tl.num_programs(1)
        maxima = tl.load(partial_max + parts, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        minima = tl.load(partial_min + parts, mask=is_part, other=float("inf"), cache_modifier=".cg")
        places = tl.load(partial_place + parts, mask=is_part, other=V, cache_modifier=".cg")
        is_nan = tl.max((maxima != maxima).to(tl.int32), axis=0) > 0
        maxima = tl.where(maxima == maxima, maxima, float("-inf"))
        best = tl.max(maxima, axis=0)
        token = tl.min(tl.where(maxima == best, places, V), axis=0)
        code = tl.where((best == float("-inf")) & (is_nan == 0), NOTHING_LEFT, NON_FINITE)
        tl.store(sampled + row, tl.where((is_nan == 0) & (tl.abs(best) < MAX_LOGIT), token, code))
        tl.store(state + row * STATE, best)
        tl.store(state + row * STATE + 1, tl.min(minima, axis=0))
        tl.store(bounds + row, -2147483648)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def edges_kernel(
    logits,
    temperatures,
    limits,
    sampled,
    state,
    bounds,
    counters,
    partial_tails,
    V,
    stride: tl.int64,
    MASS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Find two neighbouring edges around a bound, and the number or mass of the tokens above both."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if _needs_bound(sampled, temperatures, limits, row, V, MASS):
        temperature, kept = tl.load(temperatures + row), tl.load(bounds + row)
        top = tl.load(state + row * STATE) / temperature
        least = tl.maximum(tl.load(state + row * STATE + 1) / temperature, top - RANGE)
        e = tl.arange(0, EDGES)
        edges = tl.where(e < EDGES - 1, tl.maximum(top - (top - least) / EDGES * (e + 1), least), least)
        tails = tl.zeros((EDGES, TILE), tl.float32)
        for start in range(0, CHUNK, TILE):
            z = _load_scaled(logits, row, stride, chunk * CHUNK + start, V, temperature, TILE)
            weight = tl.where(_ordered(z) >= kept, tl.exp(z - top) if MASS else 1.0, 0.0)
            tails += tl.where(z[None, :] >= edges[:, None], weight[None, :], 0.0)
        part = row * tl.num_programs(1) + chunk
        tl.store(partial_tails + part * EDGES + e, tl.sum(tails, axis=1))
        if _arrives_last(counters + row):
            c = tl.arange(0, CHUNKS)[:, None]
            parts = (row * tl.num_programs(1) + c) * EDGES + e[None, :]
            found = tl.load(partial_tails + parts, mask=c < tl.num_programs(1), other=0.0, cache_modifier=".cg")
            tail = tl.sum(found, axis=0)
            total = tl.sum(tl.where(e == EDGES - 1, tail, 0.0), axis=0)
            need = tl.load(limits + row) * (total if MASS else 1.0)
            edge = tl.min(tl.where(tail >= need, e, EDGES), axis=0)  # EDGES: all that count are kept
            lower = tl.sum(tl.where(e == tl.minimum(edge, EDGES - 1), edges, 0.0), axis=0)
            upper = tl.sum(tl.where(e == edge - 1, edges, 0.0), axis=0)
            tl.store(state + row * STATE + 2, lower)
            tl.store(state + row * STATE + 3, tl.where(edge == 0, float("inf"), upper))
            tl.store(state + row * STATE + 4, tl.sum(tl.where(e == edge - 1, tail, 0.0), axis=0))
            tl.store(state + row * STATE + 5, need)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def bound_kernel(
    logits,
    temperatures,
    limits,
    sampled,
    state,
    bounds,
    counters,
    cursors,
    partial_values,
    V,
    stride: tl.int64,
    MASS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the largest bound between two edges that keeps enough."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if _needs_bound(sampled, temperatures, limits, row, V, MASS):
        temperature, kept = tl.load(temperatures + row), tl.load(bounds + row)
        top = tl.load(state + row * STATE) / temperature
        lower, upper = tl.load(state + row * STATE + 2), tl.load(state + row * STATE + 3)
        z = _load_scaled(logits, row, stride, chunk * CHUNK, V, temperature, CHUNK)
        is_between = (z >= lower) & (z < upper) & (_ordered(z) >= kept)
        place = tl.cumsum(is_between.to(tl.int32), axis=0) - 1
        first = tl.atomic_add(cursors + row, tl.sum(is_between.to(tl.int32), axis=0), sem="relaxed")
        values = partial_values + row.to(tl.int64) * V
        tl.store(values + first + place, z, mask=is_between)
        if _arrives_last(counters + row):
            scale = FIXED if MASS else 1.0
            above = (tl.load(state + row * STATE + 4) * scale).to(tl.int64)
            need = (tl.load(state + row * STATE + 5) * scale).to(tl.int64)
            low = _ordered(lower).to(tl.int64)
            high = tl.minimum(_ordered(upper).to(tl.int64) - 1, _ordered(top).to(tl.int64))
            num_values = tl.load(cursors + row, cache_modifier=".cg")
            while low < high:
                middle = low + (high - low + 1) // 2
                tail = tl.zeros((BLOCK,), tl.int64)
                for start in range(0, num_values, BLOCK):
                    j = start + tl.arange(0, BLOCK)
                    value = tl.load(values + j, mask=j < num_values, other=float("-inf"), cache_modifier=".cg")
                    tail += _fixed(value, top, middle) if MASS else (_ordered(value) >= middle).to(tl.int64)
                is_enough = above + tl.sum(tail, axis=0) >= need
                low = tl.where(is_enough, middle, low)
                high = tl.where(is_enough, high, middle - 1)
            tl.store(bounds + row, low.to(tl.int32))
            tl.store(cursors + row, 0)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def draw_kernel(
    logits,
    temperatures,
    min_ps,
    uniforms,
    sampled,
    state,
    bounds,
    counters,
    masses,
    V,
    stride: tl.int64,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Draw from the tokens that reach a row's bound and min-p."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if _is_drawn(sampled, temperatures, row):
        temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
        top = tl.load(state + row * STATE) / temperature
        bound = tl.load(bounds + row)
        if min_p > 0.0:
            bound = tl.maximum(bound, _ordered(top + tl.log(min_p)))
        z = _load_scaled(logits, row, stride, chunk * CHUNK, V, temperature, CHUNK)
        tl.store(masses + row * tl.num_programs(1) + chunk, tl.sum(_fixed(z, top, bound), axis=0))
        if _arrives_last(counters + row):
            c = tl.arange(0, CHUNKS)
            parts = masses + row * tl.num_programs(1) + c
            mass = tl.load(parts, mask=c < tl.num_programs(1), other=0, cache_modifier=".cg")
            total = tl.sum(mass, axis=0)
            # Of a draw all 24 bits count; their product with the total has too many for 64.
            draw = tl.minimum((tl.load(uniforms + row) * 16777216.0).to(tl.int64), 16777215)
            target = (total >> 24) * draw + (((total & 0xFFFFFF) * draw) >> 24)
            chosen = tl.sum((tl.cumsum(mass, axis=0) <= target).to(tl.int32), axis=0)
            before = tl.sum(tl.where(c < chosen, mass, 0), axis=0)
            i = chosen * CHUNK + tl.arange(0, CHUNK)
            z = _load_scaled(logits, row, stride, chosen * CHUNK, V, temperature, CHUNK)
            is_above = before + tl.cumsum(_fixed(z, top, bound), axis=0) > target
            tl.store(sampled + row, tl.min(tl.where(is_above, i, V - 1), axis=0))


@functools.cache
def _counters(device: torch.device, num_rows: int) -> Tensor:
    """[2, num_rows], int32: zeros, as each launch leaves them. Captured graphs hold their address, so they stay."""
    return torch.zeros((2, num_rows), dtype=torch.int32, device=device)


def sample(logits: Tensor, columns: SamplingColumns, out: Tensor | None = None) -> Tensor:
    """Choose one token per row.

    Semantics, arguments and result: `weft.kernels.plain.sampling.sample`. Calls on one device must not overlap.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check_operands(logits, columns, out)
    expect_that("logits", logits.stride(1) == 1, "rows of consecutive elements", logits.stride())
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device) if out is None else out
    if not num_rows:
        return tokens
    chunk = min(CHUNK, max(TILE, triton.next_power_of_2(vocab_size)))
    tile = TILE if logits.is_cuda else chunk  # the interpreter takes as long for a large one as for a small one
    grid = (num_rows, triton.cdiv(vocab_size, chunk))
    size = {"CHUNK": chunk, "num_warps": WARPS}
    chunks = {**size, "CHUNKS": triton.next_power_of_2(grid[1])}
    counters, cursors = _counters(logits.device, max(LEAST_ROWS, triton.next_power_of_2(num_rows)))
    state, tails = logits.new_empty(num_rows, STATE.value), logits.new_empty(*grid, EDGES.value)
    maxima, minima = logits.new_empty(grid), logits.new_empty(grid)
    places, bounds = tokens.new_empty(grid), tokens.new_empty(num_rows)
    values, masses = logits.new_empty(num_rows, vocab_size), logits.new_empty(grid, dtype=torch.int64)
    kept = (tokens, state, bounds, counters)
    shape = (vocab_size, logits.stride(0))
    stats_kernel[grid](logits, *kept, maxima, minima, places, *shape, **chunks)
    for is_mass in (False, True):
        filters = (columns.temperature, columns.top_p if is_mass else columns.top_k)
        edges = {**chunks, "MASS": is_mass, "TILE": tile}
        edges_kernel[grid](logits, *filters, *kept, tails, *shape, **edges)
        bound_kernel[grid](
            logits, *filters, *kept, cursors, values, *shape, MASS=is_mass, BLOCK=min(BLOCK, chunk), **size
        )
    draw_kernel[grid](logits, columns.temperature, columns.min_p, columns.uniform, *kept, masses, *shape, **chunks)
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
