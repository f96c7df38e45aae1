"""Decides what each step computes. Knows pages, digests and tokens; no tensors, no names, no transport.

Being in memory and being in the step are two things. A step has at most `max_running` rows, one per request; requests
with pages may be more. Who has the rows is the fair order's choice (`weft.engine.fair_order`). A request without a row
is paused: it keeps its pages and its adapter, and is the first to give pages up. In a step every row that decodes
has one token, and chunks of prompts share the rest of the token budget, the most entitled first.

Waiting is a reason, not a place: each plan looks at the first requests in the fair order, and one that is blocked does
not block those behind it.

Why everything that waits moves on. The fair order's `place` says who is most entitled to pages; shares change with the
service that was given, so whoever is not served becomes the most entitled. A request that waits has no device pages and
no lease, so nobody waits for it but a fork (5), and what nobody runs with can be evicted.

1. Among requests with rows the most entitled goes first. For a page it evicts idle adapters and cached prefixes, then
   drops the holds of waiting requests, the newest first, then preempts requests that are less entitled: paused ones
   before those with rows. One that finds nothing keeps its pages and sits the step out. Pages that are swapped out are
   free only after the step that copies them: they are promised to those who made others give them up, who sit out
   this one step. Such a step may compute nothing at all; each has a preemption, so (2) bounds them.
2. A preempted request returns with a row, and with pages for one page of progress beyond where it stood. It keeps both
   until it has made that progress. Meanwhile it needs no pages, so it advances in every step in which it gets tokens;
   hence no request is preempted twice without progress, and the most entitled sits out only while such requests
   advance. That holds whether its KV cache comes back from the host, from the prefix cache, or is computed anew, since
   "where it stood" is kept.
3. A waiting request that lacks pages takes them from requests of shares that are more than a quantum ahead of its own.
   Where there is none it is overtaken in at most `MAX_BYPASSES` steps. Then only it may be admitted, and the pages of
   those that run come to it. While its adapter is still to be read, which may hang, others go on.
4. When nothing can be computed although something wants to, only adapters can be in the way: cached prefixes that
   nobody runs with are evicted for whoever needs the pages. All holds but those of the first in line are dropped, so
   that their adapters can be evicted too. If that changes nothing while nothing is being copied and no freed page is in
   quarantine, the first in line cannot fit beside what is pinned, and is refused. First in line is the most entitled
   that runs, or else the first whose adapter has been read.
5. A fork waits for the prompt of its leader, an older request of its lane, tenant and adapter, which waits for no
   younger one. It stops waiting when the leader has computed its prompt, was preempted or has ended; forks of forks go
   back to ever older requests, so there is no circle.
6. A beam with a result is idle: it waits, with or without a row or pages, for the other beams of its search, which are
   as old as it is. When nothing can be computed, idle beams are in the way of the first in line: those of other
   searches are preempted, the least entitled first, protected or not. So the first search in line always gets its
   pages and rows, which (by its check on arrival) are not more than there are.
"""

from __future__ import annotations

import heapq
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter

from weft.config import SchedulerConfig
from weft.engine.beam import BeamSearch
from weft.engine.draft import Draft
from weft.engine.failures import EXPIRED, INTERNAL, UNSOUND, request_error
from weft.engine.fair_order import QUANTUM_TOKENS, FairOrder
from weft.engine.fit import ModelLimits, check_limits
from weft.engine.inner_order import inner_order
from weft.engine.kv_pages import PREEMPTIONS, Beginning, KvPages
from weft.engine.lengths import Lengths
from weft.engine.neighbours import AdapterResidency
from weft.engine.plan import Chunk, ChunkResult, StepPlan
from weft.engine.prices import Prices
from weft.engine.progress import advance, ended
from weft.engine.request import FinishReason, GenerationRequest, RequestError, RequestOutput
from weft.engine.request_pages import RequestPages
from weft.engine.request_state import Beam, RequestState, WaitingReason
from weft.engine.status import EngineLoad, TenantLoad
from weft.engine.step_budget import StepBudget
from weft.engine.tenant_service import TenantService
from weft.engine.waiting import MAX_BYPASSES, WaitingQueue
from weft.errors import (
    CapacityError,
    EngineError,
    InvalidRequestError,
    NeverFitsError,
    QueueFullError,
    StaleSlotError,
    WeftError,
)
from weft.memory.block_table import BlockTable
from weft.memory.eviction import Evictor
from weft.memory.geometry import PageGeometry
from weft.memory.page_costs import PageCosts
from weft.memory.pool import PagePool
from weft.memory.prefix_cache import PrefixCache
from weft.memory.swap_space import SwapSpace

logger = logging.getLogger(__name__)

MIN_LOOK_AHEAD = 64
"""Requests without a row looked at in a step that has room; `max_running` if that is more."""
GLANCE = 16
"""Requests looked at in a step whose rows are all taken."""
GLANCE_STEPS = 4
"""While all rows are taken and nothing changes, requests are looked at every so many steps."""
WHOLE_LOOK_STEPS = 8
"""While all rows are taken, the whole look-ahead is looked at, and its adapters are loaded, every so many steps."""
HOLD_PAUSE_STEPS = 16
"""Steps without new holds after running requests needed the pages of held adapters."""
MAX_STALLS = 16
"""Plans that may come to nothing, with nothing under way, before the first in line is refused."""
PAUSED_SHARE = 2
"""Paused requests keep one in so many pages of the pool at most; the next one to lose its row loses its pages too."""
GROWTH_SHARE = 16
"""Running requests keep a block each for themselves to grow into, but at most one in so many pages of the pool."""


class Scheduler:
    """Requests from arrival to end. `plan` and `commit` alternate; everything else may come in between.

    Args:
        config: Limits of a step and of the queue.
        geometry: Sizes of the pages.
        pool: Where KV pages come from; shared with the residency.
        residency: Where adapters are.
        limits: What the model bounds.
        evictor: Makes room in the pool.
        prefixes: KV pages of earlier requests; None does without.
        swap: Host memory of preempted requests; None does without.
        costs: Decide between swapping and computing anew.
        prefix_seed: What a request's KV cache depends on besides its tokens, and who may share it.
        prices: What the work of a step costs its tenant.
        clock: Monotonic seconds.
        draw_seed: Seeds for requests that bring none.
    """

    def __init__(  # noqa: PLR0913 - all that it decides about
        self,
        config: SchedulerConfig,
        geometry: PageGeometry,
        pool: PagePool,
        residency: AdapterResidency,
        limits: ModelLimits,
        *,
        evictor: Evictor,
        prefixes: PrefixCache | None,
        swap: SwapSpace | None,
        costs: PageCosts,
        prefix_seed: Callable[[GenerationRequest], bytes],
        prices: Prices | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._pool = pool
        self._residency = residency
        self._limits = limits
        self._clock = clock
        self._draw_seed = draw_seed
        self._kv = KvPages(geometry, pool, evictor, prefixes=prefixes, swap=swap, costs=costs, prefix_seed=prefix_seed)
        prices = prices or Prices()
        self._token_s = costs.token_s
        self._order = FairOrder(
            config.policy, inner_order(config.inner), QUANTUM_TOKENS * prices.output, config.max_running
        )
        self._service = TenantService(prices, Lengths(), clock)
        self._budget = StepBudget(config)
        self._requests: dict[str, RequestState] = {}
        self._searches: dict[str, BeamSearch] = {}
        """Beam searches by the client's request id."""
        self._waiting = WaitingQueue(residency)
        self._deadlines: list[tuple[float, float, str]] = []
        """A heap of (second, arrival, request) of all that were to start by then."""
        self._running: list[RequestState] = []
        self._prefilling: set[RequestState] = set()
        """Running requests that have more to compute than their last token."""
        self._last_units = 0.0
        """Price of the step that was committed last."""
        self._started: set[str] = set()
        """Requests that got their pages in the step that was planned last."""
        self._budget_used = 0
        """Tokens of the budget in the step that was planned last."""
        self._outbox: list[RequestOutput] = []
        self._arrivals = 0
        self._step = 0
        self._stalls = 0
        self._no_holds_until = 0
        self.preemptions: dict[str, int] = dict.fromkeys(PREEMPTIONS, 0)
        """Preemptions since start, by how the request gets its KV cache back."""

    @property
    def num_running(self) -> int:
        """Requests with pages, in the step or paused."""
        return len(self._running)

    @property
    def num_rows(self) -> int:
        """Requests in the step."""
        return len(self._requests) - self._order.num_queued

    @property
    def num_waiting(self) -> int:
        """Requests without pages."""
        return len(self._waiting)

    @property
    def num_held_up(self) -> int:
        """Requests that wait for their adapters to be loaded though there are places for them in a step."""
        places = self._config.max_running - self.num_rows
        return min(places, self._waiting.num_loading()) if places > 0 else 0

    def has_work(self) -> bool:
        """Whether a request lives or an output waits to be taken."""
        return bool(self._requests or self._outbox)

    def submit(self, request: GenerationRequest) -> None:
        """Take a request in, to wait.

        Raises:
            QueueFullError: As many requests wait as may.
            InvalidRequestError: The id is in use, or a token id is unknown.
            ContextLengthError: Prompt and output are longer than the model takes.
            NeverFitsError: Even the empty pool is too small, as far as is known.
        """
        if len(self._waiting) >= self._config.max_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait already. Try again later.",
                retry_after_s=self._service.retry_after_s(len(self._waiting)),
            )
        if request.request_id in self._requests or request.request_id in self._searches:
            raise InvalidRequestError("request_id must be unique, got one that is in use.", param="request_id")
        check_limits(request, self._limits)
        adapter = request.adapter
        adapter_pages = self._residency.pages_needed(adapter) if adapter else 0
        self._kv.check_fits(request, adapter_pages)
        search = None
        if request.beam is not None:
            search = BeamSearch(request, request.beam, self._limits, self._config.max_running)
            request = search.begin()
        self._arrivals += 1
        state = RequestState(
            request=request,
            arrival_index=self._arrivals,
            arrived_s=self._clock(),
            seed=self._draw_seed() if request.params.seed is None else request.params.seed,
            adapter_state=self._residency.state(adapter.digest) if adapter else "base",
            geometry=self._geometry,
            pages=RequestPages(table=BlockTable(self._geometry)),
            adapter_pages=adapter_pages,
            output_token_ids=list(request.generated_token_ids),
            priority=request.flow.priority if self._config.policy == "fair" else 0,
        )
        self._predict(state)
        leader = self._requests.get(request.fork_of) if request.fork_of is not None else None
        if leader is not None and self._kv.may_fork(leader, state):
            state.leader, state.num_shared = leader, state.num_prompt - 1
        if search is not None:
            search.start(state)
            self._searches[state.request_id] = search
        self._requests[state.request_id] = state
        self._service.arrive(state)
        self._order.enter(state)
        self._wait(state)
        if 0 < request.params.max_tokens <= len(state.output_token_ids):
            self.finish(state.request_id, "length")

    def plan(self) -> StepPlan | None:
        """What to compute next; None when nothing can be computed now."""
        self._kv.begin_plan()
        self._end_expired()
        draft = Draft(step=self._step + 1)
        self._fill_rows(draft)
        self._plan_rows(draft)
        self._residency.reserve_pages = self._room_to_grow() + draft.promised
        plan = draft.plan() or self._resolve_stall(draft)
        if plan is None:
            return None
        self._stalls = 0 if plan.chunks else self._stalls
        self._step = draft.step
        self._started = draft.started
        return plan

    def commit(self, plan: StepPlan, results: list[ChunkResult]) -> list[RequestOutput]:
        """Take in what a step yielded; requests that ended meanwhile are passed over.

        Raises:
            EngineError: The results are not those of the plan; nothing was committed.
        """
        if [chunk.request_id for chunk in plan.chunks] != [result.request_id for result in results]:
            raise EngineError(f"step {plan.step} has {len(plan.chunks)} chunks, and results that do not fit them")
        computed = []
        for chunk, result in zip(plan.chunks, results, strict=True):
            state = self._requests.get(chunk.request_id)
            if state is not None and state.status == "running" and state.last_step == plan.step:
                computed.append((state, chunk, result))
        charges = self._service.charge((state, chunk) for state, chunk, _ in computed)
        self._order.charge(charges)
        self._last_units = sum(units for _, units in charges)
        for state, chunk, result in computed:
            self._commit_chunk(state, chunk, result)
        return self.take_outputs()

    def note_step(self, seconds: float) -> None:
        """Take note of how long the step took that was committed last."""
        self._service.note_step(self._last_units, seconds, is_full=self._order.num_queued > self._waiting.num_loading())
        self._budget.note_step(self._budget_used, seconds)

    def complete(self, step: int) -> None:
        """Note that a step is complete, so that pages which it read may be used again."""
        self._pool.complete(step)
        self._kv.note_complete()

    def take_outputs(self) -> list[RequestOutput]:
        """What happened to requests since the last call."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def finish(self, request_id: str, reason: FinishReason, error: RequestError | None = None) -> None:
        """End a request, whatever its state; unknown and finished ids are fine. A beam ends with its whole search."""
        state = self._requests.get(request_id)
        search_id = state.beam.search_id if state is not None and state.beam is not None else request_id
        search = self._searches.pop(search_id, None)
        if search is not None:
            state = search.first
        if state is None:
            return
        for each in [state] if search is None else search.beams:
            self._remove(each)
        output = ended(state, reason, error)
        if search is not None and reason == "abort":
            output = replace(output, hypotheses=search.unfinished())
        self._outbox.append(output)

    def fail_adapter(self, digest: str, error: WeftError) -> None:
        """End the requests that wait for an adapter that cannot be loaded."""
        for state in [state for state in self._waiting if state.digest == digest]:
            self.finish(state.request_id, "error", request_error(error))

    def fail_step(self, plan: StepPlan) -> None:
        """End the requests of a failed step with an internal error; what it should have moved or filled is lost."""
        for chunk in plan.chunks:
            self.finish(chunk.request_id, "error", INTERNAL)
        for state in [state for state in self._running if state.request_id in self._started]:
            # Its pages were to be filled. That is no preemption: nobody else gets them for that.
            marks = state.num_preemptions, state.progress_mark
            state.last_step = plan.step
            self._preempt(state, None)
            state.num_preemptions, state.progress_mark = marks
            self.preemptions["recompute"] -= 1
        self._lose_swapped(plan.step)
        self._last_units = 0.0

    def fail_running(self) -> None:
        """End all running requests with an internal error, after a plan that failed."""
        # The step that was being planned never runs: with those before it, it is complete.
        has_steps_under_way = self._pool.completed_step < self._step
        self._step += 1
        if not has_steps_under_way:
            self.complete(self._step)
        for state in list(self._running):
            self.finish(state.request_id, "error", INTERNAL)
        self._lose_swapped(self._step)

    def waiting_reasons(self) -> dict[str, int]:
        """Requests that wait, by reason."""
        return self._waiting.reasons()

    def load(self, boot_id: str, seq: int) -> EngineLoad:
        """What there is to do, by tenant; in time that grows with the requests that run, not with those that wait."""
        return EngineLoad(
            boot_id=boot_id,
            seq=seq,
            rate=self._service.full_rate,
            rows=self.num_rows,
            tenants=self._service.loads(self._running, self._waiting.by_tenant, {}),
            prices=self._service.prices,
        )

    def tenants(self) -> dict[str, TenantLoad]:
        """What each tenant has here, with the reasons why its requests wait."""
        reasons: dict[str, Counter[str]] = {}
        for state in self._waiting:
            reasons.setdefault(state.tenant, Counter())[state.waiting_reason] += 1
        told = {tenant: dict(counts) for tenant, counts in reasons.items()}
        return self._service.loads(self._running, self._waiting.by_tenant, told)

    def service_tokens(self, limit: int) -> dict[str, int]:
        """Tokens computed since start, of the `limit` busiest tenants."""
        return self._service.tokens(limit)

    def service(self, tenant: str) -> float:
        """Units computed for a tenant since start; what is computed again after a preemption is not counted."""
        return self._service.service(tenant)

    def num_running_base(self) -> int:
        """Running requests of the base model."""
        return sum(state.lease is None for state in self._running)

    def check(self) -> None:
        """Verify that every request is in one place, and that pages and references are those of the requests.

        Raises:
            EngineError: A request is in no place, in two, or has what its place does not allow.
            PageAccountingError: Pages were lost or are held twice.
        """
        running = {state.request_id for state in self._running}
        waiting = self._waiting.request_ids
        if running & waiting or running | waiting != self._requests.keys():
            raise EngineError("a request is not in exactly one of waiting and running")
        if self._order.check() != self._requests.keys() or self.num_rows > self._config.max_running:
            raise EngineError("the fair order has other requests, or more rows than a step")
        for state in self._waiting:
            if state.status != "waiting" or state.lease is not None or state.has_row:
                raise EngineError("a waiting request holds a lease or a row")
            if state.num_computed and state.pages.swapped is None:
                raise EngineError("a waiting request counts tokens as computed that are nowhere")
        for state in self._running:
            if state.status != "running" or state.is_holding or (state.lease is None) != (state.digest is None):
                raise EngineError("a running request has no lease, or still a hold")
        self._kv.check(self._running, list(self._waiting))

    def _wait(self, state: RequestState) -> None:
        self._waiting.add(state)
        self._service.wait(state)

    def _predict(self, state: RequestState) -> None:
        request, flow = state.request, state.request.flow
        cap = max(request.params.max_tokens, 1)
        state.predicted_tokens = self._service.lengths.p50(flow.tenant, state.digest, cap)
        if flow.deadline_s is not None:
            expires_s = state.arrived_s + flow.deadline_s
            state.start_by_s = expires_s - self._token_s * state.num_prompt
            heapq.heappush(self._deadlines, (expires_s, state.arrival_index, request.request_id))
            if len(self._deadlines) > 2 * len(self._requests) + MIN_LOOK_AHEAD:
                self._deadlines = [entry for entry in self._deadlines if self._awaits(entry) is not None]
                heapq.heapify(self._deadlines)

    def _awaits(self, deadline: tuple[float, float, str]) -> RequestState | None:
        """The request that is still to start by a deadline."""
        state = self._requests.get(deadline[2])
        if state is None or state.arrival_index != deadline[1] or state.has_started:
            return None
        return state

    def _end_expired(self) -> None:
        """End requests that were to have their first token by now and never started."""
        now_s = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            state = self._awaits(heapq.heappop(self._deadlines))
            if state is not None:
                self.finish(state.request_id, "error", EXPIRED)
        self._order.tick(now_s)

    def _fill_rows(self, draft: Draft) -> None:
        """Give rows to the first in the fair order, from what is free and from shares that are ahead."""
        is_whole_look = draft.step % WHOLE_LOOK_STEPS == 0
        has_room = self.num_rows < self._config.max_running
        is_due = has_room or is_whole_look or self._waiting.has_changed or draft.step % GLANCE_STEPS == 0
        if not self._order.num_queued or not (is_due or self._waiting.num_loading()):
            return
        self._waiting.has_changed = False
        # Each fork of a beam has a token for itself, so that a search takes a step in every step.
        num_forks = sum(search.num_forks for search in self._searches.values())
        draft.budget = self._budget.tokens(self._num_decoding()) - num_forks
        draft.prefilling = [(self._order.turn(state), state.num_left) for state in self._prefilling if state.has_row]
        overdue = self._waiting.overdue()
        looked = {state.request_id: state for state in overdue[:1]}
        for state in overdue[:1]:
            self._try_row(state, draft)
        blocked: list[RequestState] = []
        num_bypassed = 0
        line = self._order.candidates(max(MIN_LOOK_AHEAD, self._config.max_running))
        for state in line:
            # Requests that are overdue keep waiting those that are not far more entitled.
            if state.status == "running" or all(self._order.is_behind(late, state) for late in overdue):
                looked[state.request_id] = state
                reason = self._try_row(state, draft)
                if reason is None:
                    num_bypassed = len(blocked)
                elif reason == "NO_PAGES" or (reason == "NO_ROOM" and not self._waiting.is_unread(state)):
                    blocked.append(state)
            is_full = self.num_rows >= self._config.max_running
            if is_full and not is_whole_look and len(looked) >= GLANCE:
                break
        line.close()
        for state in blocked[:num_bypassed]:
            self._waiting.bypass(state)
        if has_room or is_whole_look:
            self._waiting.keep_holds(looked)
            self._residency.expect([state.digest for state in looked.values() if state.digest and state.is_holding])

    def _try_row(self, state: RequestState, draft: Draft) -> WaitingReason | None:
        """Give a request a row, and pages if it has none; or say, and note, what it lacks."""
        if state.status == "running":
            return "FORK" if state.is_idle else self._resume(state, draft)
        reason = self._why_not(state, draft)
        if reason is None:
            row = None if self.num_rows < self._config.max_running else self._order.row_for(state)
            if row is None and self.num_rows >= self._config.max_running:
                reason = "NEW"
            else:
                reason = self._start(state, row, draft)
        elif reason == "NO_ROOM" and state.is_holding:
            self._make_way_for_adapter(state, draft)
        if reason is not None and state.status == "waiting":
            state.waiting_reason = reason
            if reason in ("LOADING", "NO_ROOM"):
                self._order.pass_over(state)
        return reason

    def _resume(self, state: RequestState, draft: Draft) -> WaitingReason | None:
        if self.num_rows >= self._config.max_running:
            row = self._order.row_for(state)
            if row is None:
                return "NEW"
            self._pause(row, draft)
        self._order.start(state)
        return None

    def _pause(self, state: RequestState, draft: Draft) -> None:
        """Take the row from a request, which keeps its pages unless those of paused requests become too many."""
        groups = self._geometry.num_groups
        num_pages = sum(other.pages.table.num_blocks for other in (state, *self._order.paused)) * groups
        if PAUSED_SHARE * num_pages > self._pool.capacity and draft.may_preempt(state):
            self._preempt(state, draft)
        else:
            self._order.stop(state)

    def _why_not(self, state: RequestState, draft: Draft) -> WaitingReason | None:
        """What a waiting request lacks besides a row and pages for its tokens."""
        adapter = state.request.adapter
        if state.is_idle:
            return "FORK"
        if adapter is not None:
            if not self._check_fits(state):
                return "NEW"
            if adapter.digest == draft.leaving_adapter:
                return "NO_ROOM"
            if self._step >= self._no_holds_until or not self._running:
                self._waiting.hold(state)
            if self._residency.state(adapter.digest) != "device":
                return self._residency.waiting_reason(adapter.digest) if state.is_holding else "NO_ROOM"
        if self._waits_for_leader(state):
            return "FORK"
        return None if self._kv.may_look_up(state) else "NEW"

    def _plan_rows(self, draft: Draft) -> None:
        """One token for each row that decodes, and chunks of prompts in what the budget leaves."""
        rows = self._rows()
        draft.by_place = None  # rows changed hands
        draft.budget = self._budget.tokens(self._num_decoding())
        page_tokens = self._geometry.page_tokens
        counts: dict[str, int] = {}
        leases: set[int] = set()
        needy: list[tuple[tuple[float, ...], bool, RequestState]] = []
        for state in rows:
            if state.lease is not None and state.lease.slot not in leases and not self._check_lease(state, leases):
                continue
            num_computed = state.num_computed
            is_free = state.num_tokens == num_computed + 1 and not (state.in_batch_lane and self._budget.is_bounded)
            if is_free and num_computed < state.pages.table.num_blocks * page_tokens:
                counts[state.request_id] = 1
            else:
                needy.append((self._order.turn(state), is_free, state))
        needy.sort(key=itemgetter(0))
        budget = draft.budget
        for _, is_free, state in needy:
            if state.status != "running":
                continue  # it was preempted for one that is more entitled
            count = 1 if is_free else min(state.num_left, draft.budget)
            if count > 0 and not self._grow(state, state.num_computed + count, counts, draft):
                count = min(count, state.pages.table.num_blocks * page_tokens - state.num_computed)
            if count > 0:
                counts[state.request_id] = count
                draft.budget -= 0 if is_free else count
        self._budget_used = budget - draft.budget
        for state in rows:
            if count := counts.get(state.request_id, 0):
                draft.add(state, count)

    def _num_decoding(self) -> int:
        """Rows whose token is not counted in the budget."""
        counted = sum(state.has_row for state in self._prefilling)
        if self._budget.is_bounded:
            counted += sum(
                state.has_row and state.in_batch_lane for state in self._running if state not in self._prefilling
            )
        return self.num_rows - counted

    def _rows(self) -> list[RequestState]:
        return [state for state in self._running if state.has_row]

    def _check_lease(self, state: RequestState, checked: set[int]) -> bool:
        """Whether its adapter slot is still what its lease says; a slot that is goes to `checked`."""
        lease = state.lease
        if lease is None:
            return True
        try:
            self._residency.check_slot(lease.slot, lease.generation, lease.digest)
        except StaleSlotError:
            logger.exception("request %s lost its adapter slot", state.request_id)
            self.finish(state.request_id, "error", INTERNAL)
            return False
        checked.add(lease.slot)
        return True

    def _grow(self, state: RequestState, num_tokens: int, counts: dict[str, int], draft: Draft) -> bool:
        """Give a request with a row pages for `num_tokens` tokens, if need be from what is idle and less entitled.

        `counts` is what the step computes so far; a request that is preempted computes nothing.
        """
        count = self._kv.lacking(state, num_tokens)
        if count == 0:
            return True
        while self._kv.num_available < count + draft.promised:
            if self._waiting.yield_hold():
                self._no_holds_until = self._step + HOLD_PAUSE_STEPS
            elif (victim := self._less_entitled(state, draft)) is not None:
                counts.pop(victim.request_id, None)
                self._preempt(victim, draft)
            else:
                return False
        if self._kv.grow(state, count, draft):
            draft.started.add(state.request_id)  # a batch may go before those that are more entitled to pages
            return True
        draft.promised += count
        return False

    def _less_entitled(self, state: RequestState, draft: Draft) -> RequestState | None:
        """Whom to preempt for the growth of a request: of all behind it the last, paused ones first."""
        by_place = self._by_place(draft)
        while by_place and not (by_place[-1].status == "running" and draft.may_preempt(by_place[-1])):
            by_place.pop()
        return by_place[-1] if by_place and self._order.place(by_place[-1]) > self._order.place(state) else None

    def _by_place(self, draft: Draft) -> list[RequestState]:
        """Requests with pages, the most entitled first, as of the first time that the plan asks."""
        if draft.by_place is None:
            draft.by_place = sorted(self._running, key=self._order.place)
        return draft.by_place

    def _make_way(self, state: RequestState, num_pages: int, draft: Draft) -> bool:
        """Have pages come free for a waiting request, from those whose shares are far ahead of its own.

        Returns:
            Whether somebody was preempted; nobody is where all of them together have too few.
        """
        lack = num_pages - self._kv.num_available
        if lack <= 0 or (draft.unobtainable is not None and lack >= draft.unobtainable):
            return False
        users = Counter(other.digest for other in self._running)
        last_first = [other for other in reversed(self._by_place(draft)) if other.status == "running"]
        victims = []
        for other in self._order.yielding(state, filter(draft.may_preempt, last_first)):
            victims.append(other)
            lack -= self._kv.num_alone(other)
            users[other.digest] -= 1
            if other.digest is not None and not users[other.digest] and not self._waiting.holders_of(other.digest):
                lack -= other.adapter_pages or 0  # nobody uses its adapter any more
            if lack <= 0:
                break
        if lack > 0:
            draft.unobtainable = num_pages - self._kv.num_available
            return False
        for victim in victims:
            self._preempt(victim, draft)
        return True

    def _make_way_for_adapter(self, state: RequestState, draft: Draft) -> None:
        """Have pages, or a slot, come free for the adapter of a waiting request."""
        num_pages = (state.adapter_pages or 0) + self._room_to_grow()
        self._make_way(state, num_pages, draft)
        if draft.has_looked_for_slot or self._kv.num_available < num_pages or self._waiting.is_unread(state):
            return
        draft.has_looked_for_slot = True
        if not self._residency.lacks_slot:
            return
        users: dict[str, list[RequestState]] = {}
        for other in self._running:
            if other.digest is not None:
                users.setdefault(other.digest, []).append(other)
        for digest, running in sorted(users.items(), key=lambda item: len(item[1])):
            group = [*running, *self._waiting.holders_of(digest)]
            if all(map(draft.may_preempt, running)) and len(list(self._order.yielding(state, group))) == len(group):
                for victim in running:
                    self._preempt(victim, draft)
                self._waiting.release_holds(digest)
                draft.leaving_adapter = digest
                return

    def _preempt(self, state: RequestState, draft: Draft | None) -> None:
        """Take the pages from a request; without a draft there is no step that could swap them out."""
        how = self._kv.suspend(state, draft)
        self._release_lease(state)
        self._running.remove(state)
        self._prefilling.discard(state)
        state.restart()
        if how == "recompute":
            state.lose_kv()
        self._order.stop(state)
        self._wait(state)
        self.preemptions[how] += 1

    def _lose_swapped(self, step: int) -> None:
        """Have requests compute anew what a step that failed should have copied to the host."""
        for state in self._waiting:
            if state.pages.swapped is not None and state.pages.swapped.step == step:
                self._kv.forget_swapped(state)
                state.lose_kv()

    def _waits_for_leader(self, state: RequestState) -> bool:
        leader = state.leader
        if leader is None:
            return False
        is_without_pages = leader.num_preemptions if state.beam is None else leader.status == "waiting"
        if self._requests.get(leader.request_id) is not leader or is_without_pages or state.num_preemptions:
            state.leader = None
            return False
        return leader.num_computed < state.num_shared

    def _check_fits(self, state: RequestState) -> bool:
        """Refuse a request once it is known that its adapter leaves no room for it even in an empty pool."""
        if state.adapter_pages is None and state.request.adapter is not None:
            state.adapter_pages = self._residency.pages_needed(state.request.adapter)
            try:
                self._kv.check_fits(state.request, state.adapter_pages)
            except NeverFitsError as error:
                self.finish(state.request_id, "error", request_error(error))
                return False
        return True

    def _start(self, state: RequestState, row: RequestState | None, draft: Draft) -> WaitingReason | None:
        """Give a waiting request pages, and a row: a free one, or that of `row`, which is paused."""
        turn = self._order.turn(state)
        num_ahead = sum(left for other, left in draft.prefilling if other < turn)
        is_free = state.beam is not None and state.leader is not None  # one token, like those that decode
        if num_ahead >= draft.budget and not is_free:
            return "NEW"
        if state.digest is not None:
            state.lease = self._residency.acquire(state.digest)
            if state.lease is None:
                return self._residency.waiting_reason(state.digest)
        beginning = self._kv.beginning(state)
        count = 1 if is_free else min(state.num_tokens - beginning.num_tokens, draft.budget - num_ahead)
        num_tokens = max(beginning.num_tokens + count, state.tokens_to_reserve)
        if not self._find_pages(state, beginning, num_tokens, draft):
            if state.lease is not None:
                self._residency.release(state.lease.digest)  # no step has used it
                state.lease = None
            return "NO_PAGES"
        if row is not None and row.has_row:  # else it was preempted for its pages
            self._pause(row, draft)
        self._waiting.remove(state)
        self._service.stop_waiting(state)
        state.status, state.num_bypasses, state.leader = "running", 0, None
        self._running.append(state)
        self._order.start(state)
        if state.num_left > 1:
            self._prefilling.add(state)
            draft.prefilling.append((turn, state.num_left))
        draft.started.add(state.request_id)
        if state.queue_s is None:
            self._note_first_start(state)
        return None

    def _find_pages(self, state: RequestState, beginning: Beginning, num_tokens: int, draft: Draft) -> bool:
        """Give a waiting request its pages, from what is free or idle or from shares that are far ahead."""
        # The other beams of a search cannot grow before this one has started.
        room = 0 if state.beam is not None and state.output_token_ids else self._room_to_grow()
        if self._kv.start(state, beginning, num_tokens, room, draft):
            return True
        has_way = self._make_way(state, self._kv.num_lacking(beginning, num_tokens) + room, draft)
        if not has_way or self._waits_for_leader(state):
            return False
        # What was swapped out is there only in the next step. What was found before may be gone.
        beginning = self._kv.beginning(state)
        return beginning.num_tokens < num_tokens and self._kv.start(state, beginning, num_tokens, room, draft)

    def _note_first_start(self, state: RequestState) -> None:
        state.queue_s = self._clock() - state.arrived_s
        state.num_cached = min(state.num_computed, state.num_prompt)
        if not state.keeps_prompt_logprobs:
            self._kv.note_lookup(state.num_prompt, state.num_cached)

    def _room_to_grow(self) -> int:
        """Pages that admissions, and adapters on their way to the device, leave to those that run."""
        return min(len(self._running) * self._geometry.num_groups, self._pool.capacity // GROWTH_SHARE)

    def _resolve_stall(self, draft: Draft) -> StepPlan | None:
        """Nothing can be computed: make way for the first in line, or refuse it (see the module's docstring, 4, 6)."""
        first = self._first_in_line()
        # An adapter that is being read has no pages yet, so it is in nobody's way, however long it takes.
        if first is None or self._pool.num_quarantined or self._residency.is_copying:
            return None
        self._waiting.drop_holds(keep=first.digest)
        self._no_holds_until = 0
        if first.status == "waiting":
            self._waiting.bypass(first, MAX_BYPASSES)
        in_the_way = [state for state in self._running if state.is_idle and not _are_beams(state, first)]
        if in_the_way:
            self._preempt(max(in_the_way, key=self._order.place), draft)
            return draft.plan()
        self._stalls += 1
        if self._stalls > MAX_STALLS:
            self._stalls = 0
            error = CapacityError("Pinned adapters leave too little room for this request. Try again, or unpin some.")
            self.finish(first.request_id, "error", request_error(error))
        return None

    def _first_in_line(self) -> RequestState | None:
        """The most entitled that runs and is not idle, or else of those that idle ones wait for, or of all."""
        running = [state for state in self._running if not state.is_idle]
        awaited = [state for state in self._waiting if any(_are_beams(state, idle) for idle in self._running)]
        able = running or [state for state in awaited if not state.is_idle]
        if able:
            return min(able, key=self._order.place)
        line = self._order.candidates(MIN_LOOK_AHEAD)
        first = next((state for state in line if not state.is_idle and not self._waiting.is_unread(state)), None)
        line.close()
        return first

    def _release_lease(self, state: RequestState) -> None:
        if state.lease is not None:
            self._residency.release(state.lease.digest, state.last_step)
            state.lease = None

    def _remove(self, state: RequestState) -> None:
        del self._requests[state.request_id]
        if (
            state.caused_load
            and not self._waiting.pass_load_on(state)
            and self._residency.state(state.digest or "") == "device"
        ):
            self._order.charge(self._service.charge_load(state))
        self._order.leave(state)
        if state.status == "waiting":
            self._waiting.remove(state)
            self._service.stop_waiting(state)
            self._kv.forget_swapped(state)
        else:
            self._running.remove(state)
            self._prefilling.discard(state)
            self._kv.give_back(state, state.last_step)
            self._release_lease(state)  # only now: cached blocks of an adapter go with it
        self._service.note_end(state)

    def _commit_chunk(self, state: RequestState, chunk: Chunk, result: ChunkResult) -> None:
        if result.is_unsound:
            self.finish(state.request_id, "error", UNSOUND)
            return
        if state.beam is not None:
            self._commit_beam(state, state.beam, chunk, result)
            return
        output = advance(state, chunk, result, self._limits)
        if state.num_left <= 1:
            self._prefilling.discard(state)
        self._kv.publish(state)
        if output is None:
            return
        if output.finish_reason is not None:
            self._service.lengths.observe(state.tenant, state.digest, len(state.output_token_ids))
            self._remove(state)
        self._outbox.append(output)

    def _commit_beam(self, state: RequestState, beam: Beam, chunk: Chunk, result: ChunkResult) -> None:
        state.num_computed = chunk.start + len(chunk.token_ids)
        if state.num_left <= 1:
            self._prefilling.discard(state)
        self._kv.publish(state)
        if result.logprobs is None:  # the prompt goes on
            return
        step = self._searches[beam.search_id].take(state, beam, result.logprobs)
        if step is None:
            return
        for begun in step.begun:
            self._requests[begun.request_id] = begun
            self._service.arrive(begun)
            self._order.enter(begun)
            self._wait(begun)
        for ended_beam in step.ended:
            self._remove(ended_beam)
        if step.output is not None:
            del self._searches[beam.search_id]
            self._service.lengths.observe(state.tenant, state.digest, len(state.output_token_ids) + 1)
            self._outbox.append(step.output)


def _are_beams(state: RequestState, other: RequestState) -> bool:
    """Whether both are beams of one search."""
    return state.beam is not None and other.beam is not None and state.beam.search_id == other.beam.search_id
