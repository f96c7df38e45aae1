"""Operands of sampling, and what is done to logits before it: penalties and biases. Knows numbers, not requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.kernels.packed_copy import copy_in_one

NON_FINITE = -1
"""Instead of a token: the row has a NaN, or its largest logit has a magnitude of MAX_LOGIT or more."""
NOTHING_LEFT = -2
"""Instead of a token: all logits of the row are -inf."""
MAX_LOGIT = 1e30
"""A row whose largest logit has a larger magnitude is not a distribution: divided by a temperature it may overflow."""
MAX_TOP_K = 2**31 - 1
NUM_COLUMNS = 5


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
        number for temperature, _, top_p, min_p, uniform in rows for number in (temperature, top_p, min_p, uniform)
    ]
    words[:4].view(np.float32)[:] = np.array(floats, dtype=np.float32).reshape(-1, 4).T
    words[4] = [min(max(row.top_k, 0), MAX_TOP_K) for row in rows]
    return words


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SamplingColumns:
    """How the tokens of B rows are chosen, each [B] on the device of the logits; see `RowSampling`."""

    temperature: Tensor
    """[B], float32."""
    top_p: Tensor
    """[B], float32."""
    min_p: Tensor
    """[B], float32."""
    uniform: Tensor
    """[B], float32."""
    top_k: Tensor
    """[B], int32; 0 keeps all."""

    @classmethod
    def of_words(cls, words: Tensor) -> SamplingColumns:
        """Views of what `sampling_words` made, [NUM_COLUMNS, B] int32 whose rows are contiguous."""
        temperature, top_p, min_p, uniform = words[:4].view(torch.float32).unbind()
        return cls(temperature=temperature, top_p=top_p, min_p=min_p, uniform=uniform, top_k=words[4])

    @classmethod
    def build(cls, rows: Sequence[RowSampling], device: torch.device) -> SamplingColumns:
        """Move the parameters of some rows to `device`, in one copy."""
        return cls.of_words(copy_in_one([sampling_words(rows)], device)[0])


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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LogitEdits:
    """The edits of a batch as lists of logits to change: work is in proportion to histories, not to B * V."""

    places: Tensor
    """[N], int64: row * V + token, each at most once."""
    bias_places: Tensor
    """[M], int64: row * V + token, each at most once."""
    allowed_places: Tensor
    """[K], int64: row * V + token of all that stay in `allowed_rows`."""
    allowed_rows: Tensor
    """[R], int64: rows of which only some tokens stay."""
    masked_rows: Tensor
    """[n], int64: rows with a mask. For `mask_tokens`, which is called after the other edits."""
    repetition: Tensor
    """[N], float32."""
    subtract: Tensor
    """[N], float32: frequency * count + presence, for tokens of the output."""
    bias: Tensor
    """[M], float32."""
    mask_bits: Tensor
    """[n, W], int32: the masks."""

    @classmethod
    def build(
        cls,
        rows: Sequence[RowEdits],
        vocab_size: int,
        device: torch.device,
        masked_rows: Sequence[int] = (),
        mask_bits: Tensor | None = None,
    ) -> LogitEdits:
        """Count histories and move the result to `device`, in one copy.

        Args:
            rows: Only the rows that have something to change.
            vocab_size: V, the width of the logits.
            device: Where the logits are.
            masked_rows: Rows with a mask.
            mask_bits: Their masks, on the CPU.
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
        limited = [row for row in rows if row.allowed_token_ids]
        parts = {
            "places": _joined(places, np.int64),
            "bias_places": np.array(list(bias), dtype=np.int64),
            "allowed_places": _joined(
                [row.row * vocab_size + np.array(row.allowed_token_ids) for row in limited], np.int64
            ),
            "allowed_rows": np.array([row.row for row in limited], dtype=np.int64),
            "masked_rows": np.array(masked_rows, dtype=np.int64),
            "repetition": _joined(repetition, np.float32),
            "subtract": _joined(subtract, np.float32),
            "bias": np.array(list(bias.values()), dtype=np.float32),
            "mask_bits": np.empty((0, 0), dtype=np.int32) if mask_bits is None else mask_bits.numpy(),
        }
        return cls(**dict(zip(parts, copy_in_one(list(parts.values()), device), strict=True)))


def apply_edits(logits: Tensor, edits: LogitEdits) -> None:
    """Change the logits of tokens seen before, then add biases, then rule out what is not allowed, but for masks.

    Semantics:
        for each token of a row's prompt or output: l = l / repetition if l > 0 else l * repetition
        for each token of a row's output: l -= frequency * count + presence
        for each biased token: l += bias
        for each other token of a row that allows some only: l = -inf

    Args:
        logits: [B, V], float32, contiguous. Mutated.
        edits: What to change.
    """
    flat = logits.view(-1)
    if edits.places.numel():
        seen = flat[edits.places]
        seen = torch.where(seen > 0, seen / edits.repetition, seen * edits.repetition)
        flat[edits.places] = seen - edits.subtract
    if edits.bias_places.numel():
        flat[edits.bias_places] += edits.bias
    if edits.allowed_rows.numel():
        kept = flat[edits.allowed_places]
        logits.index_fill_(0, edits.allowed_rows, -torch.inf)
        flat[edits.allowed_places] = kept


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts, dtype=dtype) if parts else np.empty(0, dtype=dtype)
