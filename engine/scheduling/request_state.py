"""One request inside the scheduler: tokens, state and the parts that belong to their owners; and the model's limits."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from manylora.adapters.residency.entry import SlotLease
from manylora.engine.fairness.shares import FairPlace
from manylora.engine.request import AdapterState, GenerationRequest, RequestOutput, TokenLogprobs
from manylora.engine.scheduling.plan import Chunk
from manylora.engine.scheduling.request_pages import RequestPages, StepCursor
from manylora.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from manylora.engine.grammar.matcher import Matcher

WaitingReason = Literal["NEW", "LOADING", "NO_ROOM", "NO_PAGES", "FORK", "GRAMMAR"]


@dataclass(slots=True, kw_only=True, eq=False)
class AdapterHold:
    """Adapter of one request; a request of the base model holds nothing."""

    digest: str | None
    """None is the base."""
    num_pages: int | None = 0
    """Pages that the adapter takes on the device; None while unknown."""
    is_holding: bool = field(default=False, init=False)
    """True if the request holds its adapter while it waits."""
    lease: SlotLease | None = field(default=None, init=False)
    """The slot that the request uses while it runs."""


@dataclass(slots=True, kw_only=True, eq=False)
class FirstOutput:
    """Facts that only the first output of a request tells, and log-probabilities of its prompt, until it is sent."""

    adapter_state: AdapterState
    """State of the adapter on arrival."""
    keeps_prompt_logprobs: bool
    """True while log-probabilities of the prompt are to be sent: then every token of it is to be computed."""
    queue_s: float | None = None
    """Seconds from arrival to the first step."""
    num_cached: int = field(default=0, init=False)
    """Prompt tokens that the request found in the prefix cache when it first started."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    is_sent: bool = field(default=False, init=False)

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Log-probabilities of the prompt, to be sent now; None where nobody asked for them, or they are sent."""
        if not self.keeps_prompt_logprobs:
            return None
        self.keeps_prompt_logprobs = False
        return [None, *self.prompt_logprobs]

    def mark(self, *outputs: RequestOutput) -> None:
        """Add the facts to the first output; from the second call on add nothing. *Mutates* the outputs."""
        if not self.is_sent:
            self.is_sent = True
            for output in outputs:
                output.adapter_state = self.adapter_state
                output.queue_s = self.queue_s
                output.cached_tokens = self.num_cached


@dataclass(slots=True, kw_only=True)
class Beam:
    """One beam of a beam search."""

    search_id: str
    """Id of the client's request."""
    score: float = 0.0
    """Sum of the log-probabilities of its output."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per output token."""
    result: TokenLogprobs | None = None
    """Candidates for the next token. While they are there, the beam waits for the results of the others."""


class ForkSource(NamedTuple):
    """Request whose pages another one will share."""

    leader: RequestState
    """Request with the same prompt, or the beam that the other one continues."""
    num_tokens: int
    """Tokens, from the first one on, whose keys and values are taken from the leader."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """A request that is waiting or running; finished ones are forgotten."""

    request: GenerationRequest
    seed: int
    """The client's seed, or one drawn on arrival."""
    output_token_ids: list[int]
    place: FairPlace
    """Place in the fair order."""
    pages: RequestPages
    """KV pages, and the number of computed tokens."""
    adapter: AdapterHold
    """Adapter, with the hold or the lease on it."""
    first_output: FirstOutput
    """Facts for the first output."""
    beam: Beam | None = None
    """None for all but beam searches."""
    source: ForkSource | None = None
    """Request that this one goes on from when it starts."""
    cursor: StepCursor = field(init=False)
    """Chunks in flight, and the next one."""
    matcher: Matcher | None = field(default=None, init=False)
    """Position in its grammar; None where it has none, and until that is compiled."""
    status: Literal["waiting", "running"] = field(default="waiting", init=False)
    waiting_reason: WaitingReason = field(default="NEW", init=False)
    num_bypasses: int = field(default=0, init=False)
    """Steps in which a request behind it was admitted while it lacked pages."""
    request_id: str = field(init=False)
    """Id that the client, or the search for a beam, gave it."""
    num_prompt: int = field(init=False)
    """Tokens in the prompt."""
    is_dependent: bool = field(init=False)
    """True if a token may depend on those before it by more than the model, so that steps cannot overlap."""

    def __post_init__(self) -> None:
        # Asked for many times in every step, so looked up once.
        request = self.request
        params = request.params
        self.request_id = request.request_id
        self.num_prompt = len(request.prompt_token_ids)
        self.is_dependent = (
            params.needs_history
            or bool(params.bad_words)
            or request.beam is not None
            or request.grammar is not None
        )
        self.cursor = StepCursor(
            pages=self.pages, num_prompt=self.num_prompt, max_tokens=params.max_tokens
        )

    @property
    def may_need_results(self) -> bool:
        """True if `needs_results` may be true of one of its chunks."""
        return self.is_dependent or self.request.params.prompt_logprobs is not None

    def needs_results(self, chunk: Chunk) -> bool:
        """True if its next chunk can be made only once the results of this one are known."""
        return self.first_output.keeps_prompt_logprobs or (
            self.is_dependent and chunk.sample is not None
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far, with the tokens that are coming."""
        return self.num_prompt + len(self.output_token_ids) + self.cursor.num_coming

    @property
    def num_left(self) -> int:
        """Tokens that are still to be computed; 1 while it decodes, and 0 if it ends with the steps in flight."""
        return self.num_tokens - self.pages.num_computed

    @property
    def expires_s(self) -> float:
        """Second by which it must start."""
        deadline_s = self.request.flow.deadline_s
        return math.inf if deadline_s is None else self.place.arrived_s + deadline_s

    @property
    def is_parked(self) -> bool:
        """True if it waits for its grammar to be compiled, and the fair order does not know it yet."""
        return self.waiting_reason == "GRAMMAR"

    @property
    def is_idle(self) -> bool:
        """True if it has nothing to compute until the other beams of its search have their results."""
        return self.beam is not None and self.beam.result is not None

    @property
    def tokens_to_reserve(self) -> int:
        """Tokens for which a preempted request takes pages on return; then it needs no more pages while protected."""
        if not self.pages.num_preemptions:
            return 0
        return max(self.num_tokens, min(self.pages.progress_mark, kv_tokens(self.request)))

    def tokens(self, start: int, end: int) -> list[int]:
        """Prompt and output from position `start` to `end`."""
        prompt = self.request.prompt_token_ids
        if start >= self.num_prompt:
            return self.output_token_ids[start - self.num_prompt : end - self.num_prompt]
        return prompt[start:end] + self.output_token_ids[: max(end - self.num_prompt, 0)]

    def fork(
        self, request_id: str, arrival_index: float, token_id: int, beam: Beam
    ) -> RequestState:
        """A waiting request that goes on from here with another token.

        Arguments of the constructors, of the state and of its parts, are copied; other fields get their defaults.
        """
        return replace(
            self,
            request=replace(self.request, request_id=request_id),
            output_token_ids=[*self.output_token_ids, token_id],
            place=self.place.fork(request_id, arrival_index, self.num_tokens),
            pages=self.pages.fork(),
            adapter=replace(self.adapter),
            first_output=replace(self.first_output),
            beam=beam,
            source=ForkSource(leader=self, num_tokens=self.num_tokens),
        )

    def restart(self) -> None:
        """Wait again, with the tokens so far and without device pages."""
        self.status = "waiting"
        self.waiting_reason = "NO_PAGES"
        self.cursor.next_chunk = None

    def lose_kv(self) -> None:
        """Mark all tokens as not computed."""
        self.pages.num_computed = 0
        self.first_output.prompt_logprobs = []


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of the model."""

    max_model_len: int
    """Longest prompt plus output, in tokens."""
    vocab_size: int
    """Token ids are below this."""
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens that end a generation."""


def kv_tokens(request: GenerationRequest) -> int:
    """Most tokens of a request whose keys and values are stored: the last generated token's never are."""
    return len(request.prompt_token_ids) + max(request.params.max_tokens - 1, 0)


def check_limits(request: GenerationRequest, limits: ModelLimits) -> None:
    """Refuse a request that the model cannot compute.

    Raises:
        InvalidRequestError: The prompt is empty, a token id is unknown, a weight is not positive, or there are more
            generated tokens than wanted.
        ContextLengthError: Prompt plus `max_tokens` exceed the model's length.
    """
    prompt = request.prompt_token_ids
    generated = request.generated_token_ids
    params = request.params
    if not prompt:
        raise InvalidRequestError("prompt must have at least one token, got none.", param="prompt")
    if not request.flow.weight > 0:
        raise InvalidRequestError(
            f"weight must be above 0, got {request.flow.weight}.", param="weight"
        )
    if len(prompt) + params.max_tokens > limits.max_model_len:
        raise ContextLengthError(
            f"This model takes {limits.max_model_len} tokens, but {len(prompt)} in the prompt and "
            f"{params.max_tokens} to generate are {len(prompt) + params.max_tokens}. "
            "Shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )
    named = (("logit_bias", params.logit_bias), ("allowed_token_ids", params.allowed_token_ids))
    for param, token_ids in (("prompt", prompt), ("prompt", generated), *named):
        _check_vocabulary(param, token_ids, limits.vocab_size)
    if len(generated) > params.max_tokens:
        raise InvalidRequestError(
            f"max_tokens must be at least the {len(generated)} tokens generated already, got {params.max_tokens}.",
            param="max_tokens",
        )


def _check_vocabulary(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not token_ids:
        return
    lowest = min(token_ids)
    highest = max(token_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequestError(
            f"{param} must have token ids from 0 to {vocab_size - 1}, got {wrong}.", param=param
        )
