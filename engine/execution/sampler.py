"""Chooses tokens from logits, with draws that depend on the request alone.

One uniform per token comes from Philox, keyed by the request's seed and choice index and counted by its output index:
neither the batch, nor its order, nor a preemption changes a draw. Knows nothing of chunks and adapters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from weft.engine.request import TokenLogprobs
from weft.engine.scheduling.plan import SampleSpec
from weft.kernels.dispatch import Kernels
from weft.kernels.sampling import PenaltyTensors, RowPenalties, RowSampling, apply_penalties, keep_only

DRAW_BITS = 24
"""Bits of a draw: as many as float32 holds exactly, so that the greatest draw stays below 1."""
MAX_LOGIT = 1e30
"""A row whose largest logit has a larger magnitude is not a distribution: divided by a temperature it may overflow."""
_SEED_MASK = (1 << 64) - 1


@dataclass(slots=True)
class RowMasks:
    """What grammars leave of some rows of logits."""

    rows: list[int]
    """Which rows."""
    bits: torch.Tensor
    """[rows, words], int32; see `kernels.plain.sampling.mask_tokens`."""
    dead: set[int] = field(default_factory=set)
    """Rows of which they leave nothing."""


class PhiloxDraws:
    """Uniform numbers by (seed, choice index, output index); the same in every process."""

    def __init__(self) -> None:
        self._generator = np.random.Philox(0)
        self._state = self._generator.state

    def uniform(self, seed: int, choice_index: int, output_index: int) -> float:
        """A draw from 0 up to but not including 1."""
        # Setting the state of one generator is ten times faster than making one per draw.
        self._state["state"]["key"][:] = (seed & _SEED_MASK, choice_index)
        self._state["state"]["counter"][:] = (output_index, 0, 0, 0)
        self._state["buffer_pos"] = len(self._state["buffer"])
        self._generator.state = self._state
        return float(int(self._generator.random_raw()) >> (64 - DRAW_BITS)) / (1 << DRAW_BITS)


class Sampler:
    """From logits to tokens.

    Args:
        kernels: The operations for the device of the logits.
        eos_token_ids: Tokens that end a generation; `min_tokens` holds them back.
    """

    def __init__(self, kernels: Kernels, eos_token_ids: Collection[int] = ()) -> None:
        self._kernels = kernels
        self._eos_token_ids = tuple(eos_token_ids)
        self._draws = PhiloxDraws()

    def sample(
        self, logits: torch.Tensor, specs: Sequence[SampleSpec], masks: RowMasks | None = None
    ) -> list[tuple[int | None, TokenLogprobs | None]]:
        """Choose one token per row.

        A row with NaN or an overflow, in the logits or after penalties, yields no token; the others are not touched.

        Args:
            logits: [n, vocab_size], float32, contiguous. Mutated by penalties.
            specs: How, per row.
            masks: What grammars leave of some rows. *Mutated*: gets the rows of which nothing is left.

        Returns:
            Per row the token, None where the row is no distribution or nothing is left of it, and its log-probabilities
            under the unchanged logits where they are asked for.
        """
        reported = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None]
        original = logits[reported] if reported else logits
        changed = [(row, spec) for row, spec in enumerate(specs) if spec.changes_logits]
        if changed:
            penalties = [self._penalties(row, spec) for row, spec in changed]
            apply_penalties(logits, PenaltyTensors.build(penalties, logits.shape[1], logits.device))
            for row, spec in changed:
                if spec.params.allowed_token_ids:
                    keep_only(logits[row], spec.params.allowed_token_ids)
        non_finite = _clear_non_finite_rows(logits)
        if masks is not None:
            non_finite |= self._mask(logits, masks)
        tokens: list[int] = self._kernels.sample(logits, [self._sampling(spec) for spec in specs]).tolist()

        found: dict[int, TokenLogprobs] = {}
        if reported:
            num_top = [specs[row].params.logprobs or 0 for row in reported]
            logprobs = self.logprobs(original, [tokens[row] for row in reported], max(num_top))
            found = {
                row: replace(entry, top_ids=entry.top_ids[:count], top_logprobs=entry.top_logprobs[:count])
                for row, entry, count in zip(reported, logprobs, num_top, strict=True)
            }
        return [(None, None) if row in non_finite else (token, found.get(row)) for row, token in enumerate(tokens)]

    def logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens; NaN where a row is no distribution.

        Args:
            logits: [n, vocab_size], float32. Mutated where a row is no distribution.
            token_ids: One per row.
            num_top: Alternatives per row.
        """
        non_finite = _clear_non_finite_rows(logits)
        tokens = torch.tensor(token_ids, dtype=torch.int64).to(logits.device)
        columns = self._kernels.logprobs(logits, tokens, min(num_top, logits.shape[1]))
        chosen, ranks, top_ids, top_logprobs = (column.tolist() for column in columns)
        return [
            TokenLogprobs(
                token_id=token,
                logprob=math.nan if row in non_finite else chosen[row],
                rank=ranks[row],
                top_ids=top_ids[row],
                top_logprobs=top_logprobs[row],
            )
            for row, token in enumerate(token_ids)
        ]

    def _mask(self, logits: torch.Tensor, masks: RowMasks) -> set[int]:
        """Rule out what grammars do not allow; returns the rows of which nothing is left, which become zeros."""
        rows = torch.tensor(masks.rows, dtype=torch.int64).to(logits.device)
        self._kernels.mask_tokens(logits, rows, masks.bits.to(logits.device))
        is_dead = (logits.index_select(0, rows).amax(-1) == -math.inf).tolist()
        masks.dead.update(row for row, dead in zip(masks.rows, is_dead, strict=True) if dead)
        for row in masks.dead:
            logits[row] = 0.0
        return masks.dead

    def _sampling(self, spec: SampleSpec) -> RowSampling:
        params = spec.params
        if params.is_greedy:
            return RowSampling(temperature=0.0)
        uniform = self._draws.uniform(spec.seed, spec.choice_index, spec.output_index)
        return RowSampling(params.temperature, params.top_k, params.top_p, params.min_p, uniform)

    def _penalties(self, row: int, spec: SampleSpec) -> RowPenalties:
        params, bias = spec.params, spec.params.logit_bias
        held_back = (*self._eos_token_ids, *params.stop_token_ids) if spec.output_index < params.min_tokens else ()
        if held_back or params.bad_words:
            bias = {**bias, **dict.fromkeys((*held_back, *_ends_of_bad_words(spec)), -math.inf)}
        return RowPenalties(
            row=row,
            prompt_token_ids=spec.prompt_token_ids,
            output_token_ids=spec.output_token_ids if params.needs_history else (),
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            bias=bias,
        )


def _ends_of_bad_words(spec: SampleSpec) -> Iterator[int]:
    """The tokens that would complete one of the sequences that are not to be generated."""
    for *start, end in spec.params.bad_words:
        if not start or spec.output_token_ids[-len(start) :] == start:
            yield end


def _clear_non_finite_rows(logits: torch.Tensor) -> set[int]:
    """Zero the rows that no kernel can draw from, and say which they are. *Mutates* the logits."""
    is_sound = (logits.amax(-1).abs() < MAX_LOGIT).tolist() if len(logits) else []
    non_finite = [row for row, sound in enumerate(is_sound) if not sound]
    for row in non_finite:
        logits[row] = 0.0
    return set(non_finite)
