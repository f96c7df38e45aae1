"""What a finished step means for one request: its tokens, its logprobs, its end. Touches no pages."""

from __future__ import annotations

from typing import Literal

from weft.engine.fit import ModelLimits
from weft.engine.plan import Chunk, ChunkResult
from weft.engine.request import FinishReason, RequestError, RequestOutput, TokenLogprobs
from weft.engine.request_state import RequestState


def advance(state: RequestState, chunk: Chunk, result: ChunkResult, limits: ModelLimits) -> RequestOutput | None:
    """Take a chunk's result into the state; None while the prompt goes on.

    *Mutates* the state. The request has ended when the output has a `finish_reason`.
    """
    state.num_computed = chunk.start + len(chunk.token_ids)
    if chunk.prompt_targets:
        state.prompt_logprobs += result.prompt_logprobs
    if state.num_left:
        return None
    token_id = result.token_id
    if token_id is None:
        return ended(state, "length")
    state.output_token_ids.append(token_id)
    reason = _finish_reason(state, token_id, limits)
    facts = state.first_output_facts()
    return RequestOutput(
        request_id=state.request_id,
        token_ids=[token_id],
        logprobs=[result.logprobs] if result.logprobs is not None else None,
        prompt_logprobs=_prompt_logprobs(state),
        finish_reason=reason,
        stop_token_id=token_id if reason == "stop" else None,
        adapter_state=facts.adapter_state,
        queue_s=facts.queue_s,
        cached_tokens=facts.cached_tokens,
        computed_prompt_tokens=state.num_prompt if reason else 0,
    )


def ended(state: RequestState, reason: FinishReason, error: RequestError | None = None) -> RequestOutput:
    """The last output of a request that ends without a token."""
    facts = state.first_output_facts()
    return RequestOutput(
        request_id=state.request_id,
        prompt_logprobs=_prompt_logprobs(state) if reason == "length" else None,
        finish_reason=reason,
        error=error,
        adapter_state=facts.adapter_state,
        queue_s=facts.queue_s,
        cached_tokens=facts.cached_tokens,
        computed_prompt_tokens=min(max(state.num_charged, state.num_computed), state.num_prompt),
    )


def _prompt_logprobs(state: RequestState) -> list[TokenLogprobs | None] | None:
    if not state.keeps_prompt_logprobs or state.num_computed == 0:
        return None
    state.sent_prompt_logprobs = True
    return [None, *state.prompt_logprobs]


def _finish_reason(state: RequestState, token_id: int, limits: ModelLimits) -> Literal["stop", "length"] | None:
    params = state.request.params
    if token_id in params.stop_token_ids or (not params.ignore_eos and token_id in limits.eos_token_ids):
        return "stop"
    is_full = state.num_tokens >= limits.max_model_len
    return "length" if is_full or len(state.output_token_ids) >= params.max_tokens else None
