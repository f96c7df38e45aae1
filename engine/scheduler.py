"""Decides what each step computes. Knows pages, digests and tokens; no tensors, no names, no transport.

A step holds one token of every request that decodes and, in what the token budget leaves, chunks of prompts: first of
those that run, then of those that are admitted. Waiting is a reason, not a place: each plan looks at all candidates,
and one that is blocked does not block those behind it.

Why everything that waits moves on. Entitlement to pages goes by age (lane, then arrival).

1. Among running requests the oldest goes first. For a page it evicts idle adapters, then drops the holds of waiting
   requests, then preempts the newest. One that finds nothing keeps its pages and sits the step out.
2. A preempted request returns with pages for one page of progress beyond where it stood, and cannot be preempted before
   it has made it. Meanwhile it needs no pages, so it advances in every step in which it gets tokens; hence no request
   is preempted twice without progress, and the oldest sits out only while such requests advance.
3. A waiting request that lacks pages is overtaken in at most `MAX_BYPASSES` steps. Then only it may be admitted, and
   the pages of those that run come to it.
4. When nothing can be computed although something wants to, only adapters can be in the way. All holds but those of
   the first in line are dropped and idle adapters evicted. If that changes nothing while nothing is loading and no
   freed page is in quarantine, the first in line cannot fit beside what is pinned, and is refused.
"""

from __future__ import annotations

import logging
import secrets
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.config import SchedulerConfig
from weft.engine.failures import INTERNAL, UNSOUND, request_error
from weft.engine.fit import ModelLimits, check_fits, check_limits
from weft.engine.neighbours import AdapterResidency
from weft.engine.order import admission_order
from weft.engine.plan import Chunk, ChunkResult, StepPlan
from weft.engine.progress import advance, ended
from weft.engine.request import FinishReason, GenerationRequest, RequestError, RequestOutput
from weft.engine.request_state import RequestState, WaitingReason
from weft.engine.tenant_service import TenantService
from weft.engine.waiting import MAX_BYPASSES, WaitingQueue
from weft.errors import (
    CapacityError,
    EngineError,
    InvalidRequestError,
    NeverFitsError,
    PageAccountingError,
    QueueFullError,
    StaleSlotError,
    WeftError,
)
from weft.memory.block_table import BlockTable
from weft.memory.geometry import PageGeometry
from weft.memory.pool import PagePool

logger = logging.getLogger(__name__)

MIN_LOOK_AHEAD = 64
"""Waiting requests looked at in a step; twice `max_running` if that is more."""
HOLD_PAUSE_STEPS = 16
"""Steps without new holds after running requests needed the pages of held adapters."""
MAX_STALLS = 16
"""Plans that may come to nothing, with nothing under way, before the first in line is refused."""
FULL_SCAN_STEPS = 8
"""While no more requests may run, an unchanged queue is looked at only every so many steps."""


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    step: int
    budget: int
    """Tokens left for prompts."""
    chunks: list[Chunk] = field(default_factory=list)
    zero_pages: list[int] = field(default_factory=list)

    def add(self, state: RequestState, count: int) -> None:
        self.chunks.append(state.chunk(count))
        state.last_step = self.step


class Scheduler:
    """Requests from arrival to end. `plan` and `commit` alternate; everything else may come in between.

    Args:
        config: Limits of a step and of the queue.
        geometry: Sizes of the pages.
        pool: Where KV pages come from; shared with the residency.
        residency: Where adapters are.
        limits: What the model bounds.
        clock: Monotonic seconds.
        draw_seed: Seeds for requests that bring none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        geometry: PageGeometry,
        pool: PagePool,
        residency: AdapterResidency,
        limits: ModelLimits,
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
        order = admission_order(config.policy)
        self._service = TenantService(order)
        self._requests: dict[str, RequestState] = {}
        self._waiting = WaitingQueue(order, residency, max(MIN_LOOK_AHEAD, 2 * config.max_running))
        self._running: list[RequestState] = []
        self._outbox: list[RequestOutput] = []
        self._arrivals = 0
        self._step = 0
        self._stalls = 0
        self._no_holds_until = 0
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Requests with pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without pages."""
        return len(self._waiting)

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
        if request.request_id in self._requests:
            raise InvalidRequestError("request_id must be unique, got one that is in use.", param="request_id")
        check_limits(request, self._limits)
        adapter = request.adapter
        adapter_pages = self._residency.pages_needed(adapter) if adapter else 0
        check_fits(request, self._geometry, self._pool.capacity, adapter_pages)
        self._arrivals += 1
        state = RequestState(
            request=request,
            arrival_index=self._arrivals,
            arrived_s=self._clock(),
            seed=self._draw_seed() if request.params.seed is None else request.params.seed,
            adapter_state=self._residency.state(adapter.digest) if adapter else "base",
            geometry=self._geometry,
            blocks=BlockTable(self._geometry),
            adapter_pages=adapter_pages,
            output_token_ids=list(request.generated_token_ids),
        )
        self._requests[state.request_id] = state
        self._waiting.add(state)
        if 0 < request.params.max_tokens <= len(state.output_token_ids):
            self.finish(state.request_id, "length")

    def plan(self) -> StepPlan | None:
        """What to compute next; None when nothing can be computed now."""
        num_decoding = sum(state.num_left == 1 for state in self._running)
        draft = _Draft(step=self._step + 1, budget=self._config.step_tokens - num_decoding)
        self._plan_running(draft)
        self._admit_waiting(draft)
        if not draft.chunks:
            self._resolve_stall()
            return None
        self._stalls = 0
        self._step = draft.step
        return StepPlan(step=draft.step, chunks=draft.chunks, zero_pages=draft.zero_pages)

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

    def take_outputs(self) -> list[RequestOutput]:
        """What happened to requests since the last call."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def finish(self, request_id: str, reason: FinishReason, error: RequestError | None = None) -> None:
        """End a request, whatever its state; unknown and finished ids are fine."""
        state = self._requests.get(request_id)
        if state is None:
            return
        self._remove(state)
        self._outbox.append(ended(state, reason, error))

    def fail_adapter(self, digest: str, error: WeftError) -> None:
        """End the requests that wait for an adapter that cannot be loaded."""
        for state in [state for state in self._waiting if state.digest == digest]:
            self.finish(state.request_id, "error", request_error(error))

    def fail_running(self) -> None:
        """End all running requests with an internal error, after a plan that failed."""
        for state in list(self._running):
            # The step that was being planned never runs, so no page may wait for its end.
            state.last_step = min(state.last_step, self._step)
            self.finish(state.request_id, "error", INTERNAL)

    def waiting_reasons(self) -> dict[str, int]:
        """Requests that wait, by reason."""
        return self._waiting.reasons()

    def backlog_tokens(self) -> dict[str, int]:
        """Tokens still to compute, by tenant."""
        backlog: Counter[str] = Counter()
        for state in self._requests.values():
            backlog[state.tenant] += state.backlog_tokens
        return dict(backlog)

    def service_tokens(self, limit: int) -> dict[str, int]:
        """Tokens computed since start, of the `limit` busiest tenants."""
        return self._service.tokens(limit)

    def check(self) -> None:
        """Verify that every request is in one place and that the KV pages are those of the running ones.

        Raises:
            EngineError: A request is in no place, in two, or has what its place does not allow.
            PageAccountingError: KV pages were lost or are held twice.
        """
        running = {state.request_id for state in self._running}
        waiting = self._waiting.request_ids
        if running & waiting or running | waiting != self._requests.keys():
            raise EngineError("a request is not in exactly one of waiting and running")
        for state in self._waiting:
            if state.status != "waiting" or state.lease is not None or state.blocks.num_blocks:
                raise EngineError("a waiting request holds pages or a lease")
        for state in self._running:
            if state.status != "running" or state.is_holding or (state.lease is None) != (state.digest is None):
                raise EngineError("a running request has no lease, or still a hold")
        pages = [page for state in self._running for page in state.blocks.all_pages()]
        if len(set(pages)) != len(pages) or len(pages) != self._pool.counts()["kv"]:
            raise PageAccountingError(f"requests hold {len(pages)} KV pages, the pool says {self._pool.counts()}")

    def _plan_running(self, draft: _Draft) -> None:
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

    def _grow(self, state: RequestState, num_tokens: int, draft: _Draft) -> bool:
        """Give a running request pages for `num_tokens` tokens, if need be from adapters and newer requests."""
        count = state.blocks.blocks_needed(num_tokens) * self._geometry.num_groups
        pages = self._pool.allocate(count, "kv")
        if pages is None and self._evict(count):
            pages = self._pool.allocate(count, "kv")
        while pages is None and (victim := self._newest_to_preempt(state)) is not None:
            self._preempt(victim)
            pages = self._pool.allocate(count, "kv")
        if pages is None:
            return False
        state.blocks.append(pages)
        draft.zero_pages += pages
        return True

    def _evict(self, count: int) -> bool:
        """Try to have `count` pages free, from adapters that do not run."""
        self._residency.evict_idle(count - self._pool.num_free)
        if self._pool.num_free < count and self._waiting.drop_holds(keep=None):
            self._no_holds_until = self._step + HOLD_PAUSE_STEPS
            self._residency.evict_idle(count - self._pool.num_free)
        return self._pool.num_free >= count

    def _newest_to_preempt(self, state: RequestState) -> RequestState | None:
        newer = reversed(self._running[self._running.index(state) + 1 :])
        return next((candidate for candidate in newer if not candidate.is_protected), None)

    def _preempt(self, state: RequestState) -> None:
        self._give_back(state)
        self._running.remove(state)
        state.restart()
        self._waiting.add(state)
        self.num_preemptions += 1

    def _admit_waiting(self, draft: _Draft) -> None:
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
                if reason == "NO_PAGES" or (reason == "NO_ROOM" and not self._is_unread(state)):
                    blocked.append(state)
        for state in blocked[:num_bypassed]:
            state.num_bypasses += 1

    def _try_admit(self, state: RequestState, draft: _Draft) -> WaitingReason | None:
        """Let a waiting request run, or say what it lacks."""
        adapter = state.request.adapter
        if adapter is not None:
            if not self._check_fits(state):
                return "NEW"
            if self._step >= self._no_holds_until or not self._running:
                self._waiting.hold(state)
            if self._residency.state(adapter.digest) != "device":
                return self._residency.waiting_reason(adapter.digest) if state.is_holding else "NO_ROOM"
        if draft.budget <= 0 or len(self._running) >= self._config.max_running:
            return "NEW"
        return self._start(state, draft)

    def _check_fits(self, state: RequestState) -> bool:
        """Refuse a request once it is known that its adapter leaves no room for it even in an empty pool."""
        if state.adapter_pages is None and state.request.adapter is not None:
            state.adapter_pages = self._residency.pages_needed(state.request.adapter)
            try:
                check_fits(state.request, self._geometry, self._pool.capacity, state.adapter_pages)
            except NeverFitsError as error:
                self.finish(state.request_id, "error", request_error(error))
                return False
        return True

    def _is_unread(self, state: RequestState) -> bool:
        """Whether its adapter is in the queue of the loaders, which pages would not shorten."""
        return state.digest is not None and self._residency.state(state.digest) == "stored"

    def _start(self, state: RequestState, draft: _Draft) -> WaitingReason | None:
        if state.digest is not None:
            state.lease = self._residency.acquire(state.digest)
            if state.lease is None:
                return self._residency.waiting_reason(state.digest)
        count = min(state.num_left, draft.budget)
        pages = self._pages_to_start(max(count, state.tokens_to_reserve))
        if pages is None:
            if state.lease is not None:
                self._residency.release(state.lease.digest)
                state.lease = None
            return "NO_PAGES"
        state.blocks.append(pages)
        draft.zero_pages += pages
        self._waiting.remove(state)
        state.status, state.num_bypasses = "running", 0
        insort(self._running, state, key=lambda other: other.age_key)
        if state.queue_s is None:
            state.queue_s = self._clock() - state.arrived_s
        draft.add(state, count)
        draft.budget -= count
        return None

    def _pages_to_start(self, num_tokens: int) -> list[int] | None:
        """Pages for an admission: never at the price of a running request, and with room left for those to grow."""
        count = self._geometry.pages(num_tokens)
        room = min(len(self._running) * self._geometry.num_groups, self._pool.capacity // 16)
        if self._pool.num_free < count + room:
            self._residency.evict_idle(count + room - self._pool.num_free)
        return self._pool.allocate(count, "kv") if self._pool.num_free >= count + room else None

    def _resolve_stall(self) -> None:
        """Nothing can be computed: make way for the first in line, or refuse it (see the module's docstring, 4)."""
        first = self._running[0] if self._running else next(iter(self._waiting.candidates()), None)
        is_under_way = self._pool.num_quarantined or any(a.tier == "loading" for a in self._residency.residents())
        if first is None or is_under_way:
            return
        self._waiting.drop_holds(keep=first.digest)
        self._no_holds_until = 0
        self._residency.evict_idle(self._pool.capacity)
        if first.status == "waiting":
            first.num_bypasses = MAX_BYPASSES
        self._stalls += 1
        if self._stalls > MAX_STALLS:
            self._stalls = 0
            error = CapacityError("Pinned adapters leave too little room for this request. Try again, or unpin some.")
            self.finish(first.request_id, "error", request_error(error))

    def _give_back(self, state: RequestState) -> None:
        self._pool.free(state.blocks.all_pages(), state.last_step)
        if state.lease is not None:
            self._residency.release(state.lease.digest, state.last_step)

    def _remove(self, state: RequestState) -> None:
        del self._requests[state.request_id]
        if state.status == "waiting":
            self._waiting.remove(state)
        else:
            self._running.remove(state)
            self._give_back(state)
        self._service.note_end(self._clock())

    def _commit_chunk(self, state: RequestState, chunk: Chunk, result: ChunkResult) -> None:
        if result.is_unsound:
            self.finish(state.request_id, "error", UNSOUND)
            return
        output = advance(state, chunk, result, self._limits)
        self._service.charge(state, chunk)
        if output is None:
            return
        if output.finish_reason is not None:
            self._remove(state)
        self._outbox.append(output)
