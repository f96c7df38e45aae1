"""One request inside the scheduler: its tokens, pages, lease and state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from manylora.adapters.residency.slots import SlotLease
from manylora.engine.request import AdapterState, GenerationRequest, RequestOutput, TokenLogprobs
from manylora.engine.scheduling.plan import Chunk, SampleSpec, StepPlan
from manylora.engine.scheduling.request_limits import kv_tokens
from manylora.memory.block_table import BlockTable
from manylora.memory.geometry import PageGeometry
from manylora.memory.prefix_cache import PrefixBlock, TokenChain

if TYPE_CHECKING:
    from manylora.engine.fairness.shares import Flow
    from manylora.engine.grammar.matcher import Matcher


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedBlocks:
    """The KV cache of a preempted request, from some block on, in host memory."""

    first_block: int
    """Those before it were shared when it was preempted, and were left to the prefix cache."""
    num_tokens: int
    """Tokens of the request that are in these blocks and those before them."""
    host_pages: list[int]
    """One per layer group of the first block, then of the next, and so on."""
    step: int
    """The step that copies them out."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestPages:
    """What one request has. While it waits: no device pages, and maybe host pages."""

    table: BlockTable
    held: list[PrefixBlock] = field(default_factory=list)
    """The first blocks of the table: of the prefix cache, and never written. All others are the request's own."""
    chain: TokenChain | None = None
    """Names of its full blocks, made as they are needed."""
    found: list[PrefixBlock] = field(default_factory=list)
    """What the last lookup found; nothing keeps these."""
    swapped: SwappedBlocks | None = None
    is_publishing: bool = True
    """Whether its full blocks go to the prefix cache."""

    def own_pages(self) -> list[int]:
        """Its pages but for the cached ones, in no order that matters."""
        return self.table.by_block(len(self.held))


WaitingReason = Literal["NEW", "LOADING", "NO_ROOM", "NO_PAGES", "FORK", "GRAMMAR"]


@dataclass(slots=True, kw_only=True)
class Beam:
    """What makes a request one of the beams of a beam search."""

    search_id: str
    """The client's request."""
    score: float = 0.0
    """Sum of the log-probabilities of its output."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per output token."""
    result: TokenLogprobs | None = None
    """What may come next. While it is there, the beam waits for the results of the others."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """A request that is waiting or running; finished ones are forgotten."""

    request: GenerationRequest
    arrival_index: float
    """Counts up per engine; older means smaller. No two are the same: fractions are for beams of one search."""
    arrived_s: float
    seed: int
    """The client's seed, or one drawn on arrival."""
    adapter_state: AdapterState
    """Where the adapter was on arrival."""
    geometry: PageGeometry
    pages: RequestPages
    output_token_ids: list[int]
    adapter_pages: int | None = 0
    """Pages its adapter takes on the device; None while unknown."""
    status: Literal["waiting", "running"] = "waiting"
    waiting_reason: WaitingReason = "NEW"
    num_computed: int = 0
    """Tokens whose keys and values are in its pages once the steps in flight are complete; of a request that waits, in
    its host pages."""
    in_flight: list[Chunk] = field(default_factory=list)
    """Its chunks whose results are not known, oldest first: of one step, and of two until the first is committed."""
    num_coming: int = 0
    """Tokens that these sample and that are to be computed next. The one that ends the request by its length is not."""
    place: int = 0
    """Place of its last chunk in the plan of its step."""
    num_cached: int = 0
    """Prompt tokens that it found in the prefix cache when it first started."""
    leader: RequestState | None = None
    """The request whose pages this one will share: it has the same prompt, or is the beam that this one continues."""
    num_shared: int = 0
    """Tokens, from the first one on, whose keys and values it takes from the leader."""
    beam: Beam | None = None
    """None for all but beam searches."""
    matcher: Matcher | None = None
    """Its place in its grammar; None where it has none, and until that is compiled."""
    lease: SlotLease | None = None
    is_holding: bool = False
    """Whether it holds its adapter while it waits."""
    num_charged: int = 0
    """Tokens that were computed at least once; recomputing them after a preemption costs the tenant nothing."""
    last_step: int = 0
    """The last step that reads or writes its pages."""
    queue_s: float | None = None
    """Seconds from arrival to its first step."""
    num_preemptions: int = 0
    progress_mark: int = 0
    """It may be preempted again once this many tokens are computed."""
    num_bypasses: int = 0
    """Steps in which a request behind it was admitted while it lacked pages."""
    priority: int = 0
    """Lower goes first, within its tenant."""
    predicted_tokens: int = 0
    """Output tokens that it is expected to have, from what its tenant and adapter had before."""
    queued_units: float = 0.0
    """Predicted price of what is to be computed, as counted when it began to wait."""
    start_by_s: float = math.inf
    """The latest second at which it can start and keep its deadline."""
    share: Flow = field(init=False, repr=False)
    """Its place in the fair order, from when it enters that."""
    queue_key: tuple[float, ...] = ()
    """Its sort key in the queue of its share."""
    has_row: bool = False
    """Whether it is in the steps. One that runs without a row is paused: it keeps its pages."""
    paused_s: float = 0.0
    """When it was paused."""
    level: int | None = None
    """Its level in the multi-level feedback queue; None before it was queued."""
    level_below_front: int = 0
    """The level to return to after a turn at the front."""
    level_units: float = 0.0
    """Units used at this level."""
    caused_load: bool = False
    """Whether its adapter is brought to the device for it."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    sent_prompt_logprobs: bool = False
    sent_first_output: bool = False
    next_chunk: Chunk | None = None
    """Its next chunk, if that is one token and its pages have room for it; None if the next plan must find out."""
    num_prompt: int = field(init=False)
    """Tokens in the prompt."""
    tenant: str = field(init=False)
    """Id of the tenant that it is served for."""
    digest: str | None = field(init=False)
    """Its adapter; None is the base."""
    request_id: str = field(init=False)
    """The id that its client gave it."""
    rank: int = field(init=False)
    """Rank of its adapter; 0 is the base model."""
    in_batch_lane: bool = field(init=False)
    """Whether it gives way to interactive requests."""

    def __post_init__(self) -> None:
        # Asked for many times in every step, so looked up once.
        self.request_id = self.request.request_id
        self.in_batch_lane = self.request.flow.lane > 0
        self.num_prompt = len(self.request.prompt_token_ids)
        self.tenant = self.request.flow.tenant
        adapter = self.request.adapter
        self.digest, self.rank = (adapter.digest, adapter.config.rank) if adapter else (None, 0)

    @property
    def age_key(self) -> tuple[int, float]:
        """Sorts from the most to the least entitled to pages: lane, then arrival."""
        return self.request.flow.lane, self.arrival_index

    @property
    def is_paused(self) -> bool:
        """Whether it has pages and sits steps out."""
        return self.status == "running" and not self.has_row

    @property
    def has_started(self) -> bool:
        """Whether it ever had pages, or goes on with what had."""
        return self.status == "running" or self.num_preemptions > 0 or self.is_beam_fork

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far, with the tokens that are coming."""
        return self.num_prompt + len(self.output_token_ids) + self.num_coming

    @property
    def num_left(self) -> int:
        """Tokens that are still to be computed; 1 while it decodes, and 0 if it ends with what is in flight."""
        return self.num_prompt + len(self.output_token_ids) + self.num_coming - self.num_computed

    @property
    def num_complete(self) -> int:
        """Tokens whose keys and values were computed by steps that are complete, from the first one on."""
        return self.in_flight[0].start if self.in_flight else self.num_computed

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to compute until the other beams of its search have their results."""
        return self.beam is not None and self.beam.result is not None

    @property
    def is_beam_fork(self) -> bool:
        """Whether it goes on from another beam, and not from a client's request."""
        return self.beam is not None and self.num_shared > 0

    @property
    def keeps_prompt_logprobs(self) -> bool:
        """Whether every token of the prompt is to be computed, for its logprobs, which are still to be sent."""
        return self.request.params.prompt_logprobs is not None and not self.sent_prompt_logprobs

    @property
    def is_protected(self) -> bool:
        """Whether it was preempted and has not made a page of progress since."""
        return self.num_computed < self.progress_mark

    @property
    def tokens_to_reserve(self) -> int:
        """Tokens for which a preempted request takes pages on return; then it needs no more pages while protected."""
        if not self.num_preemptions:
            return 0
        return max(self.num_tokens, min(self.progress_mark, kv_tokens(self.request)))

    def chunk(self, count: int) -> Chunk:
        """The next `count` tokens as part of a step; its pages are there already."""
        start, end = self.num_computed, self.num_computed + count
        return Chunk(
            request_id=self.request_id,
            token_ids=[0] if self.num_coming else self.tokens(start, end),
            start=start,
            block_table=self.pages.table.pages,
            adapter=self.lease,
            sample=self._sample_spec() if end == self.num_tokens else None,
            prompt_targets=self._prompt_targets(start, end),
            num_prompt_logprobs=self.request.params.prompt_logprobs or 0,
        )

    def begin(self, chunk: Chunk, plan: StepPlan) -> None:
        """Add a chunk to a plan. From now on its tokens count as computed, and the token that it samples is coming."""
        num_coming, sample = self.num_coming, chunk.sample
        chunk.token_source = self.place if num_coming else None
        self.place, self.last_step, self.next_chunk = len(plan.chunks), plan.step, None
        plan.chunks.append(chunk)
        self.in_flight.append(chunk)
        self.num_computed = chunk.start + len(chunk.token_ids)
        # Prompt and `max_tokens` are never longer than the model takes, so its length need not be looked at.
        if sample is not None and sample.output_index + 1 < self.request.params.max_tokens:
            self.num_coming = num_coming + 1

    def needs_results(self, chunk: Chunk) -> bool:
        """Whether its next chunk can be made only once the results of this one are known."""
        params = self.request.params
        has_history = params.needs_history or bool(params.bad_words)
        depends = has_history or self.beam is not None or self.matcher is not None
        return self.keeps_prompt_logprobs or (depends and chunk.sample is not None)

    def take_token(self, token_id: int, chunk: Chunk) -> None:
        """Add to the output the token that came of a chunk.

        The chunk of a token that decodes becomes that of the next token without one. Making hundreds of them in each
        step takes longer than all else that a plan decides, and has the garbage collector look at each.
        """
        self.output_token_ids.append(token_id)
        self.next_chunk = None
        num_coming, sample = self.num_coming, chunk.sample
        has_room = self.num_computed % self.geometry.page_tokens > 0 and self.status == "running"
        goes_on = num_coming > 0 or not self.in_flight
        if (
            has_room
            and goes_on
            and sample is not None
            and chunk.start >= self.num_prompt
            and len(chunk.token_ids) == 1
        ):
            chunk.token_ids[0], chunk.start = 0 if num_coming else token_id, self.num_computed
            sample.output_index += 1 + num_coming
            self.next_chunk = chunk

    def fork(
        self, request_id: str, arrival_index: float, token_id: int, beam: Beam
    ) -> RequestState:
        """A waiting request that goes on from here with another token."""
        chain = self.pages.chain
        return RequestState(
            request=replace(self.request, request_id=request_id),
            arrival_index=arrival_index,
            arrived_s=self.arrived_s,
            seed=self.seed,
            adapter_state=self.adapter_state,
            geometry=self.geometry,
            pages=RequestPages(
                table=BlockTable(self.geometry), chain=chain.copy() if chain is not None else None
            ),
            adapter_pages=self.adapter_pages,
            output_token_ids=[*self.output_token_ids, token_id],
            leader=self,
            num_shared=self.num_tokens,
            beam=beam,
            num_charged=self.num_tokens,
            queue_s=self.queue_s,
            priority=self.priority,
            predicted_tokens=self.predicted_tokens,
            level=self.level,
        )

    def restart(self) -> None:
        """Back to waiting with its tokens and no device pages."""
        self.num_preemptions += 1
        self.progress_mark = self.num_computed + self.geometry.page_tokens
        self.status, self.waiting_reason, self.lease, self.next_chunk = (
            "waiting",
            "NO_PAGES",
            None,
            None,
        )

    def lose_kv(self) -> None:
        """Mark all its tokens as not computed."""
        self.num_computed = 0
        self.prompt_logprobs = []

    def mark_first(self, *outputs: RequestOutput) -> None:
        """Add what only the first output carries; from the second call on nothing. *Mutates* the outputs."""
        if not self.sent_first_output:
            self.sent_first_output = True
            for output in outputs:
                output.adapter_state, output.queue_s = self.adapter_state, self.queue_s
                output.cached_tokens = self.num_cached

    def tokens(self, start: int, end: int) -> list[int]:
        """Prompt and output from position `start` to `end`."""
        prompt = self.request.prompt_token_ids
        if start >= self.num_prompt:
            return self.output_token_ids[start - self.num_prompt : end - self.num_prompt]
        return prompt[start:end] + self.output_token_ids[: max(end - self.num_prompt, 0)]

    def _sample_spec(self) -> SampleSpec | None:
        params = self.request.params
        if params.max_tokens == 0:
            return None
        history = params.needs_history
        return SampleSpec(
            params=params,
            seed=self.seed,
            choice_index=self.request.choice_index,
            output_index=len(self.output_token_ids) + self.num_coming,
            prompt_token_ids=self.request.prompt_token_ids if history else [],
            output_token_ids=self.output_token_ids if history or params.bad_words else [],
        )

    def _prompt_targets(self, start: int, end: int) -> list[int] | None:
        if not self.keeps_prompt_logprobs:
            return None
        return self.request.prompt_token_ids[start + 1 : end + 1] or None
