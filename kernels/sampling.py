"""Operands of sampling, and what is done to logits before it: penalties and biases. Knows numbers, not requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from manylora.kernels.packed_copy import copy_in_one

NON_FINITE = -1
"""Instead of a token: the row has a NaN, or its largest logit has a magnitude of MAX_LOGIT or more."""
NOTHING_LEFT = -2
"""Instead of a token: all logits of the row are -inf."""
MAX_LOGIT = 1e30
"""A row whose largest logit has a larger magnitude is not a distribution: divided by a temperature it may overflow."""
MAX_TOP_K = 2**31 - 1
NUM_COLUMNS = 5
TEMPERATURE, TOP_P, MIN_P, UNIFORM, TOP_K = range(NUM_COLUMNS)


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


def sampling_words(rows: Sequence[RowSampling]) -> np.ndarray:
    """How the tokens of B rows are chosen, as [NUM_COLUMNS, B] int32 to copy to a device.

    Columns: temperature, top_p, min_p and uniform as bits of float32; top_k, 0 for all.
    """
    words = np.empty((NUM_COLUMNS, len(rows)), dtype=np.int32)
    floats = [
        number
        for temperature, _, top_p, min_p, uniform in rows
        for number in (temperature, top_p, min_p, uniform)
    ]
    words[:TOP_K].view(np.float32)[:] = np.array(floats, dtype=np.float32).reshape(-1, 4).T
    words[TOP_K] = [min(max(row.top_k, 0), MAX_TOP_K) for row in rows]
    return words


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """How the tokens of B rows are chosen, on the device of the logits."""

    words: Tensor
    """[NUM_COLUMNS, B], int32, contiguous: what `sampling_words` made. What is written there later counts."""

    @classmethod
    def build(cls, rows: Sequence[RowSampling], device: torch.device) -> SamplingColumns:
        """Move the parameters of some rows to `device`, in one copy."""
        return cls(*copy_in_one([sampling_words(rows)], device))

    def rows(self) -> list[RowSampling]:
        """The parameters by row; waits for the device."""
        numbers = self.words[:TOP_K].view(torch.float32).tolist()
        return [
            RowSampling(t, k, p, m, u)
            for t, p, m, u, k in zip(*numbers, self.words[TOP_K].tolist(), strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEdits:
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
    allowed_token_ids: Sequence[int] = ()
    """All others are ruled out; empty allows all. Within the vocabulary."""


def edit_arrays(rows: Sequence[RowEdits], vocab_size: int) -> list[np.ndarray]:
    """The edits of some rows as lists of logits to change: work is in proportion to histories, not to B * V.

    Args:
        rows: Only the rows that have something to change.
        vocab_size: V, the width of the logits.

    Returns:
        places: [N], int64: row * V + token of what penalties change, each at most once.
        penalties: [2, N], float32: repetition; and frequency * count + presence, 0 outside the output.
        bias_places: [M], int64, each at most once.
        bias: [M], float32.
        allowed_places: [K], int64: all that stay in `allowed_rows`.
        allowed_rows: [R], int64: rows of which only some tokens stay.
    """
    nowhere = np.empty(0, dtype=np.int64)
    places = [nowhere]
    penalties = [np.empty((2, 0), dtype=np.float32)]
    for row in rows:
        tokens, counts = np.unique(
            np.asarray(row.output_token_ids, dtype=np.int64), return_counts=True
        )
        only_prompt = np.setdiff1d(np.asarray(row.prompt_token_ids, dtype=np.int64), tokens)
        places.append(row.row * vocab_size + np.concatenate((tokens, only_prompt)))
        penalties.append(np.zeros((2, len(places[-1])), dtype=np.float32))
        penalties[-1][0] = row.repetition
        penalties[-1][1, : len(tokens)] = row.frequency * counts + row.presence
    bias = {
        row.row * vocab_size + t: b
        for row in rows
        for t, b in row.bias.items()
        if 0 <= t < vocab_size
    }
    limited = [row for row in rows if row.allowed_token_ids]
    allowed = (
        row.row * vocab_size + np.array(row.allowed_token_ids, dtype=np.int64) for row in limited
    )
    return [
        np.concatenate(places),
        np.concatenate(penalties, axis=1),
        np.array(list(bias), dtype=np.int64),
        np.array(list(bias.values()), dtype=np.float32),
        np.concatenate((nowhere, *allowed)),
        np.array([row.row for row in limited], dtype=np.int64),
    ]


def apply_edits(logits: Tensor, edits: Sequence[Tensor]) -> None:
    """Change the logits of tokens seen before, then add biases, then rule out what is not allowed.

    Semantics:
        for each token of a row's prompt or output: l = l / repetition if l > 0 else l * repetition
        for each token of a row's output: l -= frequency * count + presence
        for each biased token: l += bias
        for each other token of a row that allows some only: l = -inf

    Args:
        logits: [B, V], float32, contiguous. Mutated.
        edits: The `edit_arrays`, on the device of the logits.
    """
    places, penalties, bias_places, bias, allowed_places, allowed_rows = edits
    flat = logits.view(-1)
    if places.numel():
        seen = flat[places]
        repetition, subtract = penalties
        flat[places] = torch.where(seen > 0, seen / repetition, seen * repetition) - subtract
    if bias_places.numel():
        flat[bias_places] += bias
    if allowed_rows.numel():
        kept = flat[allowed_places]
        logits.index_fill_(0, allowed_rows, -torch.inf)
        flat[allowed_places] = kept
