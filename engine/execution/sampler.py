"""Chooses tokens from logits, with draws that depend on the request alone.

Philox gives one uniform number per token. Its key is the request's seed and choice index, its counter the output index,
so neither the batch, nor its order, nor a preemption changes a draw. Knows nothing of chunks and adapters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from manylora.engine.request import TokenLogprobs
from manylora.engine.scheduling.plan import SampleSpec
from manylora.kernels.dispatch import Kernels
from manylora.kernels.packed_copy import copy_in_one
from manylora.kernels.sampling import (
    RowSampling,
    apply_edits,
    sampling_words,
)

DRAW_BITS = 24
"""Bits of a draw. float32 holds them exactly, so the greatest draw stays below 1."""
DRAWS_AHEAD = 32
"""Draws of a request that are made at once."""
KEPT_DRAWS = 512
"""Number of requests whose draws are kept, a kilobyte each: several times the number that usually decode at once."""
GREEDY = RowSampling(temperature=0.0)
_SEED_MASK = (1 << 64) - 1
Sampled = tuple[int, TokenLogprobs | None]
"""A token, or a code below 0 as `Kernels.sample` gives it; and, if they are asked for, the token's log-probabilities
under the unchanged logits."""


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Tokens that grammars allow in some rows of logits."""

    rows: list[int]
    """Rows of the logits."""
    bits: torch.Tensor
    """[rows, words], int32; see `kernels.plain.sampling.mask_tokens`."""


class PhiloxDraws:
    """Uniform numbers by (seed, choice index, output index). They are equal in every process."""

    def __init__(self) -> None:
        self._generator = np.random.Philox(0)
        self._state = self._generator.state
        self._ahead = functools.lru_cache(KEPT_DRAWS)(self._draw)

    def uniform(self, seed: int, choice_index: int, output_index: int) -> float:
        """A draw from 0 up to but not including 1."""
        return self._ahead(seed, choice_index, output_index // DRAWS_AHEAD)[
            output_index % DRAWS_AHEAD
        ]

    def _draw(self, seed: int, choice_index: int, block: int) -> list[float]:
        # Setting the state of one generator is ten times faster than making a generator per draw.
        self._state["state"]["key"][:] = (seed & _SEED_MASK, choice_index)
        self._state["state"]["counter"][:] = (block * DRAWS_AHEAD, 0, 0, 0)
        self._state["buffer_pos"] = len(self._state["buffer"])
        self._generator.state = self._state
        # One count of the generator gives several numbers, of which a draw is the first.
        raw = self._generator.random_raw(DRAWS_AHEAD * len(self._state["buffer"]))[
            :: len(self._state["buffer"])
        ]
        drawn: list[float] = ((raw >> (64 - DRAW_BITS)) / (1 << DRAW_BITS)).tolist()
        return drawn


class Sampler:
    """Chooses tokens from logits. A step program calls the parts of `sample` itself.

    Args:
        kernels: The operations for the device of the logits.
        eos_token_ids: Tokens that end a generation. `min_tokens` holds them back.
    """

    def __init__(self, kernels: Kernels, eos_token_ids: Collection[int] = ()) -> None:
        self.kernels = kernels
        self._eos_token_ids = tuple(eos_token_ids)
        self._draws = PhiloxDraws()

    def sample(
        self,
        logits: torch.Tensor,
        specs: Sequence[SampleSpec],
        masks: RowMasks | None = None,
        codes: torch.Tensor | None = None,
    ) -> list[Sampled]:
        """Choose one token per row.

        A row with NaN or an overflow, in the logits or after penalties, yields no token. Other rows are not affected.

        Args:
            logits: [n, vocab_size], float32, contiguous. Mutated by penalties.
            specs: Sampling parameters of each row.
            masks: Tokens that grammars allow in some rows.
            codes: [n], int32: gets the result of `Kernels.sample`; None makes one.
        """
        words, reported = copy_in_one(
            [self.columns(specs), self.reported_rows(specs)], logits.device
        )
        if codes is None:
            codes = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        sample = partial(self.kernels.sample, logits, words, codes)
        found = self.choose(logits, specs, masks, reported, sample, codes)
        return self.results(codes.tolist(), specs, None if found is None else found.cpu())

    def choose(
        self,
        logits: torch.Tensor,
        specs: Sequence[SampleSpec],
        masks: RowMasks | None,
        reported: torch.Tensor,
        sample: Callable[[], object],
        codes: torch.Tensor,
    ) -> torch.Tensor | None:
        """Edit logits and choose a token per row, without reading from the device.

        Args:
            logits: As in `sample`.
            specs: As in `sample`.
            masks: As in `sample`.
            reported: The `reported_rows`, on the device.
            sample: Function that writes the chosen tokens to `codes`.
            codes: [at least n], int32.

        Returns:
            The `logprob_words` of the rows in `reported`; None if there are none.
        """
        original = logits.index_select(0, reported) if len(reported) else logits
        if masks is not None or any(spec.changes_logits for spec in specs):
            self.edit(logits, specs, masks)
        sample()
        if not len(reported):
            return None
        num_top = max(spec.params.logprobs or 0 for spec in specs)
        return self.logprob_words(original, codes.index_select(0, reported), num_top)

    def columns(self, specs: Sequence[SampleSpec]) -> np.ndarray:
        """Sampling parameters of n rows, [NUM_COLUMNS, n] int32; see `sampling_words`."""
        return sampling_words([self._sampling(spec) for spec in specs])

    def edit(
        self, logits: torch.Tensor, specs: Sequence[SampleSpec], masks: RowMasks | None = None
    ) -> None:
        """Apply penalties and biases, and rule out tokens that a row does not allow, with one copy to the device.

        Args:
            logits: [n, vocab_size], float32, contiguous. Mutated.
            specs: Sampling parameters of each row.
            masks: Tokens that grammars allow in some rows.
        """
        mask_arrays = (
            [np.array(masks.rows, dtype=np.int64), masks.bits.numpy()] if masks is not None else []
        )
        moved = copy_in_one(
            [*mask_arrays, *self._edit_arrays(specs, logits.shape[1])], logits.device
        )
        apply_edits(logits, moved[len(mask_arrays) :])
        if masks is not None:
            self.kernels.mask_tokens(logits, *moved[:2])

    def reported_rows(self, specs: Sequence[SampleSpec]) -> np.ndarray:
        """The rows whose log-probabilities are asked for, int64."""
        return np.array(
            [row for row, spec in enumerate(specs) if spec.params.logprobs is not None],
            dtype=np.int64,
        )

    def logprob_words(
        self, logits: torch.Tensor, codes: torch.Tensor, num_top: int
    ) -> torch.Tensor:
        """Compute log-probabilities of sampled tokens as one tensor for `results`, without reading from the device.

        Args:
            logits: [n, vocab_size], float32, before `edit`.
            codes: [n], int32: result of `Kernels.sample`.
            num_top: Alternatives per row.

        Returns:
            [n, 2 + 2 * min(num_top, vocab_size)], int32: log-probability as bits of float32, rank, ids of the
            alternatives, their log-probabilities.
        """
        tokens = codes.clamp(min=0).long()
        chosen, rank, top_ids, top = self.kernels.logprobs(
            logits, tokens, min(num_top, logits.shape[1])
        )
        bits = (
            chosen[:, None].view(torch.int32),
            rank[:, None].int(),
            top_ids.int(),
            top.view(torch.int32),
        )
        return torch.cat(bits, dim=1)

    def results(
        self,
        codes: Sequence[int],
        specs: Sequence[SampleSpec],
        logprob_words: torch.Tensor | None = None,
    ) -> list[Sampled]:
        """Join tokens and their log-probabilities.

        Args:
            codes: Result of `Kernels.sample`.
            specs: Sampling parameters of each row.
            logprob_words: The `logprob_words` of the `reported_rows`, on the CPU; None if there are none.
        """
        found: dict[int, TokenLogprobs] = {}
        if logprob_words is not None:
            rows = self.reported_rows(specs).tolist()
            counts = [specs[row].params.logprobs for row in rows]
            found = dict(
                zip(
                    rows,
                    _token_logprobs(logprob_words, [codes[row] for row in rows], counts),
                    strict=True,
                )
            )
        return [(code, found.get(row) if code >= 0 else None) for row, code in enumerate(codes)]

    def logprobs(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens; NaN for a row that is no distribution.

        Args:
            logits: [n, vocab_size], float32.
            token_ids: One token per row.
            num_top: Alternatives per row.
        """
        tokens = copy_in_one([np.array(token_ids, dtype=np.int32)], logits.device)[0]
        return _token_logprobs(
            self.logprob_words(logits, tokens, num_top).cpu(), token_ids, [None] * len(token_ids)
        )

    def _sampling(self, spec: SampleSpec) -> RowSampling:
        params = spec.params
        if params.is_greedy:
            return GREEDY
        uniform = self._draws.uniform(spec.seed, spec.choice_index, spec.output_index)
        return RowSampling(params.temperature, params.top_k, params.top_p, params.min_p, uniform)

    def _edit_arrays(self, specs: Sequence[SampleSpec], vocab_size: int) -> list[np.ndarray]:
        """Operands of `apply_edits`: their size grows with histories, not with the rows' vocabularies."""
        nowhere = np.empty(0, dtype=np.int64)
        places = [nowhere]
        penalties = [np.empty((2, 0), dtype=np.float32)]
        bias: dict[int, float] = {}
        allowed = [nowhere]
        allowed_rows = []
        for row, spec in enumerate(specs):
            if not spec.changes_logits:
                continue
            params = spec.params
            first = row * vocab_size
            output = spec.output_token_ids if params.needs_history else ()
            tokens, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
            only_prompt = np.setdiff1d(np.asarray(spec.prompt_token_ids, dtype=np.int64), tokens)
            places.append(first + np.concatenate((tokens, only_prompt)))
            penalties.append(np.zeros((2, len(places[-1])), dtype=np.float32))
            penalties[-1][0] = params.repetition_penalty
            penalties[-1][1, : len(tokens)] = (
                params.frequency_penalty * counts + params.presence_penalty
            )
            ruled_out = dict.fromkeys(self._ruled_out(spec), -math.inf)
            bias |= {
                first + token: addend
                for token, addend in {**params.logit_bias, **ruled_out}.items()
                if 0 <= token < vocab_size
            }
            if params.allowed_token_ids:
                allowed.append(first + np.array(params.allowed_token_ids, dtype=np.int64))
                allowed_rows.append(row)
        return [
            np.concatenate(places),
            np.concatenate(penalties, axis=1),
            np.array(list(bias), dtype=np.int64),
            np.array(list(bias.values()), dtype=np.float32),
            np.concatenate(allowed),
            np.array(allowed_rows, dtype=np.int64),
        ]

    def _ruled_out(self, spec: SampleSpec) -> Iterator[int]:
        """Tokens that would end the output too early, or complete one of the `bad_words`."""
        params = spec.params
        if spec.output_index < params.min_tokens:
            yield from (*self._eos_token_ids, *params.stop_token_ids)
        for *start, end in params.bad_words:
            if not start or spec.output_token_ids[-len(start) :] == start:
                yield end


def _token_logprobs(
    words: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int | None]
) -> list[TokenLogprobs]:
    """Read the result of `Sampler.logprob_words`, with `num_top` alternatives of each row; None takes all."""
    ids = slice(2, words.shape[1] // 2 + 1)
    rows = zip(token_ids, counts, words.tolist(), words.view(torch.float32).tolist(), strict=True)
    return [
        TokenLogprobs(
            token_id=token,
            logprob=numbers[0],
            rank=bits[1],
            top_ids=bits[ids][:count],
            top_logprobs=numbers[ids.stop :][:count],
        )
        for token, count, bits, numbers in rows
    ]
