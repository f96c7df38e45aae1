"""What goes into the engine and what comes out, as plain data that any transport can carry."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

from manylora.adapters.ref import AdapterRef, AdapterTier
from manylora.engine.sampling_params import BeamParams, SamplingParams
from manylora.errors import AdapterError, CapacityError, EngineError, ManyloraError
from manylora.errors import RequestError as RefusedError

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorKind = Literal["request", "adapter", "capacity", "internal"]
AdapterState = AdapterTier | Literal["base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowKey:
    """What the order of admission depends on. The engine knows ids, no names."""

    lane: int = 0
    """0 is interactive; higher lanes go after it."""
    tenant: str = ""
    """Id of the tenant; it means nothing to the engine."""
    weight: float = 1.0
    """Share of the tenant under fair order."""
    priority: int = 0
    """Order among requests of one adapter of one tenant: lower goes first. It never changes a tenant's share."""
    deadline_s: float | None = None
    """Seconds from arrival to the first step, at most; a request that starts no sooner ends with `deadline.queue`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an output is held to."""

    text: str
    """As llguidance reads it, in Lark."""
    digest: str
    """SHA-256 of the text, in hexadecimal."""

    @classmethod
    def of(cls, text: str) -> Grammar:
        """The grammar with this text."""
        return cls(text=text, digest=hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation asked for by a client."""

    request_id: str
    """Unique while the engine lives; made by the server."""
    prompt_token_ids: list[int]
    params: SamplingParams
    adapter: AdapterRef | None = None
    """None is the base model."""
    flow: FlowKey = field(default_factory=FlowKey)
    choice_index: int = 0
    """Which of n choices this is; part of the sampling key."""
    generated_token_ids: list[int] = field(default_factory=list)
    """Tokens generated earlier elsewhere; they count as output."""
    fork_of: str | None = None
    """The request with choice 0 of the same prompt, sent before this one: its KV cache of the prompt is shared."""
    beam: BeamParams | None = None
    """Beam search: of `params` only `max_tokens`, `logprobs` and what ends a sequence are used. There is one output."""
    grammar: Grammar | None = None
    """Every output is a text of this grammar, or the beginning of one where `max_tokens` cut it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position: natural logs of the unfiltered model distribution."""

    token_id: int
    """The token that stands there."""
    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: list[int] = field(default_factory=list)
    """The most likely tokens, most likely first."""
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    """Why a request ended in error."""

    code: str
    """Code of the `manylora.errors` class that fits."""
    message: str
    kind: ErrorKind = "request"
    """What caused it; the server maps this to an HTTP status."""


INTERNAL = RequestError(
    code=EngineError.code,
    message="The engine failed while it computed this request.",
    kind="internal",
)
"""A fault of the engine. Clients are not told what it was; the log says it."""

NON_FINITE = RequestError(
    code="scores_not_finite",
    message="The scores of the next token are not finite numbers. An adapter whose training diverged does that, and so "
    "does a repetition_penalty close to 0, or allowed_token_ids and bad_words that leave no token. Change it and send "
    "the request again.",
)
"""Caused by the request or its adapter; the other requests of the step go on."""

GRAMMAR_DEAD_END = RequestError(
    code="grammar_dead_end",
    message="No token can come next that the grammar or schema of this request allows. logit_bias, bad_words and "
    "allowed_token_ids may rule out what it needs, or this model has no token for it.",
)
"""The output so far is the beginning of no answer."""

GRAMMAR_TOO_COMPLEX = RequestError(
    code="grammar_too_complex",
    message="The grammar or schema of this request takes too long to follow: it is ambiguous, or has patterns that "
    "repeat too much. Make it simpler.",
)

EXPIRED = RequestError(
    code="deadline.queue",
    message="The request waited for longer than its deadline allows and was not started. Send it again later.",
    kind="capacity",
)

PAUSED = RequestError(
    code="server.paused",
    message="The server was paused, which ended this request. Send it again: it waits until the server goes on.",
    kind="capacity",
)

ERRORS_BY_KIND: dict[ErrorKind, type[ManyloraError]] = {
    "request": RefusedError,
    "adapter": AdapterError,
    "capacity": CapacityError,
}
"""Errors that clients are told; all others are `INTERNAL`."""


def request_error(error: ManyloraError) -> RequestError:
    """What the client is told: the error's message, or `INTERNAL` for a fault of the engine."""
    kind = next(
        (kind for kind, raised in ERRORS_BY_KIND.items() if isinstance(error, raised)), None
    )
    return (
        INTERNAL
        if kind is None
        else RequestError(code=error.code, message=error.message, kind=kind)
    )


@dataclass(
    slots=True, kw_only=True
)  # frozen ones take three times as long to make, and a step makes one a row
class RequestOutput:
    """What one step, or one refusal, did for one request. The last one carries `finish_reason`."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    """New tokens, in order."""
    logprobs: list[TokenLogprobs] | None = None
    """One per new token, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token, the first None; comes once, with or before the first token."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The end-of-sequence or stop token that ended it; it is the last of `token_ids`."""
    error: RequestError | None = None
    adapter_state: AdapterState | None = None
    """Where the adapter was when the request arrived; comes once, with the first output."""
    queue_s: float | None = None
    """Seconds from arrival to the first step; comes once, with the first output."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache; comes once, with the first output."""
    computed_prompt_tokens: int = 0
    """Prompt tokens whose keys and values were computed, or taken from the prefix cache, before the request ended; 0 if
    it never left the queue. Tokens computed again after a preemption count once. Comes with the last output."""
    hypotheses: list[RequestOutput] | None = None
    """Of a beam search that has ended: as many as its width, best first, each as if it had been generated alone. Of one
    that was aborted: its beams."""
