"""Decides what each step computes. Knows pages, digests and tokens; no tensors, no names, no transport.

A step has at most `max_running` rows, one per request; more requests may have pages. A request with pages and without a
row is paused. The fair order (`manylora.engine.fairness.fair_order`) gives out the rows. docs/scheduling.md explains a
step, the invariants, and why every request moves on.

`request_table` keeps the state of each request, `rows` gives out the rows and acts when nothing can be computed,
`chunks` plans the tokens of each row, `preemption` takes pages from others, and `outcomes` takes in the results.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import TYPE_CHECKING

from manylora.adapters.residency.residency import Residency
from manylora.config import SchedulerConfig
from manylora.engine.fairness.fair_order import QUANTUM_TOKENS, FairOrder
from manylora.engine.fairness.inner_order import inner_order
from manylora.engine.fairness.service import Lengths, Prices, TenantLoad, TenantService
from manylora.engine.fairness.shares import FairPlace
from manylora.engine.request import (
    EXPIRED,
    INTERNAL,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    error_info,
)
from manylora.engine.scheduling.beam import BeamSearch
from manylora.engine.scheduling.chunks import Chunks, StepBudget
from manylora.engine.scheduling.kv_pages import KvPages
from manylora.engine.scheduling.outcomes import Outcomes
from manylora.engine.scheduling.plan import ChunkResult, PlanBuilder, StepPlan
from manylora.engine.scheduling.preemption import Preemption
from manylora.engine.scheduling.request_pages import RequestPages
from manylora.engine.scheduling.request_state import (
    AdapterHold,
    FirstOutput,
    ForkSource,
    ModelLimits,
    RequestState,
    check_limits,
)
from manylora.engine.scheduling.request_table import RequestTable
from manylora.engine.scheduling.rows import Rows
from manylora.engine.status import EngineLoad, PauseMode
from manylora.errors import EngineError, InvalidRequestError, ManyloraError, QueueFullError

if TYPE_CHECKING:
    from manylora.engine.grammar.compiler import Grammars
    from manylora.engine.grammar.matcher import Matcher

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Scheduler:
    """Requests from arrival to end.

    Each plan is committed, in the order of the plans. A plan may be made before the one before it is committed, but not
    before the one before that. Everything else may come in between.
    """

    config: SchedulerConfig
    """Limits of a step and of the queue."""
    kv: InitVar[KvPages]
    """Pages of requests; their pool is shared with the residency."""
    residency: Residency
    """Brings adapters to the device."""
    limits: ModelLimits
    """Limits of the model."""
    _: KW_ONLY
    step_tokens: InitVar[int]
    """Most tokens in one step."""
    prices: InitVar[Prices]
    """Prices of the work of a step."""
    grammars: Grammars
    """Matchers for requests that have a grammar."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    draw_seed: Callable[[], int] = lambda: secrets.randbits(63)
    """Seeds for requests that bring none."""

    def __post_init__(self, kv: KvPages, step_tokens: int, prices: Prices) -> None:
        config = self.config
        self.table = RequestTable(
            FairOrder(
                config.policy,
                inner_order(config.inner),
                QUANTUM_TOKENS * prices.output,
                config.max_running,
            ),
            TenantService(prices, Lengths(), self.clock),
            kv,
            self.residency,
            config.max_running,
        )
        """State of every request."""
        self._outcomes = Outcomes(self.table, self.limits)
        self.take_outputs = self._outcomes.take
        """Outputs since the last call."""
        self._preemption = Preemption(self.table)
        self._rows = Rows(self.table, self._preemption, self.clock, self.finish)
        self._chunks = Chunks(
            self.table, self._preemption, StepBudget(config, step_tokens, kv.costs.token_s)
        )
        self._next_expiry_s = math.inf
        """Second before which no deadline passes of a request that has not started."""
        self.pause: PauseMode | None = None
        """Mode in which plans are held back; `wait` becomes `keep` by itself. Deadlines count all the same."""
        self._last_units = 0.0
        """Price of the step that was committed last."""
        self._arrivals = 0
        self._step = 0

    @property
    def num_held_up(self) -> int:
        """Requests that wait for nothing but the load of their adapter: a step has places for them."""
        places = self.config.max_running - self.table.num_rows
        return min(places, self.table.waiting.num_loading()) if places > 0 else 0

    def has_work(self) -> bool:
        """True if a request lives or an output waits to be taken."""
        return bool(self.table.requests) or self._outcomes.has_outputs

    def submit(self, request: GenerationRequest) -> None:
        """Take a request in, to wait.

        Raises:
            QueueFullError: As many requests wait as may.
            InvalidRequestError: The id is in use, or a token id is unknown.
            ContextLengthError: Prompt and output are longer than the model takes.
            NeverFitsError: Even the empty pool is too small, as far as is known.
        """
        # Requests that will get a free row wait for the next plan only.
        num_free_rows = max(self.config.max_running - self.table.num_rows, 0)
        if len(self.table.waiting) >= self.config.max_waiting + num_free_rows:
            raise QueueFullError(
                f"{len(self.table.waiting)} requests wait already. Try again later."
            )
        if (
            request.request_id in self.table.requests
            or request.request_id in self._outcomes.searches
        ):
            raise InvalidRequestError(
                "request_id must be unique, got one that is in use.", param="request_id"
            )
        check_limits(request, self.limits)
        if request.grammar is not None and request.beam is not None:
            raise InvalidRequestError(
                "A grammar cannot be used with beam search.", param="structured_outputs"
            )
        adapter = request.adapter
        adapter_pages = self.residency.pages_needed(adapter) if adapter else 0
        self.table.kv.check_fits(request, adapter_pages)
        search = None
        if request.beam is not None:
            search = BeamSearch(request, request.beam, self.limits, self.config.max_running)
            request = search.begin()
        state = self._arrive(request, adapter_pages)
        if search is not None:
            search.start(state)
            self._outcomes.searches[state.request_id] = search
        matcher = self.grammars.ask(request) if request.grammar is not None else None
        self.table.enter(state, is_parked=request.grammar is not None and matcher is None)
        self._next_expiry_s = min(self._next_expiry_s, state.expires_s)
        if matcher is not None:
            self._begin_matching(state, matcher)
        if 0 < request.params.max_tokens <= len(state.output_token_ids):
            self.finish(state.request_id, "length")

    def finish(self, request_id: str, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """End a request, whatever its state; see `Outcomes.finish`."""
        state = self.table.requests.get(request_id)
        if state is not None and state.is_parked:
            self.grammars.forget(state.request)
        self._outcomes.finish(request_id, reason, error)

    def take_in_grammars(self) -> None:
        """Let requests go on whose grammars were compiled; end those whose grammars could not be."""
        for request_id, matcher in self.grammars.take_done() if self.grammars.done else ():
            state = self.table.requests.get(request_id)
            if state is not None and state.is_parked:
                self.table.unpark(state)
                self._begin_matching(state, matcher)

    def matchers(self, plan: StepPlan) -> list[tuple[int, Matcher]]:
        """Matchers of the chunks of a plan that yield a token of a grammar, each with the index of its chunk."""
        if not self.table.num_dependent:
            return []
        found = []
        for index, chunk in enumerate(plan.chunks):
            matcher = (
                self.table.requests[chunk.request_id].matcher if chunk.sample is not None else None
            )
            if matcher is not None:
                found.append((index, matcher))
        return found

    def plan(self) -> StepPlan | None:
        """Plan the next step; None when nothing can be computed now."""
        now_s = self.clock()
        self.table.kv.begin_plan()
        self._preemption.begin_plan()
        if now_s >= self._next_expiry_s:
            self._expire(now_s)
        if self.pause is not None and self._is_held():
            return None
        self._rows.is_draining = self.pause == "wait"
        self.table.order.tick(now_s)
        plan = StepPlan(step=self._step + 1)
        draft = PlanBuilder(plan=plan)
        # Each fork of a beam has its own token: then every beam of a search advances in every step.
        num_forks = sum(search.num_forks for search in self._outcomes.searches.values())
        draft.budget = self._chunks.tokens_left() - num_forks
        self._rows.fill(draft)
        self._chunks.plan(draft)
        self.residency.transfers.reserve_pages = self._preemption.room_to_grow() + draft.promised
        if plan.is_empty and not self._has_steps_in_flight:
            self._rows.resolve_stall(draft)
        if plan.is_empty:
            return None
        if plan.chunks:
            self._rows.end_stall()
        self._step = plan.step
        return plan

    def needs_results(self, plan: StepPlan) -> bool:
        """True if the next plan can be made only once the results of this one are committed.

        The next token of a request may depend on the ones before it by more than the model: by penalties, bad words, a
        grammar, or the other beams of its search. Log-probabilities of a prompt are kept with its KV cache.
        """
        requests = self.table.requests
        return self.table.num_dependent > 0 and any(
            requests[chunk.request_id].needs_results(chunk) for chunk in plan.chunks
        )

    def commit(self, plan: StepPlan, results: list[ChunkResult]) -> None:
        """Take in the results of a step; requests that ended meanwhile are passed over. `take_outputs` has the outputs.

        Raises:
            EngineError: The results are not those of the plan; nothing was committed.
        """
        chunks = plan.chunks
        if [chunk.request_id for chunk in chunks] != [result.request_id for result in results]:
            raise EngineError(
                f"step {plan.step} has {len(chunks)} chunks, and results that do not fit them"
            )
        requests = self.table.requests
        live = [
            (state, chunk, result)
            for chunk, result in zip(chunks, results, strict=True)
            if (state := requests.get(chunk.request_id)) is not None
            and (in_flight := state.cursor.in_flight)
            and in_flight[0] is chunk
        ]
        charges = self.table.service.charge([(state.place, chunk) for state, chunk, _ in live])
        self.table.order.charge(charges)
        self._last_units = sum(units for _, units in charges)
        for state, chunk, result in live:
            self._outcomes.advance(state, chunk, result)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Take note of the seconds that the step took that was committed last, or failed."""
        is_full = self.table.order.num_queued > self.table.waiting.num_loading()
        self.table.service.note_step(self._last_units, seconds, is_full)
        self._chunks.note_step(plan, seconds)

    def complete(self, step: int) -> None:
        """Note that a step is complete; pages that it read may be used again."""
        self.table.kv.complete(step)

    def fail_adapter(self, digest: str, error: ManyloraError) -> None:
        """End the requests that wait for an adapter that cannot be loaded."""
        for state in [state for state in self.table.waiting if state.adapter.digest == digest]:
            self.finish(state.request_id, "error", error_info(error))

    def fail_step(self, plan: StepPlan) -> None:
        """End the requests of a failed step with an internal error; pages it should have moved or filled are lost."""
        for chunk in plan.chunks:
            state = self.table.requests.get(chunk.request_id)
            # A request that came later may have the same id.
            if state is not None and state.pages.last_step >= plan.step:
                self.finish(chunk.request_id, "error", INTERNAL)
        for state in [state for state in self.table.running if state.request_id in plan.started]:
            self._preemption.undo_start(state, plan.step)
        self.table.lose_swapped(plan.step)
        self._last_units = plan.units = 0.0  # how long it took says nothing

    def fail_running(self) -> None:
        """End all running requests with an internal error, after a plan that failed."""
        # The step that was being planned never runs: with those before it, it is complete.
        has_steps_in_flight = self._has_steps_in_flight
        self._step += 1
        if not has_steps_in_flight:
            self.complete(self._step)
        for state in list(self.table.running):
            self.finish(state.request_id, "error", INTERNAL)
        self.table.lose_swapped(self._step)

    def close(self) -> None:
        """End background work."""
        self.grammars.close()

    def load(self) -> EngineLoad:
        """Work by tenant, in time that grows with the requests that run, not with those that wait."""
        return EngineLoad(
            rate=self.table.service.full_rate,
            rows=self.config.max_running,
            tenants=self._tenant_loads(),
            prices=self.table.service.prices,
        )

    def tenants(self) -> dict[str, TenantLoad]:
        """Load of each tenant, with the reasons why its requests wait."""
        loads = self._tenant_loads()
        for state in self.table.waiting:
            reasons = loads[state.place.key.tenant].reasons
            reasons[state.waiting_reason] = reasons.get(state.waiting_reason, 0) + 1
        return loads

    def _tenant_loads(self) -> dict[str, TenantLoad]:
        table = self.table
        return table.service.loads(
            (state.place, table.units_left(state)) for state in table.running
        )

    @property
    def _has_steps_in_flight(self) -> bool:
        """True if a step was planned that is not complete."""
        return self.table.kv.pool.completed_step < self._step

    def _expire(self, now_s: float) -> None:
        """End the requests whose deadlines have passed and that never started."""
        unstarted = [state for state in self.table.waiting if not state.place.has_started]
        later_s = []
        for state in unstarted:
            if state.expires_s <= now_s:
                self.finish(state.request_id, "error", EXPIRED)
            else:
                later_s.append(state.expires_s)
        self._next_expiry_s = min(later_s, default=math.inf)

    def _is_held(self) -> bool:
        """True if nothing is to be computed: not even what had started before the pause."""
        if not any(state.place.has_started for state in self.table.requests.values()):
            self.pause = "keep"
        return self.pause == "keep"

    def _begin_matching(self, state: RequestState, matcher: Matcher | ErrorInfo) -> None:
        if isinstance(matcher, ErrorInfo):
            self.finish(state.request_id, "error", matcher)
        elif matcher.is_done:  # by what was generated elsewhere
            self.finish(state.request_id, "stop")
        else:
            state.matcher = matcher

    def _arrive(self, request: GenerationRequest, adapter_pages: int | None) -> RequestState:
        """Make the state of a request that comes now."""
        self._arrivals += 1
        kv = self.table.kv
        service = self.table.service
        params = request.params
        flow = request.flow
        adapter = request.adapter
        digest = adapter.digest if adapter else None
        pages = RequestPages(geometry=kv.geometry)
        place = FairPlace(
            request_id=request.request_id,
            key=flow,
            arrival_index=self._arrivals,
            arrived_s=self.clock(),
            adapter=digest,
            rank=adapter.config.rank if adapter else 0,
            num_prompt=len(request.prompt_token_ids),
            predicted_tokens=service.lengths.p50(flow.tenant, digest, params.max_tokens),
            priority=flow.priority if self.config.policy == "fair" else 0,
            load_units=service.prices.load(adapter_pages),
        )
        if flow.deadline_s is not None:
            prompt_s = kv.costs.token_s * place.num_prompt
            place.standing.start_by_s = place.arrived_s + flow.deadline_s - prompt_s
        state = RequestState(
            request=request,
            seed=self.draw_seed() if params.seed is None else params.seed,
            output_token_ids=list(request.generated_token_ids),
            place=place,
            pages=pages,
            adapter=AdapterHold(digest=digest, num_pages=adapter_pages),
            first_output=FirstOutput(
                adapter_state=self.residency.state(digest) if digest else "base",
                keeps_prompt_logprobs=params.prompt_logprobs is not None,
            ),
        )
        leader = self.table.requests.get(request.fork_of or "")
        if leader is not None and kv.may_fork(leader, state):
            state.source = ForkSource(leader=leader, num_tokens=state.num_prompt - 1)
        return state
