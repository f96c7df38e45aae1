"""Results of steps and ends of requests, as outputs for clients. Beams of one search have outputs together."""

from __future__ import annotations

from typing import Literal

from manylora.engine.request import (
    NON_FINITE,
    ErrorInfo,
    FinishReason,
    RequestOutput,
    TokenLogprobs,
)
from manylora.engine.scheduling.beam import BeamSearch
from manylora.engine.scheduling.plan import Chunk, ChunkResult
from manylora.engine.scheduling.request_state import Beam, ModelLimits, RequestState
from manylora.engine.scheduling.request_table import RequestTable


class Outcomes:
    """Takes in the results of steps, ends requests, and keeps outputs until they are taken.

    Args:
        table: The requests.
        limits: Limits of the model.
    """

    def __init__(self, table: RequestTable, limits: ModelLimits) -> None:
        self._table = table
        self._limits = limits
        self._lengths = table.service.lengths
        self._page_tokens = table.kv.geometry.page_tokens
        self._outbox: list[RequestOutput] = []
        self.searches: dict[str, BeamSearch] = {}
        """Beam searches by the client's request id."""

    @property
    def has_outputs(self) -> bool:
        """True if there is something to `take`."""
        return bool(self._outbox)

    def take(self) -> list[RequestOutput]:
        """Outputs since the last call."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def finish(self, request_id: str, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """End a request, whatever its state; unknown and finished ids are fine. A beam ends with its whole search."""
        state = self._table.requests.get(request_id)
        search_id = (
            state.beam.search_id if state is not None and state.beam is not None else request_id
        )
        search = self.searches.pop(search_id, None)
        if search is not None:
            state = search.first
        if state is None:
            return
        for each in [state] if search is None else search.beams:
            self._table.remove(each)
        output = _ended(state, reason, error)
        if search is not None and reason == "abort":
            output.hypotheses = search.unfinished()
        self._outbox.append(output)

    def advance(self, state: RequestState, chunk: Chunk, result: ChunkResult) -> None:
        """Take in the result of a chunk of a request."""
        num_full = (chunk.start + len(chunk.token_ids)) // self._page_tokens
        goes_on = state.status == "running" and state.beam is None
        state.cursor.end(chunk, result.token_id if goes_on else None)
        if result.is_non_finite or result.failure is not None:
            self.finish(state.request_id, "error", result.failure or NON_FINITE)
            return
        output = _output(state, chunk, result, self._limits) if state.beam is None else None
        if num_full != len(state.pages.held) and state.status == "running":
            self._table.kv.publish(state, num_full)
        if state.beam is not None:
            self._advance_beam(state, state.beam, result)
        elif output is not None:
            if output.finish_reason is not None:
                self._observe_length(state, len(state.output_token_ids))
                self._table.remove(state)
            self._outbox.append(output)

    def _advance_beam(self, state: RequestState, beam: Beam, result: ChunkResult) -> None:
        if result.logprobs is None:  # the prompt goes on
            return
        step = self.searches[beam.search_id].take(state, beam, result.logprobs)
        if step is None:
            return
        for begun in step.begun:
            self._table.enter(begun)
        for ended in step.ended:
            self._table.remove(ended)
        if step.output is not None:
            del self.searches[beam.search_id]
            self._observe_length(state, len(state.output_token_ids) + 1)
            self._outbox.append(step.output)

    def _observe_length(self, state: RequestState, num_tokens: int) -> None:
        self._lengths.observe(state.place.key.tenant, state.adapter.digest, num_tokens)


def _output(
    state: RequestState, chunk: Chunk, result: ChunkResult, limits: ModelLimits
) -> RequestOutput | None:
    """Take a chunk's tokens and logprobs into the state; None while the prompt goes on. *Mutates* the state."""
    if chunk.prompt_targets:
        state.first_output.prompt_logprobs += result.prompt_logprobs
    token_id = result.token_id
    if token_id is None:
        is_all = (
            state.request.params.max_tokens == 0
            and chunk.start + len(chunk.token_ids) == state.num_prompt
        )
        return _ended(state, "length") if is_all else None
    state.output_token_ids.append(token_id)
    output = RequestOutput(request_id=state.request_id, token_ids=[token_id])
    if result.logprobs is not None:
        output.logprobs = [result.logprobs]
    if not state.first_output.is_sent:
        output.prompt_logprobs = _prompt_logprobs(state)
        state.first_output.mark(output)
    reason: FinishReason | None = _finish_reason(state, token_id, limits)
    if reason == "stop":
        output.stop_token_id = token_id
    elif state.matcher is not None and not state.matcher.take([token_id]):
        reason = "error"
        output.error = state.matcher.error()
    elif state.matcher is not None and state.matcher.is_done:
        reason = "stop"
    if reason is not None:
        output.finish_reason = reason
        output.computed_prompt_tokens = state.num_prompt
    return output


def _ended(
    state: RequestState, reason: FinishReason, error: ErrorInfo | None = None
) -> RequestOutput:
    """Last output of a request that ends without a token."""
    num_computed = max(state.place.num_charged, state.cursor.num_complete)
    output = RequestOutput(
        request_id=state.request_id,
        prompt_logprobs=_prompt_logprobs(state) if reason == "length" else None,
        finish_reason=reason,
        error=error,
        computed_prompt_tokens=min(num_computed, state.num_prompt),
    )
    state.first_output.mark(output)
    return output


def _prompt_logprobs(state: RequestState) -> list[TokenLogprobs | None] | None:
    return state.first_output.take_prompt_logprobs() if state.pages.num_computed else None


def _finish_reason(
    state: RequestState, token_id: int, limits: ModelLimits
) -> Literal["stop", "length"] | None:
    params = state.request.params
    if token_id in params.stop_token_ids or (
        not params.ignore_eos and token_id in limits.eos_token_ids
    ):
        return "stop"
    # With the prompt, `max_tokens` are never more than the model takes.
    return "length" if len(state.output_token_ids) >= params.max_tokens else None
