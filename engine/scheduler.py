"""Decides what each step computes. Knows pages, digests and tokens; no tensors, no names, no transport.

A step holds one token of every request that decodes and, in what the token budget leaves, chunks of prompts: first of
those that run, then of those that are admitted. Waiting is a reason, not a place: each plan looks at all candidates,
and one that is blocked does not block those behind it.

Why everything that waits moves on. Entitlement to pages goes by age (lane, then arrival). A request that waits has no
device pages and no lease, so nobody waits for it but a fork (5), and what nobody runs with can be evicted.

1. Among running requests the oldest goes first. For a page it evicts idle adapters and cached prefixes, then drops the
   holds of waiting requests, the newest first, then preempts the newest that runs. One that finds nothing keeps its
   pages and sits the step out. Pages that are swapped out are free only after the step that copies them: they are
   promised to those who made others give them up, who sit out this one step, in which nobody is admitted. Such a step
   may compute nothing at all; each has a preemption, so (2) bounds them.
2. A preempted request returns with pages for one page of progress beyond where it stood, and cannot be preempted before
   it has made it. Meanwhile it needs no pages, so it advances in every step in which it gets tokens; hence no request
   is preempted twice without progress, and the oldest sits out only while such requests advance. That holds whether its
   KV cache comes back from the host, from the prefix cache, or is computed anew, since "where it stood" is kept.
3. A waiting request that lacks pages is overtaken in at most `MAX_BYPASSES` steps. Then only it may be admitted, and
   the pages of those that run come to it. While its adapter is still to be read, which may hang, others go on.
4. When nothing can be computed although something wants to, only adapters can be in the way: cached prefixes that
   nobody runs with are evicted for whoever needs the pages. All holds but those of the first in line are dropped, so
   that their adapters can be evicted too. If that changes nothing while nothing is being copied and no freed page is in
   quarantine, the first in line cannot fit beside what is pinned, and is refused. First in line is who runs longest,
   or else the first whose adapter has been read.
5. A fork waits for the prompt of its leader, an older request of its lane, tenant and adapter, which so stands before
   it in any order. It stops waiting when the leader has computed its prompt, was preempted or has ended; forks of
   forks go back to ever older requests, so there is no circle.
6. A beam with a result is idle: it waits, with or without pages, for the other beams of its search, which are as old as
   it is. When nothing can be computed, idle beams are in the way of the first in line: those of other searches are
   preempted, the newest first, protected or not. So the oldest search always gets its pages, which (by its check on
   arrival) are not more than there are, and each of its steps takes a bounded number of others'.
"""

from __future__ import annotations

import logging
import secrets
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable

from weft.config import SchedulerConfig
from weft.engine.beam import BeamSearch
from weft.engine.draft import Draft
from weft.engine.failures import INTERNAL, UNSOUND, request_error
from weft.engine.fit import ModelLimits, check_limits
from weft.engine.kv_pages import PREEMPTIONS, KvPages
from weft.engine.neighbours import AdapterResidency
from weft.engine.order import admission_order
from weft.engine.plan import Chunk, ChunkResult, StepPlan
from weft.engine.progress import advance, ended
from weft.engine.request import FinishReason, GenerationRequest, RequestError, RequestOutput
from weft.engine.request_pages import RequestPages
from weft.engine.request_state import Beam, RequestState, WaitingReason
from weft.engine.status import EngineLoad, TenantLoad
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
"""Waiting requests looked at in a step; twice `max_running` if that is more."""
HOLD_PAUSE_STEPS = 16
"""Steps without new holds after running requests needed the pages of held adapters."""
MAX_STALLS = 16
"""Plans that may come to nothing, with nothing under way, before the first in line is refused."""
FULL_SCAN_STEPS = 8
"""While no more requests may run, an unchanged queue is looked at only every so many steps."""
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
        order = admission_order(config.policy)
        self._service = TenantService(order)
        self._requests: dict[str, RequestState] = {}
        self._searches: dict[str, BeamSearch] = {}
        """Beam searches by the client's request id."""
        self._waiting = WaitingQueue(order, residency, max(MIN_LOOK_AHEAD, 2 * config.max_running))
        self._running: list[RequestState] = []
        self._outbox: list[RequestOutput] = []
        self._arrivals = 0
        self._step = 0
        self._stalls = 0
        self._no_holds_until = 0
        self.preemptions: dict[str, int] = dict.fromkeys(PREEMPTIONS, 0)
        """Preemptions since start, by how the request gets its KV cache back."""

    @property
    def num_running(self) -> int:
        """Requests with pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without pages."""
        return len(self._waiting)

    @property
    def num_held_up(self) -> int:
        """Requests that wait for their adapters to be loaded though there are places for them in a step."""
        places = self._config.max_running - len(self._running)
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
        )
        leader = self._requests.get(request.fork_of) if request.fork_of is not None else None
        if leader is not None and self._kv.may_fork(leader, state):
            state.leader, state.num_shared = leader, state.num_prompt - 1
        if search is not None:
            search.start(state)
            self._searches[state.request_id] = search
        self._requests[state.request_id] = state
        self._waiting.add(state)
        if 0 < request.params.max_tokens <= len(state.output_token_ids):
            self.finish(state.request_id, "length")

    def plan(self) -> StepPlan | None:
        """What to compute next; None when nothing can be computed now."""
        self._kv.begin_plan()
        num_decoding = sum(state.num_left == 1 for state in self._running)
        draft = Draft(step=self._step + 1, budget=self._config.step_tokens - num_decoding)
        self._plan_running(draft)
        if not draft.promised:
            self._admit_waiting(draft)
        self._residency.reserve_pages = self._room_to_grow() + draft.promised
        plan = draft.plan() or self._resolve_stall(draft)
        if plan is None:
            return None
        self._stalls = 0 if plan.chunks else self._stalls
        self._step = draft.step
        return plan

    def commit(self, plan: StepPlan, results: list[ChunkResult]) -> list[RequestOutput]:
        """Take in what a step yielded; requests that ended meanwhile are passed over.

        Raises:
            EngineError: The results are not those of the plan; nothing was committed.
        """
        if [chunk.request_id for chunk in plan.chunks] != [result.request_id for result in results]:
            raise EngineError(f"step {plan.step} has {len(plan.chunks)} chunks, and results that do not fit them")
        for chunk, result in zip(plan.chunks, results, strict=True):
            state = self._requests.get(chunk.request_id)
            if state is not None and state.status == "running" and state.last_step == plan.step:
                self._commit_chunk(state, chunk, result)
        return self.take_outputs()

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
        self._service.note_end(self._clock())
        self._outbox.append(ended(state, reason, error))

    def fail_adapter(self, digest: str, error: WeftError) -> None:
        """End the requests that wait for an adapter that cannot be loaded."""
        for state in [state for state in self._waiting if state.digest == digest]:
            self.finish(state.request_id, "error", request_error(error))

    def fail_step(self, plan: StepPlan) -> None:
        """End the requests of a step that failed with an internal error; what it should have swapped out is lost."""
        for chunk in plan.chunks:
            self.finish(chunk.request_id, "error", INTERNAL)
        self._lose_swapped(plan.step)

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

    def backlog_tokens(self) -> dict[str, int]:
        """Tokens still to compute, by tenant."""
        backlog: Counter[str] = Counter()
        for state in self._requests.values():
            backlog[state.tenant] += state.backlog_tokens
        return dict(backlog)

    def waiting_by_tenant(self) -> dict[str, int]:
        """Requests that wait, by tenant."""
        return dict(Counter(state.tenant for state in self._waiting))

    def load(self, boot_id: str, seq: int) -> EngineLoad:
        """What each tenant has here."""
        running = Counter(state.tenant for state in self._running)
        waiting = self.waiting_by_tenant()
        backlog = self.backlog_tokens()
        return EngineLoad(
            boot_id=boot_id,
            seq=seq,
            rows=len(self._running),
            tenants={
                tenant: TenantLoad(running=running[tenant], waiting=waiting.get(tenant, 0), backlog=backlog[tenant])
                for tenant in backlog
            },
        )

    def num_running_base(self) -> int:
        """Running requests of the base model."""
        return sum(state.lease is None for state in self._running)

    def service_tokens(self, limit: int) -> dict[str, int]:
        """Tokens computed since start, of the `limit` busiest tenants."""
        return self._service.tokens(limit)

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
        for state in self._waiting:
            if state.status != "waiting" or state.lease is not None:
                raise EngineError("a waiting request holds a lease")
            if state.num_computed and state.pages.swapped is None:
                raise EngineError("a waiting request counts tokens as computed that are nowhere")
        for state in self._running:
            if state.status != "running" or state.is_holding or (state.lease is None) != (state.digest is None):
                raise EngineError("a running request has no lease, or still a hold")
        self._kv.check(self._running, list(self._waiting))

    def _plan_running(self, draft: Draft) -> None:
        for state in list(self._running):
            if state.status != "running" or not self._check_lease(state):
                continue  # it was preempted for an older one, or its slot is not what it was
            is_decoding = state.num_left == 1
            count = 1 if is_decoding else min(state.num_left, draft.budget)
            if count == 0 or not self._grow(state, state.num_computed + count, draft):
                continue
            draft.add(state, count)
            draft.budget -= 0 if is_decoding else count

    def _check_lease(self, state: RequestState) -> bool:
        lease = state.lease
        if lease is None:
            return True
        try:
            self._residency.check_slot(lease.slot, lease.generation, lease.digest)
        except StaleSlotError:
            logger.exception("request %s lost its adapter slot", state.request_id)
            self.finish(state.request_id, "error", INTERNAL)
            return False
        return True

    def _grow(self, state: RequestState, num_tokens: int, draft: Draft) -> bool:
        """Give a running request pages for `num_tokens` tokens, if need be from what is idle and newer requests."""
        count = self._kv.lacking(state, num_tokens)
        if count == 0:
            return True
        while self._kv.num_available < count + draft.promised:
            if self._waiting.yield_hold():
                self._no_holds_until = self._step + HOLD_PAUSE_STEPS
            elif (victim := self._newest_to_preempt(state)) is not None:
                self._preempt(victim, draft)
            else:
                return False
        if self._kv.grow(state, count, draft):
            return True
        draft.promised += count
        return False

    def _newest_to_preempt(self, state: RequestState) -> RequestState | None:
        newer = reversed(self._running[self._running.index(state) + 1 :])
        return next((candidate for candidate in newer if not candidate.is_protected), None)

    def _preempt(self, state: RequestState, draft: Draft) -> None:
        how = self._kv.suspend(state, draft)
        self._release_lease(state)
        self._running.remove(state)
        state.restart()
        if how == "recompute":
            state.lose_kv()
        self._waiting.add(state)
        self.preemptions[how] += 1

    def _lose_swapped(self, step: int) -> None:
        """Have requests compute anew what a step that failed should have copied to the host."""
        for state in self._waiting:
            if state.pages.swapped is not None and state.pages.swapped.step == step:
                self._kv.forget_swapped(state)
                state.lose_kv()

    def _admit_waiting(self, draft: Draft) -> None:
        is_full = len(self._running) >= self._config.max_running
        if not self._waiting or (is_full and not self._waiting.has_changed and draft.step % FULL_SCAN_STEPS):
            return
        self._waiting.has_changed = False
        draft.budget = self._config.step_tokens - sum(len(chunk.token_ids) for chunk in draft.chunks)
        blocked: list[RequestState] = []
        num_bypassed = 0
        for state in self._waiting.candidates():
            reason = self._try_admit(state, draft)
            if reason is None:
                num_bypassed = len(blocked)
            else:
                state.waiting_reason = reason
                if reason == "NO_PAGES" or (reason == "NO_ROOM" and not self._waiting.is_unread(state)):
                    blocked.append(state)
        for state in blocked[:num_bypassed]:
            state.num_bypasses += 1

    def _try_admit(self, state: RequestState, draft: Draft) -> WaitingReason | None:
        """Let a waiting request run, or say what it lacks."""
        adapter = state.request.adapter
        if state.is_idle:
            return "FORK"
        if adapter is not None:
            if not self._check_fits(state):
                return "NEW"
            if self._step >= self._no_holds_until or not self._running:
                self._waiting.hold(state)
            if self._residency.state(adapter.digest) != "device":
                return self._residency.waiting_reason(adapter.digest) if state.is_holding else "NO_ROOM"
        if self._waits_for_leader(state):
            return "FORK"
        if draft.budget <= 0 or len(self._running) >= self._config.max_running or not self._kv.may_look_up(state):
            return "NEW"
        return self._start(state, draft)

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

    def _start(self, state: RequestState, draft: Draft) -> WaitingReason | None:
        if state.digest is not None:
            state.lease = self._residency.acquire(state.digest)
            if state.lease is None:
                return self._residency.waiting_reason(state.digest)
        beginning = self._kv.beginning(state)
        count = min(state.num_tokens - beginning.num_tokens, draft.budget)
        num_tokens = max(beginning.num_tokens + count, state.tokens_to_reserve)
        # The other beams of a search cannot grow before this one has started.
        room = 0 if state.beam is not None and state.output_token_ids else self._room_to_grow()
        if not self._kv.start(state, beginning, num_tokens, room, draft):
            if state.lease is not None:
                self._residency.release(state.lease.digest)  # no step has used it
                state.lease = None
            return "NO_PAGES"
        self._waiting.remove(state)
        state.status, state.num_bypasses, state.leader = "running", 0, None
        insort(self._running, state, key=lambda other: other.age_key)
        if state.queue_s is None:
            self._note_first_start(state)
        draft.add(state, count)
        draft.budget -= count
        return None

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
        is_under_way = self._pool.num_quarantined or any(
            adapter.tier == "loading" and self._residency.state(adapter.digest) != "stored"
            for adapter in self._residency.residents()
        )
        if first is None or is_under_way:
            return None
        self._waiting.drop_holds(keep=first.digest)
        self._no_holds_until = 0
        if first.status == "waiting":
            first.num_bypasses = MAX_BYPASSES
        in_the_way = (state for state in reversed(self._running) if state.is_idle and not _are_beams(state, first))
        if (victim := next(in_the_way, None)) is not None:
            self._preempt(victim, draft)
            return draft.plan()
        self._stalls += 1
        if self._stalls > MAX_STALLS:
            self._stalls = 0
            error = CapacityError("Pinned adapters leave too little room for this request. Try again, or unpin some.")
            self.finish(first.request_id, "error", request_error(error))
        return None

    def _first_in_line(self) -> RequestState | None:
        """Who runs longest and is not idle, or else the oldest that idle ones wait for, or that waits by itself."""
        for state in self._running:
            if not state.is_idle:
                return state
        awaited = [state for state in self._waiting if any(_are_beams(state, idle) for idle in self._running)]
        candidates = sorted(awaited, key=lambda state: state.age_key) or self._waiting.candidates()
        return next((state for state in candidates if not state.is_idle and not self._waiting.is_unread(state)), None)

    def _release_lease(self, state: RequestState) -> None:
        if state.lease is not None:
            self._residency.release(state.lease.digest, state.last_step)
            state.lease = None

    def _remove(self, state: RequestState) -> None:
        del self._requests[state.request_id]
        if state.status == "waiting":
            self._waiting.remove(state)
            self._kv.forget_swapped(state)
        else:
            self._running.remove(state)
            self._kv.give_back(state, state.last_step)
            self._release_lease(state)  # only now: cached blocks of an adapter go with it

    def _commit_chunk(self, state: RequestState, chunk: Chunk, result: ChunkResult) -> None:
        if result.is_unsound:
            self.finish(state.request_id, "error", UNSOUND)
            return
        if state.beam is not None:
            self._commit_beam(state, state.beam, chunk, result)
            return
        output = advance(state, chunk, result, self._limits)
        self._service.charge(state, chunk)
        self._kv.publish(state)
        if output is None:
            return
        if output.finish_reason is not None:
            self._remove(state)
            self._service.note_end(self._clock())
        self._outbox.append(output)

    def _commit_beam(self, state: RequestState, beam: Beam, chunk: Chunk, result: ChunkResult) -> None:
        state.num_computed = chunk.start + len(chunk.token_ids)
        self._service.charge(state, chunk)
        self._kv.publish(state)
        if result.logprobs is None:  # the prompt goes on
            return
        step = self._searches[beam.search_id].take(state, beam, result.logprobs)
        if step is None:
            return
        for begun in step.begun:
            self._requests[begun.request_id] = begun
            self._waiting.add(begun)
        for ended_beam in step.ended:
            self._remove(ended_beam)
        if step.output is not None:
            del self._searches[beam.search_id]
            self._service.note_end(self._clock())
            self._outbox.append(step.output)


def _are_beams(state: RequestState, other: RequestState) -> bool:
    """Whether both are beams of one search."""
    return state.beam is not None and other.beam is not None and state.beam.search_id == other.beam.search_id
