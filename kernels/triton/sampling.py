"""Sampling in Triton: several programs per row, in passes over the vocabulary instead of a sort.

Each filter keeps the tokens whose logit, divided by the temperature, reaches a bound. Top-k and top-p each need two
passes to find their bound. The first pass divides the range of the logits evenly by EDGES edges, and counts the tokens,
or sums their mass, above each edge. The second pass collects the few tokens between the two edges around the bound, and
halves the interval until the bound is exact. The draw walks the kept tokens in order of their ids.

In each pass the last program of a row to finish merges the parts of all, in a fixed order. Where the order of tokens is
not fixed, sums are of integers. So a row's token is repeatable and does not depend on the batch. The launches are
always the same: on the device, the programs of a row skip the passes that it does not need.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels import sampling
from manylora.kernels.checks import expect_that
from manylora.kernels.plain.sampling import check_masks, check_operands, chosen_logprobs
from manylora.kernels.triton.sgmv import INTERPRET

MAX_LOGIT = tl.constexpr(sampling.MAX_LOGIT)
NON_FINITE = tl.constexpr(sampling.NON_FINITE)
NOTHING_LEFT = tl.constexpr(sampling.NOTHING_LEFT)
TEMPERATURE = tl.constexpr(sampling.TEMPERATURE)
TOP_P = tl.constexpr(sampling.TOP_P)
MIN_P = tl.constexpr(sampling.MIN_P)
UNIFORM = tl.constexpr(sampling.UNIFORM)
TOP_K = tl.constexpr(sampling.TOP_K)
CHUNK = tl.constexpr(4096)
"""Tokens per program."""
EDGES = tl.constexpr(32)
TILE = tl.constexpr(4096 if INTERPRET else 128)
"""Tokens that a program compares with all edges at once; in the interpreter more cost no more time."""
BLOCK = tl.constexpr(1024)
"""Tokens between two edges that the last program of a row compares at once."""
WARPS = 8
RANGE = tl.constexpr(32.0)
"""Range of filters below the largest logit: a million tokens below it have less than 2e-8 of the mass."""
FIXED = tl.constexpr(2.0**40)
"""Mass of the likeliest token where masses are integers; the sum of 2**22 such masses fits in 63 bits."""
LEAST_ROWS = 1024
"""Rows for which counters are made at once."""
STATE = tl.constexpr(7)
"""Numbers kept of a row between passes: its largest and its least logit; the lower and the upper edge around the bound,
the count or mass above both, and the count or mass that is to be kept; the bound so far, scaled."""
ANYWHERE = ("words", "sampled")
"""Operands whose alignment makes no variant of a kernel."""


@triton.jit
def _ordered(z):
    # Bits of a float as an integer of the same order; both zeros become one.
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(ordered):
    bits = ordered.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _arrives_last(counter):
    # True if the other programs of this row are done. Then their results can be read past L1, and the counter is 0.
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
def _parameter(words, row, COLUMN: tl.constexpr):
    return tl.load(words + COLUMN * tl.num_programs(0) + row).to(tl.float32, bitcast=True)


@triton.jit
def _is_drawn(words, sampled, row):
    return (_parameter(words, row, TEMPERATURE) > 0.0) & (tl.load(sampled + row) >= 0)


@triton.jit
def _limit(words, sampled, row, V, MASS: tl.constexpr):
    # The limit of top-p (MASS) or top-k, and whether it rules anything out in this row.
    if MASS:
        limit = _parameter(words, row, TOP_P)
        is_needed = limit < 1.0
    else:
        limit = tl.load(words + TOP_K * tl.num_programs(0) + row)
        is_needed = (limit > 0) & (limit < V)
    return limit, is_needed & _is_drawn(words, sampled, row)


@triton.jit
def _fixed(z, top, bound):
    # Mass of the tokens that reach a bound, as an integer.
    return tl.where(z >= bound, (tl.exp(z - top) * FIXED).to(tl.int64), 0)


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def stats_kernel(
    logits, sampled, state, counters, partials, V, stride: tl.int64, CHUNKS: tl.constexpr
):
    """Find the largest and least logit of a row, and the code or the likeliest token. Grid of all: (B, chunks of V)."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + i, mask=i < V, other=float("-inf"))
    is_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    x = tl.where(x == x, x, float("-inf"))
    largest = tl.max(x, axis=0)
    part = partials + (row * tl.num_programs(1) + chunk) * EDGES
    tl.store(part, tl.where(is_nan, float("nan"), largest))
    tl.store(part + 1, tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0))
    place = tl.min(tl.where((x == largest) & (i < V), i, V), axis=0)
    tl.store(part + 2, place.to(tl.float32, bitcast=True))
    if _arrives_last(counters + 2 * row):
        c = tl.arange(0, CHUNKS)
        parts = partials + (row * tl.num_programs(1) + c) * EDGES
        is_part = c < tl.num_programs(1)
        maxima = tl.load(parts, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        minima = tl.load(parts + 1, mask=is_part, other=float("inf"), cache_modifier=".cg")
        places = tl.load(parts + 2, mask=is_part, other=0.0, cache_modifier=".cg").to(
            tl.int32, bitcast=True
        )
        is_nan = tl.max((maxima != maxima).to(tl.int32), axis=0) > 0
        maxima = tl.where(maxima == maxima, maxima, float("-inf"))
        best = tl.max(maxima, axis=0)
        token = tl.min(tl.where((maxima == best) & is_part, places, V), axis=0)
        code = tl.where((best == float("-inf")) & (is_nan == 0), NOTHING_LEFT, NON_FINITE)
        tl.store(sampled + row, tl.where((is_nan == 0) & (tl.abs(best) < MAX_LOGIT), token, code))
        tl.store(state + row * STATE, best)
        tl.store(state + row * STATE + 1, tl.min(minima, axis=0))
        tl.store(state + row * STATE + 6, float("-inf"))


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def edges_kernel(
    logits,
    words,
    sampled,
    state,
    counters,
    partials,
    V,
    stride: tl.int64,
    MASS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Find two neighbouring edges around a bound, and the number or mass of the tokens above both."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    limit, is_needed = _limit(words, sampled, row, V, MASS)
    if is_needed:
        temperature = _parameter(words, row, TEMPERATURE)
        at = state + row * STATE
        top = tl.load(at) / temperature
        kept = tl.load(at + 6)
        least = tl.maximum(tl.load(at + 1) / temperature, top - RANGE)
        e = tl.arange(0, EDGES)
        edges = tl.where(
            e < EDGES - 1, tl.maximum(top - (top - least) / EDGES * (e + 1), least), least
        )
        tails = tl.zeros((EDGES, TILE), tl.float32)
        for start in range(0, CHUNK, TILE):
            z = _load_scaled(logits, row, stride, chunk * CHUNK + start, V, temperature, TILE)
            weight = tl.where(z >= kept, tl.exp(z - top) if MASS else 1.0, 0.0)
            tails += tl.where(z[None, :] >= edges[:, None], weight[None, :], 0.0)
        tl.store(partials + (row * tl.num_programs(1) + chunk) * EDGES + e, tl.sum(tails, axis=1))
        if _arrives_last(counters + 2 * row):
            c = tl.arange(0, CHUNKS)[:, None]
            parts = (row * tl.num_programs(1) + c) * EDGES + e[None, :]
            found = tl.load(
                partials + parts, mask=c < tl.num_programs(1), other=0.0, cache_modifier=".cg"
            )
            tail = tl.sum(found, axis=0)
            need = limit * (tl.sum(tl.where(e == EDGES - 1, tail, 0.0), axis=0) if MASS else 1.0)
            edge = tl.min(
                tl.where(tail >= need, e, EDGES), axis=0
            )  # EDGES: all that count are kept
            upper = tl.sum(tl.where(e == edge - 1, edges, 0.0), axis=0)
            tl.store(at + 2, tl.sum(tl.where(e == tl.minimum(edge, EDGES - 1), edges, 0.0), axis=0))
            tl.store(at + 3, tl.where(edge == 0, float("inf"), upper))
            tl.store(at + 4, tl.sum(tl.where(e == edge - 1, tail, 0.0), axis=0))
            tl.store(at + 5, need)


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def bound_kernel(
    logits, words, sampled, state, counters, found, V, stride: tl.int64, MASS: tl.constexpr
):
    """Find the largest bound between two edges that keeps enough."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    _, is_needed = _limit(words, sampled, row, V, MASS)
    if is_needed:
        temperature = _parameter(words, row, TEMPERATURE)
        at = state + row * STATE
        cursor = counters + 2 * row + 1
        top = tl.load(at) / temperature
        lower = tl.load(at + 2)
        upper = tl.load(at + 3)
        z = _load_scaled(logits, row, stride, chunk * CHUNK, V, temperature, CHUNK)
        is_between = (z >= lower) & (z < upper) & (z >= tl.load(at + 6))
        place = tl.cumsum(is_between.to(tl.int32), axis=0) - 1
        first = tl.atomic_add(cursor, tl.sum(is_between.to(tl.int32), axis=0), sem="relaxed")
        values = found + row.to(tl.int64) * V
        tl.store(values + first + place, z, mask=is_between)
        if _arrives_last(counters + 2 * row):
            scale = FIXED if MASS else 1.0
            above = (tl.load(at + 4) * scale).to(tl.int64)
            need = (tl.load(at + 5) * scale).to(tl.int64)
            low = _ordered(lower).to(tl.int64)
            high = tl.minimum(_ordered(upper).to(tl.int64) - 1, _ordered(top).to(tl.int64))
            num_values = tl.load(cursor, cache_modifier=".cg")
            while low < high:
                middle = low + (high - low + 1) // 2
                bound = _float_of(middle)
                tail = tl.zeros((BLOCK,), tl.int64 if MASS else tl.int32)
                for start in range(0, num_values, BLOCK):
                    j = start + tl.arange(0, BLOCK)
                    value = tl.load(
                        values + j, mask=j < num_values, other=float("-inf"), cache_modifier=".cg"
                    )
                    tail += _fixed(value, top, bound) if MASS else (value >= bound).to(tl.int32)
                is_enough = above + tl.sum(tail, axis=0) >= need
                low = tl.where(is_enough, middle, low)
                high = tl.where(is_enough, high, middle - 1)
            tl.store(at + 6, _float_of(low))
            tl.store(cursor, 0)


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def draw_kernel(
    logits, words, sampled, state, counters, masses, V, stride: tl.int64, CHUNKS: tl.constexpr
):
    """Draw from the tokens that reach a row's bound and min-p."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if _is_drawn(words, sampled, row):
        temperature = _parameter(words, row, TEMPERATURE)
        min_p = _parameter(words, row, MIN_P)
        top = tl.load(state + row * STATE) / temperature
        bound = tl.load(state + row * STATE + 6)
        if min_p > 0.0:
            bound = tl.maximum(bound, top + tl.log(min_p))
        z = _load_scaled(logits, row, stride, chunk * CHUNK, V, temperature, CHUNK)
        tl.store(masses + row * tl.num_programs(1) + chunk, tl.sum(_fixed(z, top, bound), axis=0))
        if _arrives_last(counters + 2 * row):
            c = tl.arange(0, CHUNKS)
            parts = masses + row * tl.num_programs(1) + c
            mass = tl.load(parts, mask=c < tl.num_programs(1), other=0, cache_modifier=".cg")
            total = tl.sum(mass, axis=0)
            # All 24 bits of a draw count, but their product with the total needs more than 64 bits.
            draw = tl.minimum((_parameter(words, row, UNIFORM) * 16777216.0).to(tl.int64), 16777215)
            target = (total >> 24) * draw + (((total & 0xFFFFFF) * draw) >> 24)
            chosen = tl.sum((tl.cumsum(mass, axis=0) <= target).to(tl.int32), axis=0)
            before = tl.sum(tl.where(c < chosen, mass, 0), axis=0)
            i = chosen * CHUNK + tl.arange(0, CHUNK)
            z = _load_scaled(logits, row, stride, chosen * CHUNK, V, temperature, CHUNK)
            is_above = before + tl.cumsum(_fixed(z, top, bound), axis=0) > target
            tl.store(sampled + row, tl.min(tl.where(is_above, i, V - 1), axis=0))


@functools.cache
def _counters(device: torch.device, num_rows: int) -> Tensor:
    """Counters of programs that are done and of values that are found, [num_rows, 2], int32.

    They are zero before and after each launch, and keep their address, because captured graphs use it.
    """
    return torch.zeros((num_rows, 2), dtype=torch.int32, device=device)


def sample(logits: Tensor, columns: Tensor, out: Tensor | None = None) -> Tensor:
    """Choose one token per row.

    Semantics, arguments and result: `manylora.kernels.plain.sampling.sample`. Calls on one device must not overlap.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check_operands(logits, columns, out)
    expect_that("logits", logits.stride(1) == 1, "rows of consecutive elements", logits.stride())
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device) if out is None else out
    if not num_rows:
        return tokens
    grid = (num_rows, triton.cdiv(vocab_size, CHUNK.value))
    counters = _counters(logits.device, max(LEAST_ROWS, triton.next_power_of_2(num_rows)))
    state = logits.new_empty(num_rows, STATE.value)
    partials = logits.new_empty(*grid, EDGES.value)
    found = logits.new_empty(num_rows, vocab_size)
    masses = logits.new_empty(grid, dtype=torch.int64)
    kept = (tokens, state, counters)
    shape = (vocab_size, logits.stride(0))
    operands = (logits, columns, *kept)
    sizes = {"CHUNKS": triton.next_power_of_2(grid[1]), "num_warps": WARPS}
    stats_kernel[grid](logits, *kept, partials, *shape, **sizes)
    for is_mass in (False, True):
        edges_kernel[grid](*operands, partials, *shape, MASS=is_mass, **sizes)
        bound_kernel[grid](*operands, found, *shape, MASS=is_mass, num_warps=WARPS)
    draw_kernel[grid](*operands, masses, *shape, **sizes)
    return tokens


@triton.jit(do_not_specialize=["W"])
def mask_tokens_kernel(
    logits, rows, bits, V, W, stride: tl.int64, MAX_LOGIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Rule out the tokens of one block of one row. Grid: (n, blocks of V)."""
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + index.to(tl.int64) * W + token // 32, mask=token // 32 < W, other=0)
    is_ruled_out = (((word >> (token % 32)) & 1) == 0) & (token < V)
    places = logits + tl.load(rows + index) * stride + token
    # NaN and logits that are too large stay, so that `sample` finds them.
    is_number = tl.load(places, mask=is_ruled_out, other=0.0) < MAX_LOGIT
    tl.store(places, float("-inf"), mask=is_ruled_out & is_number)


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Rule out the tokens of some rows whose bits are not set.

    Semantics and arguments: `manylora.kernels.plain.sampling.mask_tokens`.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check_masks(logits, rows, bits)
    block = min(1024, triton.next_power_of_2(logits.shape[1]))
    grid = (len(rows), triton.cdiv(logits.shape[1], block))
    mask_tokens_kernel[grid](
        logits, rows, bits, logits.shape[1], bits.shape[1], logits.stride(0), MAX_LOGIT, BLOCK=block
    )


def logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of the unfiltered distribution, with torch operators: it is rare, and no step waits for it.

    Semantics, arguments and results: `manylora.kernels.plain.sampling.logprobs`, but torch.topk chooses among equals
    at the end of the list.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    chosen, rank, total = chosen_logprobs(logits, token_ids)
    ids = logits.topk(num_top, dim=-1).indices.sort(-1).values
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return chosen, rank, ids.gather(1, order.indices), order.values - total[:, None]
