"""All requests of the engine: each is either waiting or running, and in the fair order, with its pages and lease.

Other modules decide when a request moves from one state to another. This one updates all records of it at once.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from manylora.adapters.residency.residency import Residency
from manylora.engine.fairness.fair_order import FairOrder
from manylora.engine.fairness.tenant_service import TenantService
from manylora.engine.scheduling.kv_pages import PREEMPTIONS, KvPages
from manylora.engine.scheduling.request_state import RequestState
from manylora.errors import EngineError

MAX_BYPASSES = 16
"""Steps in which others may be admitted past a request that lacks pages."""
SPARE_ENTRIES = 64
"""Entries of requests that started or ended may be as many as there are requests, and this many more."""


class Deadlines:
    """The seconds by which requests must start.

    Args:
        requests: All that live, by id.
    """

    def __init__(self, requests: Mapping[str, RequestState]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, float, str]] = []
        """(second, arrival, request)."""

    def add(self, state: RequestState, expires_s: float) -> None:
        """A request arrived that is to start by then."""
        heapq.heappush(self._heap, (expires_s, state.arrival_index, state.request_id))
        if len(self._heap) > 2 * len(self._requests) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._awaits(entry) is not None]
            heapq.heapify(self._heap)

    def take_expired(self, now_s: float) -> Iterator[RequestState]:
        """Requests that were to start by now and never did, each once."""
        while self._heap and self._heap[0][0] <= now_s:
            state = self._awaits(heapq.heappop(self._heap))
            if state is not None:
                yield state

    def _awaits(self, entry: tuple[float, float, str]) -> RequestState | None:
        """The request that is still to start by a deadline."""
        state = self._requests.get(entry[2])
        return (
            None if state is None or state.arrival_index != entry[1] or state.has_started else state
        )


class WaitingQueue:
    """All waiting requests. A hold keeps an adapter coming to the device, or on it, for a request near the front.

    Args:
        residency: Where adapters are.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._states: dict[str, RequestState] = {}
        self._holders: dict[str, dict[str, RequestState]] = {}
        """Those with a hold, by adapter and request."""
        self._overdue: dict[str, RequestState] = {}
        """Those that were overtaken as often as may be."""
        self.has_changed = False
        """Whether a request came; the reader resets it."""
        self.by_tenant: Counter[str] = Counter()
        """How many wait, by tenant; only tenants that have some."""

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def add(self, state: RequestState) -> None:
        """Let a request wait."""
        self._states[state.request_id] = state
        self.has_changed = True
        self.by_tenant[state.tenant] += 1

    def remove(self, state: RequestState) -> None:
        """It no longer waits; its hold goes too."""
        del self._states[state.request_id]
        self.by_tenant[state.tenant] -= 1
        if not self.by_tenant[state.tenant]:
            del self.by_tenant[state.tenant]
        self._overdue.pop(state.request_id, None)
        self._unhold(state)

    def bypass(self, state: RequestState, count: int = 1) -> None:
        """Others were admitted past it `count` times."""
        state.num_bypasses += count
        if state.num_bypasses >= MAX_BYPASSES:
            self._overdue[state.request_id] = state

    def overdue(self) -> list[RequestState]:
        """Those that were overtaken as often as may be, the oldest first: nobody behind them may be admitted now.

        A request keeps nobody else waiting while its adapter is still to be read: pages would not help it.
        """
        overdue = [state for state in self._overdue.values() if not self.is_unread(state)]
        return sorted(overdue, key=lambda state: state.age_key)

    def is_unread(self, state: RequestState) -> bool:
        """Whether its adapter is still to be read from the store, which pages would not shorten."""
        return state.digest is not None and self._residency.state(state.digest) == "stored"

    def hold(self, state: RequestState) -> None:
        """Have the request's adapter loaded and kept for it."""
        if not state.is_holding and state.request.adapter is not None:
            adapter = state.request.adapter
            if (
                adapter.digest not in self._holders
                and self._residency.state(adapter.digest) != "device"
            ):
                state.caused_load = True
            self._residency.hold(adapter)
            state.is_holding = True
            self._holders.setdefault(adapter.digest, {})[state.request_id] = state

    def holders_of(self, digest: str) -> list[RequestState]:
        """Requests that hold an adapter."""
        return list(self._holders.get(digest, {}).values())

    def release_holds(self, digest: str) -> None:
        """Drop the holds on one adapter."""
        for state in self.holders_of(digest):
            self._unhold(state)

    def pass_load_on(self, state: RequestState) -> bool:
        """Have another request that holds the same adapter be charged for its load; False where there is none."""
        heir = next(
            (other for other in self.holders_of(state.digest or "") if other is not state), None
        )
        if heir is not None:
            state.caused_load, heir.caused_load = False, True
        return heir is not None

    def yield_hold(self) -> bool:
        """Drop the newest hold on an adapter with pages, for a running request that lacks some; False without one."""
        with_pages = [
            state
            for state in self._all_holders()
            if self._residency.state(state.digest or "") == "device"
        ]
        if with_pages:
            self._unhold(max(with_pages, key=lambda state: state.age_key))
        return bool(with_pages)

    def drop_holds(self, is_kept: Callable[[RequestState], bool]) -> None:
        """Drop the holds of all other requests; their adapters can then be evicted."""
        for state in [state for state in self._all_holders() if not is_kept(state)]:
            self._unhold(state)

    def num_loading(self) -> int:
        """Requests near the front that wait for their adapters to be loaded, and for nothing else."""
        return sum(state.waiting_reason == "LOADING" for state in self._all_holders())

    def reasons(self) -> dict[str, int]:
        """Requests by what they wait for."""
        return dict(Counter(state.waiting_reason for state in self))

    def _unhold(self, state: RequestState) -> None:
        if state.is_holding and state.digest is not None:
            state.is_holding = False
            del self._holders[state.digest][state.request_id]
            if not self._holders[state.digest]:
                del self._holders[state.digest]
            self._residency.release_hold(state.digest)

    def _all_holders(self) -> Iterator[RequestState]:
        return chain.from_iterable(map(dict.values, self._holders.values()))


class RequestTable:
    """The requests and everything that keeps a record of them.

    Args:
        order: Who is next for a row.
        service: What tenants were given and still ask for.
        kv: Pages of requests.
        residency: Where adapters are.
        max_rows: Most requests in a step.
    """

    def __init__(
        self,
        order: FairOrder,
        service: TenantService,
        kv: KvPages,
        residency: Residency,
        max_rows: int,
    ) -> None:
        self.order = order
        self.service = service
        self.kv = kv
        self.residency = residency
        self.max_rows = max_rows
        self.requests: dict[str, RequestState] = {}
        self.waiting = WaitingQueue(residency)
        """Those without pages."""
        self.running: list[RequestState] = []
        """Those with pages, in the step or paused."""
        self.parked: dict[str, RequestState] = {}
        """Waiting requests whose grammars are being compiled: the fair order does not know them yet."""
        self.num_grammars = 0
        """Requests that have a grammar."""
        self.prefilling: set[RequestState] = set()
        """Running requests that have more to compute than their last token."""
        self.preemptions: dict[str, int] = dict.fromkeys(PREEMPTIONS, 0)
        """Preemptions since start, by how the request gets its KV cache back."""

    @property
    def num_rows(self) -> int:
        """Requests in the step."""
        return len(self.requests) - len(self.parked) - self.order.num_queued

    @property
    def has_free_row(self) -> bool:
        """Whether one more request fits in the step."""
        return self.num_rows < self.max_rows

    def rows(self) -> list[RequestState]:
        """Requests in the step."""
        return [state for state in self.running if state.has_row]

    def enter(self, state: RequestState, *, is_parked: bool = False) -> None:
        """A request arrives, to wait; one that is parked, until `unpark`."""
        self.requests[state.request_id] = state
        self.num_grammars += state.request.grammar is not None
        self.service.arrive(state)
        if is_parked:
            self.parked[state.request_id], state.waiting_reason = state, "GRAMMAR"
        else:
            self.order.enter(state)
        self.wait(state)

    def unpark(self, state: RequestState) -> None:
        """A parked request may get a row from now on."""
        del self.parked[state.request_id]
        state.waiting_reason = "NEW"
        self.order.enter(state)
        self.waiting.has_changed = True

    def wait(self, state: RequestState) -> None:
        """A request waits from now on."""
        self.waiting.add(state)
        self.service.wait(state)

    def run(self, state: RequestState) -> None:
        """A waiting request has its pages and its lease, and gets a row."""
        self.waiting.remove(state)
        self.service.stop_waiting(state)
        state.status, state.num_bypasses, state.leader = "running", 0, None
        self.running.append(state)
        self.order.start(state)
        if state.num_left > 1:
            self.prefilling.add(state)

    def note_progress(self) -> None:
        """Chunks were planned: some requests have no more to compute than their last token."""
        if self.prefilling:
            self.prefilling = {state for state in self.prefilling if state.num_left > 1}

    def stop(self, state: RequestState, *, keeps_kv: bool) -> None:
        """A running request, which gave its device pages up, goes back to waiting."""
        self.release_lease(state)
        self.running.remove(state)
        self.prefilling.discard(state)
        state.restart()
        if not keeps_kv:
            state.lose_kv()
        self.order.stop(state)
        self.wait(state)

    def remove(self, state: RequestState) -> None:
        """A request has ended; what it has goes back."""
        del self.requests[state.request_id]
        self.num_grammars -= state.request.grammar is not None
        self._charge_load(state)
        if self.parked.pop(state.request_id, None) is None:
            self.order.leave(state)
        if state.status == "waiting":
            self.waiting.remove(state)
            self.service.stop_waiting(state)
            self.kv.forget_swapped(state)
        else:
            self.running.remove(state)
            self.prefilling.discard(state)
            self.kv.free(state, state.last_step)
            self.release_lease(state)  # only now: cached blocks of an adapter go with it
        self.service.note_end(state)

    def release_lease(self, state: RequestState) -> None:
        """Give the running reference to its adapter back, if it has one."""
        if state.lease is not None:
            self.residency.release(state.lease.digest, state.last_step)
            state.lease = None

    def lose_swapped(self, step: int) -> None:
        """A step failed that should have copied pages to the host: their requests compute those tokens again."""
        for state in self.waiting:
            if state.pages.swapped is not None and state.pages.swapped.step == step:
                self.kv.forget_swapped(state)
                state.lose_kv()

    def check(self, num_steps: int) -> None:
        """Verify that every request is in one place, and that pages and references are those of the requests.

        Args:
            num_steps: Steps in flight.

        Raises:
            EngineError: A request is in no place, in two, or has what its place does not allow.
            PageAccountingError: Pages were lost or are held twice.
        """
        running = {state.request_id for state in self.running}
        waiting = {state.request_id for state in self.waiting}
        if running & waiting or running | waiting != self.requests.keys():
            raise EngineError("a request is not in exactly one of waiting and running")
        if (
            self.order.check() != self.requests.keys() - self.parked.keys()
            or self.num_rows > self.max_rows
        ):
            raise EngineError("the fair order has other requests, or more rows than a step")
        if any(
            state.num_coming > len(state.in_flight) or len(state.in_flight) > num_steps
            for state in self.requests.values()
        ):
            raise EngineError("a request waits for results of a step that is not in flight")
        for state in self.waiting:
            if state.status != "waiting" or state.lease is not None or state.has_row:
                raise EngineError("a waiting request holds a lease or a row")
            if state.num_computed and state.pages.swapped is None:
                raise EngineError("a waiting request counts tokens as computed that are nowhere")
        for state in self.running:
            if (
                state.status != "running"
                or state.is_holding
                or (state.lease is None) != (state.digest is None)
            ):
                raise EngineError("a running request has no lease, or still a hold")
        self.kv.check(self.running, list(self.waiting))

    def _charge_load(self, state: RequestState) -> None:
        """Charge the load that a request caused which ends before it ran with the adapter."""
        if not state.caused_load or state.digest is None or self.waiting.pass_load_on(state):
            return
        if self.residency.state(state.digest) == "device":
            self.order.charge(self.service.charge_load(state))
