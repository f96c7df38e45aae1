"""Operands of sampling, and the changes to logits before it: penalties and biases. Knows numbers, not requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NON_FINITE = -1
"""Code instead of a token: the row has a NaN, or its largest logit has a magnitude of MAX_LOGIT or more."""
NOTHING_LEFT = -2
"""Code instead of a token: all logits of the row are -inf."""
MAX_LOGIT = 1e30
"""Bound of a row's largest logit: a larger one, divided by a temperature, may overflow."""
MAX_TOP_K = 2**31 - 1
NUM_COLUMNS = 5
TEMPERATURE, TOP_P, MIN_P, UNIFORM, TOP_K = range(NUM_COLUMNS)


class RowSampling(NamedTuple):
    """Sampling parameters of one row."""

    temperature: float
    """0 takes the most likely token."""
    top_k: int = 0
    """Number of likeliest tokens to choose from, which may exceed the vocabulary; 0 and -1 keep all."""
    top_p: float = 1.0
    """Above 0, at most 1."""
    min_p: float = 0.0
    """0 to 1."""
    uniform: float = 0.0
    """The random draw, from 0 up to but not including 1."""


def sampling_words(rows: Sequence[RowSampling]) -> np.ndarray:
    """Sampling parameters of B rows as [NUM_COLUMNS, B] int32, to be copied to a device.

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


def sampling_rows(columns: Tensor) -> list[RowSampling]:
    """Read what `sampling_words` made, by row; waits for the device."""
    numbers = columns[:TOP_K].view(torch.float32).tolist()
    return [
        RowSampling(t, k, p, m, u)
        for t, p, m, u, k in zip(*numbers, columns[TOP_K].tolist(), strict=True)
    ]


def apply_edits(logits: Tensor, edits: Sequence[Tensor]) -> None:
    """Change the logits of tokens seen before, then add biases, then rule out tokens that are not allowed.

    Semantics:
        for each token of a row's prompt or output: l = l / repetition if l > 0 else l * repetition
        for each token of a row's output: l -= frequency * count + presence
        for each biased token: l += bias
        for each other token of a row that allows some only: l = -inf

    Args:
        logits: [B, V], float32, contiguous. Mutated.
        edits: Six tensors on the device of the logits:
            places: [N], int64: row * V + token of each logit that penalties change, each at most once.
            penalties: [2, N], float32: repetition; and frequency * count + presence, 0 outside the output.
            bias_places: [M], int64, each at most once.
            bias: [M], float32.
            allowed_places: [K], int64: the logits that stay in `allowed_rows`.
            allowed_rows: [R], int64: rows that allow only some tokens.
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
