"""Operands of sampling, and what is done to logits before it: penalties and biases. Knows numbers, not requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class RowSampling(NamedTuple):
    """How the token of one row is chosen."""

    temperature: float
    """0 takes the most likely token."""
    top_k: int = 0
    """Most tokens to choose from, which may exceed any vocabulary; 0 and -1 keep all."""
    top_p: float = 1.0
    """Above 0, at most 1."""
    min_p: float = 0.0
    """0 to 1."""
    uniform: float = 0.0
    """A draw from 0 up to but not including 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPenalties:
    """What changes the logits of one row."""

    row: int
    """Row of the logits."""
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    repetition: float = 1.0
    """Divides positive and multiplies negative logits of tokens of the prompt or the output."""
    frequency: float = 0.0
    """Subtracted once per occurrence in the output."""
    presence: float = 0.0
    """Subtracted once from tokens of the output."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to an addend; -inf rules a token out. Ids outside the vocabulary change nothing."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PenaltyTensors:
    """The penalties of a batch as lists of logits to change: work is in proportion to histories, not to B * V."""

    places: Tensor
    """[N], int64: row * V + token, each at most once."""
    repetition: Tensor
    """[N], float32."""
    subtract: Tensor
    """[N], float32: frequency * count + presence, for tokens of the output."""
    bias_places: Tensor
    """[M], int64: row * V + token, each at most once."""
    bias: Tensor
    """[M], float32."""

    @classmethod
    def build(cls, rows: Sequence[RowPenalties], vocab_size: int, device: torch.device) -> PenaltyTensors:
        """Count histories and move the result to `device`.

        Args:
            rows: Only the rows that have something to change.
            vocab_size: V, the width of the logits.
            device: Where the logits are.
        """
        places, repetition, subtract = [], [], []
        for row in rows:
            prompt = np.asarray(row.prompt_token_ids, dtype=np.int64)
            output = np.asarray(row.output_token_ids, dtype=np.int64)
            tokens, counts = np.unique(output, return_counts=True)
            only_prompt = np.setdiff1d(prompt, tokens)
            places.append(row.row * vocab_size + np.concatenate((tokens, only_prompt)))
            penalty = np.concatenate((row.frequency * counts + row.presence, np.zeros(len(only_prompt))))
            subtract.append(penalty.astype(np.float32))
            repetition.append(np.full(len(penalty), row.repetition, dtype=np.float32))
        bias = {row.row * vocab_size + t: b for row in rows for t, b in row.bias.items() if 0 <= t < vocab_size}
        return cls(
            places=_joined(places, np.int64, device),
            repetition=_joined(repetition, np.float32, device),
            subtract=_joined(subtract, np.float32, device),
            bias_places=torch.tensor(list(bias), dtype=torch.int64).to(device),
            bias=torch.tensor(list(bias.values()), dtype=torch.float32).to(device),
        )


def apply_penalties(logits: Tensor, penalties: PenaltyTensors) -> None:
    """Change the logits of tokens seen before, then add biases.

    Semantics:
        for each token of a row's prompt or output: l = l / repetition if l > 0 else l * repetition
        for each token of a row's output: l -= frequency * count + presence
        for each biased token: l += bias

    Args:
        logits: [B, V], float32, contiguous. Mutated.
        penalties: What to change.
    """
    flat = logits.view(-1)
    if penalties.places.numel():
        seen = flat[penalties.places]
        seen = torch.where(seen > 0, seen / penalties.repetition, seen * penalties.repetition)
        flat[penalties.places] = seen - penalties.subtract
    if penalties.bias_places.numel():
        flat[penalties.bias_places] += penalties.bias


def keep_only(logits: Tensor, token_ids: Sequence[int]) -> None:
    """Rule out all tokens of a row but these.

    Args:
        logits: [V], float32. Mutated.
        token_ids: Within the vocabulary.
    """
    places = torch.tensor(token_ids, dtype=torch.int64).to(logits.device)
    kept = logits[places]
    logits.fill_(-torch.inf)
    logits[places] = kept


def _joined(parts: list[np.ndarray], dtype: type[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts, dtype=dtype) if parts else np.empty(0, dtype=dtype)).to(device)
