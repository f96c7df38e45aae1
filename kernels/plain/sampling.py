"""Sampling on the CPU, row by row, without sorting the vocabulary.

Every filter is a lower bound: it keeps the tokens that reach it. The tokens that reach a bound lie in blocks whose
maximum reaches it, so one fast pass for the block maxima replaces most searches of a row. The draw walks the kept
tokens in order of their ids. A row is computed alone, so it cannot depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from manylora.kernels.checks import expect, expect_that
from manylora.kernels.sampling import (
    MAX_LOGIT,
    NON_FINITE,
    NOTHING_LEFT,
    NUM_COLUMNS,
    sampling_rows,
)

BLOCK = 128
"""Tokens per block."""
FEW_BLOCKS = (16, 128)
"""Numbers of likeliest blocks that top-p tries before it takes all tokens."""
COARSE_SHIFT = 18
"""Low bits of a probability that the coarse histogram of the mass ignores."""


@dataclass(frozen=True, slots=True)
class BlockedRow:
    """One row of logits, cut into blocks."""

    values: Tensor
    """[blocks, BLOCK], float32; -inf behind the vocabulary."""
    maxima: Tensor
    """[blocks], float32."""

    def reaching(self, bound: Tensor) -> tuple[Tensor, Tensor]:
        """Ids, ascending, and logits of all tokens at or above `bound`."""
        blocks = (self.maxima >= bound).nonzero()[:, 0]
        values = self.values.index_select(0, blocks)
        block, place = (values >= bound).nonzero(as_tuple=True)
        return blocks[block] * BLOCK + place, values[block, place]

    def kth_largest(self, k: int) -> Tensor:
        """The k-th largest logit; equals count as often as they occur."""
        if k * 2 > len(self.maxima):
            return self.values.view(-1).topk(k, sorted=False).values.amin()
        # The k largest logits lie in the k blocks with the largest maxima.
        _, values = self.reaching(self.maxima.topk(k, sorted=False).values.amin())
        return values.topk(k, sorted=False).values.amin()


def sample(logits: Tensor, columns: Tensor, out: Tensor | None = None) -> Tensor:
    """Choose one token per row.

    Semantics, for each row with uniform u:
        if temperature == 0: token = argmax(logits), the first among equals
        else:
            p = softmax(logits / temperature), filtered and renormalised
            token = the first with p[0] + ... + p[token] > u

    Filters: top_k keeps the k most likely; top_p then, of what is left and renormalised, the smallest set that reaches
    top_p; min_p then those at least min_p times as likely as the most likely. Each filter also keeps what is exactly as
    likely as the last it keeps, so that the outcome does not depend on an order among equals.
    A row's token depends on its own logits and parameters only.

    Args:
        logits: [B, V], float32. Penalties and biases are applied already.
        columns: [NUM_COLUMNS, B], int32, contiguous: parameters and draw of each row, as `sampling_words` makes them.
        out: [B], int32, contiguous: where the tokens go; None makes one.

    Returns:
        [B], int32: `out`. Not a token but NON_FINITE where the row has a NaN or the magnitude of its largest logit is
        MAX_LOGIT or more, NOTHING_LEFT where all its logits are -inf.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check_operands(logits, columns, out)
    tokens = (
        torch.empty(len(logits), dtype=torch.int32, device=logits.device) if out is None else out
    )
    # torch.argmax walks a row one element at a time; maxima of blocks are vectorised.
    values, maxima = _blocks(logits)
    top = maxima.amax(-1)
    block = maxima.argmax(-1)
    likeliest = block * BLOCK + values[torch.arange(len(logits)), block].argmax(-1)
    failures = torch.where(top == -torch.inf, NOTHING_LEFT, NON_FINITE)
    tokens.copy_(torch.where(top.abs() < MAX_LOGIT, likeliest, failures))
    for row, (token, how) in enumerate(zip(tokens.tolist(), sampling_rows(columns), strict=True)):
        if token >= 0 and how.temperature > 0:
            tokens[row] = _draw(BlockedRow(values[row], maxima[row]), *how)
    return tokens


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Rule out the tokens of some rows whose bits are not set.

    Semantics: l = -inf for each token t of row rows[i] where bit t % 32 of bits[i, t // 32] is 0, or where there is no
    such word. A logit that is NaN or at least MAX_LOGIT stays, so that `sample` finds that the row is no distribution.

    Args:
        logits: [B, V], float32. Mutated.
        rows: [n], int64, each at most once.
        bits: [n, W], int32.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check_masks(logits, rows, bits)
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    is_allowed = ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : logits.shape[1]]
    is_allowed = functional.pad(is_allowed, (0, logits.shape[1] - is_allowed.shape[1]))
    masked = logits[rows]
    logits[rows] = masked.masked_fill(~is_allowed & (masked < MAX_LOGIT), -torch.inf)


def check_masks(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Check the operands of `mask_tokens`.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    expect("logits", logits, (None, None), torch.float32)
    expect_that("logits", logits.stride(1) == 1, "rows of consecutive elements", logits.stride())
    expect("rows", rows, (None,), torch.int64, logits.device)
    expect("bits", bits, (len(rows), None), torch.int32, logits.device)
    expect_that("bits", bits.is_contiguous(), "contiguous elements", bits.stride())


def logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of the unfiltered distribution.

    Args:
        logits: [n, V], float32.
        token_ids: [n], int64: the token that stands after each row.
        num_top: Number of most likely tokens to report, at most V.

    Returns:
        chosen: [n], float32, natural logarithm of the token's probability.
        rank: [n], int64, one more than the number of likelier tokens.
        top_ids: [n, num_top], int64, most likely first, the lower id first among equals.
        top_logprobs: [n, num_top], float32.
        All log-probabilities are NaN where a row is no distribution; its other results mean nothing.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    chosen, rank, total = chosen_logprobs(logits, token_ids)
    top_ids = torch.empty((logits.shape[0], num_top), dtype=torch.int64)
    values, maxima = _blocks(logits)
    for index, is_nan in enumerate(total.isnan().tolist() if num_top else ()):
        if is_nan:
            top_ids[index] = torch.arange(num_top)
            continue
        row = BlockedRow(values[index], maxima[index])
        ids, candidates = row.reaching(row.kth_largest(num_top))
        top_ids[index] = ids[candidates.sort(descending=True, stable=True).indices[:num_top]]
    return chosen, rank, top_ids, logits.gather(1, top_ids) - total[:, None]


def chosen_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability and rank of each row's token, and the log of the sum of all exponentials; three of [n].

    The sum is NaN, and with it the log-probability, where a row is no distribution.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    expect("logits", logits, (None, None), torch.float32)
    expect("token_ids", token_ids, (logits.shape[0],), torch.int64, logits.device)
    is_sound = logits.amax(-1).abs() < MAX_LOGIT
    total = torch.logsumexp(logits, dim=-1).masked_fill_(~is_sound, torch.nan)
    chosen = logits.gather(1, token_ids[:, None])
    return chosen[:, 0] - total, (logits > chosen).sum(-1) + 1, total


def _blocks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits as [B, blocks, BLOCK] and the maximum of each block, [B, blocks]."""
    short = -logits.shape[1] % BLOCK
    padded = functional.pad(logits, (0, short), value=-torch.inf) if short else logits
    values = padded.unflatten(1, (-1, BLOCK))
    return values, values.amax(-1)


def _draw(
    row: BlockedRow, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    ids: Tensor | None
    if 0 < top_k < row.values.numel():
        ids, values = row.reaching(row.kth_largest(top_k))
        p = torch.softmax(values / temperature, dim=0)
        if top_p < 1:
            p = _keep_mass(p, top_p * p.sum())
    elif top_p < 1:
        ids, p = _nucleus(row, temperature, top_p)
    elif min_p > 0:
        # Twice as wide as the bound of min-p, which is applied exactly below.
        ids, values = row.reaching(row.maxima.amax() + temperature * torch.tensor(min_p / 2).log())
        p = torch.softmax(values / temperature, dim=0)
    else:
        return _inverse_cdf(torch.softmax(row.values.view(-1) / temperature, dim=0), uniform)
    if min_p > 0:
        p = torch.where(p >= min_p * p.amax(), p, 0.0)
    place = _inverse_cdf(p, uniform)
    return place if ids is None else int(ids[place])


def _nucleus(row: BlockedRow, temperature: float, top_p: float) -> tuple[Tensor | None, Tensor]:
    """Smallest set whose mass reaches `top_p`: its ids, None for all, and its probabilities, not renormalised."""
    p = torch.softmax(row.values.view(-1) / temperature, dim=0)
    for count in FEW_BLOCKS:
        if count < len(row.maxima):
            ids, _ = row.reaching(row.maxima.topk(count, sorted=False).values.amin())
            if float(p[ids].sum()) >= top_p:
                return ids, _keep_mass(p[ids], torch.tensor(top_p))
    return None, _keep_mass(p, top_p * p.sum())


def _keep_mass(p: Tensor, target: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches `target`; set all others to 0."""
    if len(p) > BLOCK * FEW_BLOCKS[0]:
        return torch.where(p >= _bound_by_bits(p, target), p, 0.0)
    ordered = p.sort(descending=True).values
    last = torch.searchsorted(ordered.cumsum(0), target.reshape(1)).clamp_(max=len(p) - 1)
    return torch.where(p >= ordered[last], p, 0.0)


def _bound_by_bits(p: Tensor, target: Tensor) -> Tensor:
    # Positive floats sort as their bits do: a histogram over the high bits finds the bin where the mass is reached, and
    # only that bin is sorted.
    bins = p.view(torch.int32) >> COARSE_SHIFT
    # Mass from the most likely bin down, float64.
    mass = torch.bincount(bins, weights=p).flip(0).cumsum(0)
    place = torch.searchsorted(mass, target.double().reshape(1)).clamp_(max=len(mass) - 1)
    above = mass[place - 1] if int(place) > 0 else torch.zeros(1, dtype=torch.float64)
    inside = p[bins == len(mass) - 1 - place].sort(descending=True).values
    last = torch.searchsorted(inside.double().cumsum(0) + above, target.double().reshape(1))
    return inside[last.clamp_(max=len(inside) - 1)]


def _inverse_cdf(p: Tensor, uniform: float) -> int:
    """First place whose cumulative weight exceeds `uniform` times the total; weights need not sum to 1."""
    if len(p) <= 2 * BLOCK or len(p) % BLOCK:
        cumulative = p.cumsum(0)
        return _first_above(cumulative, uniform * cumulative[-1])
    blocks = p.view(-1, BLOCK)
    cumulative = blocks.sum(-1).cumsum(0)
    target = uniform * cumulative[-1]
    block = _first_above(cumulative, target)
    before = cumulative[block - 1] if block else 0.0
    return block * BLOCK + _first_above(blocks[block].cumsum(0), target - before)


def _first_above(cumulative: Tensor, target: Tensor) -> int:
    # Rounding may put the target at the very end. A target just below the end finds the last place with any weight.
    below_end = torch.nextafter(cumulative[-1], cumulative.new_zeros(()))
    return int(
        torch.searchsorted(cumulative, torch.minimum(target, below_end).reshape(1), right=True)
    )


def check_operands(logits: Tensor, columns: Tensor, out: Tensor | None) -> None:
    """Check the operands of `sample`.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    expect("logits", logits, (None, None), torch.float32)
    expect_that("logits", logits.shape[1] > 0, "a vocabulary", logits.shape)
    expect("columns", columns, (NUM_COLUMNS, len(logits)), torch.int32, logits.device)
    expect_that("columns", columns.is_contiguous(), "contiguous elements", columns.stride())
    if out is not None:
        expect("out", out, logits.shape[:1], torch.int32, logits.device)
