"""Beam search over requests of the scheduler: each beam is one, and all take a step when all have their results.

The rules are those of `generate(num_beams=...)` in transformers; results are the same token for token. This module
touches no pages and no queue: it says which beams end and which begin, and the scheduler acts on it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import NamedTuple

from manylora.engine.request import GenerationRequest, RequestOutput, TokenLogprobs
from manylora.engine.sampling_params import BeamParams, SamplingParams
from manylora.engine.scheduling.request_state import Beam, ModelLimits, RequestState
from manylora.errors import InvalidRequestError

MAX_FORKS = 1 << 24
"""Beams of one search, all in all: they arrive as fractions of what arrives between two requests."""


class BeamStep(NamedTuple):
    """Beams that a step of a search ends and begins, and its output."""

    ended: list[RequestState]
    begun: list[RequestState]
    output: RequestOutput | None
    """Last output, when the search is over; then all beams are among `ended`."""


class _Candidate(NamedTuple):
    """A beam and a token that may come next."""

    score: float
    """Sum of log-probabilities, with the token's."""
    parent: RequestState
    beam: Beam
    """The parent's."""
    rank: int
    """Index of the token in the beam's result."""
    token_id: int


class BeamSearch:
    """Beams of one request.

    Args:
        request: As the client sent it.
        beam: Its `beam`.
        limits: Limits of the model.
        max_running: Requests that may have pages at a time.

    Raises:
        InvalidRequestError: The search is wider than what may run or than the vocabulary, wants log-probabilities of
            the prompt, or no token.
    """

    def __init__(
        self, request: GenerationRequest, beam: BeamParams, limits: ModelLimits, max_running: int
    ) -> None:
        params = request.params
        stops = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else limits.eos_token_ids
        )
        # Of each beam, as many tokens that go on as there are beams, whatever else ends it.
        self._num_top = beam.width + len(stops)
        widest = min(max_running, limits.vocab_size - len(stops))
        if beam.width > widest:
            message = f"A beam search may be {widest} beams wide here (scheduler.max_running), got {beam.width}."
            raise InvalidRequestError(f"{message} Lower n or best_of.", param="n")
        if (
            params.prompt_logprobs is not None
            or params.max_tokens == 0
            or request.generated_token_ids
        ):
            message = "Beam search needs max_tokens of at least 1, and takes no prompt_logprobs and generated tokens."
            raise InvalidRequestError(message, param="use_beam_search")
        self._request = request
        self._params = beam
        self._stops = stops
        self._numbers = itertools.count(1)
        self.beams: list[RequestState] = []
        """Beams that live, best first."""
        self._hypotheses: list[tuple[float, RequestOutput]] = []
        """Best finished sequences so far with their scores, best first, at most as many as beams."""

    @property
    def num_forks(self) -> int:
        """Beams that begin with one token, as soon as they get their pages."""
        return sum(state.status == "waiting" and state.source is not None for state in self.beams)

    def unfinished(self) -> list[RequestOutput]:
        """Outputs of the beams so far."""
        request_id = self._request.request_id
        return [
            RequestOutput(request_id=request_id, token_ids=list(state.output_token_ids))
            for state in self.beams
        ]

    def begin(self) -> GenerationRequest:
        """Request of the first beam. Give its state to `start`."""
        num_top = max(self._num_top, self._request.params.logprobs or 0)
        params = SamplingParams(
            max_tokens=self._request.params.max_tokens, temperature=0.0, logprobs=num_top
        )
        return replace(self._request, params=params)

    def start(self, first: RequestState) -> None:
        """Begin with the prompt alone; *mutates* the state."""
        first.beam = Beam(search_id=self._request.request_id)
        self.beams = [first]
        self.first = first

    def take(self, state: RequestState, beam: Beam, result: TokenLogprobs) -> BeamStep | None:
        """Take in the candidates that follow one beam; None until those of all beams are known. *Mutates* the beams."""
        beam.result = result
        if not all(each.is_idle for each in self.beams):
            return None
        length = len(state.output_token_ids) + 1
        width = self._params.width
        is_last = length >= self._request.params.max_tokens
        candidates = self._candidates()
        for candidate in candidates[:width]:
            if is_last or candidate.token_id in self._stops:
                self._keep(candidate, length)
        chosen = [candidate for candidate in candidates if candidate.token_id not in self._stops][
            :width
        ]
        if is_last or self._is_done(chosen[0].score, length):
            return BeamStep(self.beams, [], self._output())
        return self._go_on(chosen)

    def _candidates(self) -> list[_Candidate]:
        """Best continuations, best first: at least `width` that go on, and all better ones."""
        found = [
            _Candidate(beam.score + logprob, state, beam, rank, token_id)
            for state in self.beams
            if (beam := state.beam) is not None and (result := beam.result) is not None
            for rank, (token_id, logprob) in enumerate(
                zip(result.top_ids, result.top_logprobs, strict=True)
            )
            if rank < self._num_top
        ]
        num_best = self._params.width * (1 + len(self._stops))
        return heapq.nlargest(num_best, found, key=attrgetter("score"))

    def _beam(self, candidate: _Candidate) -> Beam:
        return Beam(
            search_id=self._request.request_id,
            score=candidate.score,
            logprobs=self._logprobs(candidate) or [],
        )

    def _logprobs(self, candidate: _Candidate) -> list[TokenLogprobs] | None:
        """Log-probabilities of all tokens, the next one's among them; None where nobody asked."""
        num_top = self._request.params.logprobs
        result = candidate.beam.result
        if num_top is None or result is None:
            return None
        chosen = TokenLogprobs(
            token_id=candidate.token_id,
            logprob=result.top_logprobs[candidate.rank],
            rank=candidate.rank + 1,
            top_ids=result.top_ids[:num_top],
            top_logprobs=result.top_logprobs[:num_top],
        )
        return [*candidate.beam.logprobs, chosen]

    def _keep(self, candidate: _Candidate, length: int) -> None:
        """Keep a finished sequence if it is among the best."""
        is_stop = candidate.token_id in self._stops
        hypothesis = RequestOutput(
            request_id=self._request.request_id,
            token_ids=[*candidate.parent.output_token_ids, candidate.token_id],
            finish_reason="stop" if is_stop else "length",
            stop_token_id=candidate.token_id if is_stop else None,
            logprobs=self._logprobs(candidate),
        )
        self._hypotheses.append((self._score(candidate.score, length), hypothesis))
        self._hypotheses.sort(key=itemgetter(0), reverse=True)
        del self._hypotheses[self._params.width :]

    def _is_done(self, best: float, length: int) -> bool:
        """True if no beam can improve on the hypotheses, as far as `early_stopping` wants to know."""
        if len(self._hypotheses) < self._params.width:
            return False
        stopping = self._params.early_stopping
        penalty = self._params.length_penalty
        if stopping is True or self._params.width == 1:
            return True  # transformers has no beam search of one beam
        best_length = (
            self._request.params.max_tokens if stopping == "never" and penalty > 0 else length
        )
        return self._score(best, best_length) <= self._hypotheses[-1][0]

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self._params.length_penalty)

    def _go_on(self, chosen: list[_Candidate]) -> BeamStep:
        """Give each parent its best continuation, and begin a beam for each further one."""
        beams: list[RequestState] = []
        begun: list[RequestState] = []
        continued: list[_Candidate] = []
        for candidate in chosen:
            if candidate.parent in beams:
                number = next(self._numbers)
                fork = candidate.parent.fork(
                    f"{self._request.request_id}/{number}",
                    self.first.place.arrival_index + number / MAX_FORKS,
                    candidate.token_id,
                    self._beam(candidate),
                )
                begun.append(fork)
                beams.append(fork)
            else:
                continued.append(candidate)
                beams.append(candidate.parent)
        given_up = [state for state in self.beams if state not in beams]
        for candidate in continued:  # only now: forks go on from what stood before
            candidate.parent.beam = self._beam(candidate)
            candidate.parent.output_token_ids.append(candidate.token_id)
        self.beams = beams
        return BeamStep(ended=given_up, begun=begun, output=None)

    def _output(self) -> RequestOutput:
        hypotheses = [hypothesis for _, hypothesis in self._hypotheses]
        best = hypotheses[0]
        output = RequestOutput(
            request_id=best.request_id, finish_reason=best.finish_reason, hypotheses=hypotheses
        )
        self.first.first_output.mark(output, best)
        return output
