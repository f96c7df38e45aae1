"""What sampling is: the check of its operands, and the oracle by full sorts in float64. For tests."""

from __future__ import annotations

import torch

from weft.kernels.checks import expect, expect_that
from weft.kernels.sampling import SamplingTensors


def sample(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Choose one token per row.

    Semantics, for each row with uniform u:
        if temperature == 0: token = argmax(logits), the first among equals
        else:
            p = probabilities(logits, temperature, top_k, top_p, min_p)
            token = the first with p[0] + ... + p[token] > u

    A row's token depends on its own logits and parameters only.

    Args:
        logits: [B, V], float32. Penalties and biases are applied already.
        sampling: Parameters and draws.

    Returns:
        [B], int64.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    check_operands(logits, sampling)
    tokens = []
    for row, (temperature, top_k, top_p, min_p, uniform) in zip(logits, sampling.host, strict=True):
        if temperature == 0:
            tokens.append(int(row.argmax()))
            continue
        cumulative = probabilities(row, temperature, top_k, top_p, min_p).cumsum(0)
        tokens.append(int((cumulative > uniform * cumulative[-1]).nonzero()[0]))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def probabilities(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The filtered distribution of one row of logits.

    Semantics:
        p = softmax(row / temperature)
        top_k: keep the k most likely; top_p: then, of what is left and renormalised, the smallest set that reaches
        top_p; min_p: then those at least min_p times as likely as the most likely. Each filter also keeps what is
        exactly as likely as the last it keeps, so that the outcome does not depend on an order among equals.

    Returns:
        [V], float64, summing to 1.
    """
    p = (row.float() / temperature).double().softmax(0)
    if 0 < top_k < len(p):
        p = torch.where(p >= p.sort(descending=True).values[top_k - 1], p, 0.0)
    if top_p < 1:
        ordered = p.sort(descending=True).values
        reached = ordered.cumsum(0) >= top_p * ordered.sum()
        last = int(reached.nonzero()[0]) if bool(reached.any()) else len(p) - 1
        p = torch.where(p >= ordered[last], p, 0.0)
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the unfiltered distribution.

    Args:
        logits: [n, V], float32.
        token_ids: [n], int64: the token that stands after each row.
        num_top: How many of the most likely tokens to report, at most V.

    Returns:
        chosen: [n], float32, natural logarithm of the token's probability.
        rank: [n], int64, one more than the number of likelier tokens.
        top_ids: [n, num_top], int64, most likely first, the lower id first among equals.
        top_logprobs: [n, num_top], float32.
    """
    expect("logits", logits, (None, None), torch.float32)
    expect("token_ids", token_ids, (logits.shape[0],), torch.int64, logits.device)
    scores = logits.double().log_softmax(-1)
    chosen = scores.gather(1, token_ids[:, None])
    ordered = scores.sort(dim=-1, descending=True, stable=True)
    rank = (scores > chosen).sum(-1) + 1
    return chosen[:, 0].float(), rank, ordered.indices[:, :num_top], ordered.values[:, :num_top].float()


def check_operands(logits: torch.Tensor, sampling: SamplingTensors) -> None:
    """Check what a call to `sample` was given.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    expect("logits", logits, (len(sampling.host), None), torch.float32, sampling.temperatures.device)
    expect_that("logits", logits.shape[1] > 0, "a vocabulary", logits.shape)
