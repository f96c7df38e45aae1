"""Requests and outputs of the engine, as plain data that any transport can carry."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

from manylora.adapters.ref import AdapterRef, AdapterTier
from manylora.engine.sampling_params import BeamParams, SamplingParams
from manylora.errors import AdapterError, CapacityError, EngineError, ManyloraError, RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorKind = Literal["request", "adapter", "capacity", "internal"]
AdapterState = AdapterTier | Literal["base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowKey:
    """Facts that decide the order of admission. The engine knows ids, no names."""

    lane: int = 0
    """Lane: 0 is interactive, higher lanes come after it."""
    tenant: str = ""
    """Id of the tenant, which the engine only compares."""
    weight: float = 1.0
    """Weight of the tenant in the fair order."""
    priority: int = 0
    """Order among requests of one tenant and adapter: lower goes first. It never changes the tenant's share."""
    deadline_s: float | None = None
    """Longest time from arrival to the first step, in seconds. A request that is later ends with `deadline.queue`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Grammar that an output follows."""

    text: str
    """Text in Lark, as llguidance reads it."""
    digest: str
    """SHA-256 of the text, in hexadecimal."""

    @classmethod
    def of(cls, text: str) -> Grammar:
        """Make the grammar with this text."""
        return cls(text=text, digest=hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation for a client."""

    request_id: str
    """Id that the server makes, unique while the engine lives."""
    prompt_token_ids: list[int]
    params: SamplingParams
    adapter: AdapterRef | None = None
    """Adapter; None is the base model."""
    flow: FlowKey = field(default_factory=FlowKey)
    choice_index: int = 0
    """Index among n choices; part of the sampling key."""
    generated_token_ids: list[int] = field(default_factory=list)
    """Tokens that were generated before, by another engine. They count as output."""
    fork_of: str | None = None
    """Request with choice 0 of the same prompt, sent before this one, whose KV cache of the prompt is shared."""
    beam: BeamParams | None = None
    """Beam search. It uses only `max_tokens`, `logprobs` and the stop rules of `params`, and has one output."""
    grammar: Grammar | None = None
    """Grammar of the output, which is a text of it, or the beginning of a text if `max_tokens` cuts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position: natural logarithms of the unfiltered model distribution."""

    token_id: int
    """Token at the position."""
    logprob: float
    rank: int
    """Rank of the token; 1 is the most likely."""
    top_ids: list[int] = field(default_factory=list)
    """Most likely tokens, in this order."""
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """Error that ended a request."""

    code: str
    """Code of the fitting class in `manylora.errors`."""
    message: str
    kind: ErrorKind = "request"
    """Cause, which the server maps to an HTTP status."""


INTERNAL = ErrorInfo(
    code=EngineError.code,
    message="The engine failed while it computed this request.",
    kind="internal",
)
"""Fault of the engine. The log has the cause, which clients are not told."""

NON_FINITE = ErrorInfo(
    code="scores_not_finite",
    message="The scores of the next token are not finite numbers. An adapter whose training diverged does that, and so "
    "does a repetition_penalty close to 0, or allowed_token_ids and bad_words that leave no token. Change it and send "
    "the request again.",
)
"""Fault of the request or its adapter. Other requests of the step go on."""

GRAMMAR_DEAD_END = ErrorInfo(
    code="grammar_dead_end",
    message="No token can come next that the grammar or schema of this request allows. logit_bias, bad_words and "
    "allowed_token_ids may rule out what it needs, or this model has no token for it.",
)
"""Dead end of a grammar: no answer begins with the output so far."""

GRAMMAR_TOO_COMPLEX = ErrorInfo(
    code="grammar_too_complex",
    message="The grammar or schema of this request takes too long to follow: it is ambiguous, or has patterns that "
    "repeat too much. Make it simpler.",
)

EXPIRED = ErrorInfo(
    code="deadline.queue",
    message="The request waited for longer than its deadline allows and was not started. Send it again later.",
    kind="capacity",
)

PAUSED = ErrorInfo(
    code="server.paused",
    message="The server was paused, which ended this request. Send it again: it waits until the server goes on.",
    kind="capacity",
)

ERRORS_BY_KIND: dict[ErrorKind, type[ManyloraError]] = {
    "request": RequestError,
    "adapter": AdapterError,
    "capacity": CapacityError,
}
"""Classes of errors that clients are told, by kind. All others are `INTERNAL`."""


def error_info(error: ManyloraError) -> ErrorInfo:
    """Error for the client: code and message of `error`, or `INTERNAL` for a fault of the engine."""
    kind = next(
        (kind for kind, raised in ERRORS_BY_KIND.items() if isinstance(error, raised)), None
    )
    return (
        INTERNAL if kind is None else ErrorInfo(code=error.code, message=error.message, kind=kind)
    )


@dataclass(
    slots=True, kw_only=True
)  # frozen instances take three times as long to make, and a step makes one per row
class RequestOutput:
    """Result of one step, or of a refusal, for one request. The last one has `finish_reason`."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    """New tokens in order."""
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of each new token, if they are asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities of each prompt token, None for the first. They come once, with or before the first token."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """End-of-sequence or stop token that ended it. It is the last of `token_ids`."""
    error: ErrorInfo | None = None
    adapter_state: AdapterState | None = None
    """Place of the adapter when the request arrived. It comes once, with the first output."""
    queue_s: float | None = None
    """Seconds from arrival to the first step. It comes once, with the first output."""
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache. The number comes once, with the first output."""
    computed_prompt_tokens: int = 0
    """Prompt tokens whose keys and values were computed, or taken from the prefix cache, before the request ended; 0 if
    it never left the queue. Tokens that were computed again after a preemption count once. The number comes with the
    last output."""
    hypotheses: list[RequestOutput] | None = None
    """Hypotheses of an ended beam search, as many as its width, best first, each as if it had been generated alone. An
    aborted search has its beams here."""
