"""The oracle of sampling: full sorts in float64."""

from __future__ import annotations

import torch

from weft.kernels.checks import expect
from weft.kernels.plain.sampling import check_operands
from weft.kernels.sampling import SamplingTensors


def sample(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """`weft.kernels.plain.sampling.sample` states what it computes."""
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
    """`weft.kernels.plain.sampling.logprobs` states what it computes."""
    expect("logits", logits, (None, None), torch.float32)
    expect("token_ids", token_ids, (logits.shape[0],), torch.int64, logits.device)
    scores = logits.double().log_softmax(-1)
    chosen = scores.gather(1, token_ids[:, None])
    ordered = scores.sort(dim=-1, descending=True, stable=True)
    rank = (scores > chosen).sum(-1) + 1
    return chosen[:, 0].float(), rank, ordered.indices[:, :num_top], ordered.values[:, :num_top].float()
