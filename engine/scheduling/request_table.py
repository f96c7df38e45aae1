"""Table of all requests of the engine: each is either waiting or running, and in the fair order.

Other modules decide when a request moves from one state to another. This one updates all records of it at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from manylora.adapters.residency.residency import Residency
from manylora.engine.fairness.fair_order import FairOrder
from manylora.engine.fairness.service import TenantService
from manylora.engine.scheduling.kv_pages import PREEMPTIONS, KvPages
from manylora.engine.scheduling.request_state import RequestState
from manylora.errors import EngineError

MAX_BYPASSES = 16
"""Steps in which others may be admitted past a request that lacks pages."""


class WaitingQueue:
    """All waiting requests. A hold keeps an adapter coming to the device, or on it, for a request near the front.

    Args:
        residency: Brings adapters to the device.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._states: dict[str, RequestState] = {}
        self._holders: dict[str, dict[str, RequestState]] = {}
        """Requests with a hold, by adapter and request."""
        self._overdue: dict[str, RequestState] = {}
        """Requests that were overtaken in `MAX_BYPASSES` steps."""
        self.has_changed = False
        """True if a request came; the reader resets it."""

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def add(self, state: RequestState) -> None:
        """Let a request wait."""
        self._states[state.request_id] = state
        self.has_changed = True

    def remove(self, state: RequestState) -> None:
        """Let a request wait no longer; its hold goes too."""
        del self._states[state.request_id]
        self._overdue.pop(state.request_id, None)
        self._unhold(state)

    def bypass(self, state: RequestState, count: int = 1) -> None:
        """Count that others were admitted past a request, `count` times."""
        state.num_bypasses += count
        if state.num_bypasses >= MAX_BYPASSES:
            self._overdue[state.request_id] = state

    def overdue(self) -> list[RequestState]:
        """Requests overtaken in `MAX_BYPASSES` steps, the oldest first: nobody behind them may be admitted now.

        A request keeps nobody else waiting while its adapter is still to be read: pages would not help it.
        """
        overdue = [state for state in self._overdue.values() if not self.is_unread(state)]
        return sorted(overdue, key=lambda state: state.place.age_key)

    def is_unread(self, state: RequestState) -> bool:
        """True if its adapter is still to be read from the store, which pages would not shorten."""
        digest = state.adapter.digest
        return digest is not None and self._residency.state(digest) == "stored"

    def hold(self, state: RequestState) -> None:
        """Have the request's adapter loaded and kept for it."""
        ref = state.request.adapter
        if not state.adapter.is_holding and ref is not None:
            if ref.digest not in self._holders and self._residency.state(ref.digest) != "device":
                state.place.owes_load = True
            self._residency.hold(ref)
            state.adapter.is_holding = True
            self._holders.setdefault(ref.digest, {})[state.request_id] = state

    def holders_of(self, digest: str) -> list[RequestState]:
        """Requests that hold an adapter."""
        return list(self._holders.get(digest, {}).values())

    def pass_load_on(self, state: RequestState) -> bool:
        """Have another request that holds the same adapter be charged for its load; False where there is none."""
        holders = self.holders_of(state.adapter.digest or "")
        heir = next((other for other in holders if other is not state), None)
        if heir is not None:
            state.place.owes_load = False
            heir.place.owes_load = True
        return heir is not None

    def yield_hold(self) -> bool:
        """Drop the newest hold on an adapter with pages, for a running request that lacks some; False without one."""
        with_pages = [
            state
            for state in self._all_holders()
            if self._residency.state(state.adapter.digest or "") == "device"
        ]
        if with_pages:
            self._unhold(max(with_pages, key=lambda state: state.place.age_key))
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
        digest = state.adapter.digest
        if state.adapter.is_holding and digest is not None:
            state.adapter.is_holding = False
            del self._holders[digest][state.request_id]
            if not self._holders[digest]:
                del self._holders[digest]
            self._residency.release_hold(digest)

    def _all_holders(self) -> Iterator[RequestState]:
        return chain.from_iterable(map(dict.values, self._holders.values()))


@dataclass(eq=False)
class RequestTable:
    """Requests of the engine, and everything that keeps a record of them."""

    order: FairOrder
    """Names the request that is next for a row."""
    service: TenantService
    """Counts the work that tenants were given and still ask for."""
    kv: KvPages
    """Pages of requests."""
    residency: Residency
    """Brings adapters to the device."""
    max_rows: int
    """Most requests in a step."""

    def __post_init__(self) -> None:
        self.requests: dict[str, RequestState] = {}
        self.waiting = WaitingQueue(self.residency)
        """Requests without pages."""
        self.running: list[RequestState] = []
        """Requests with pages, in the step or paused."""
        self.num_dependent = 0
        """Requests whose chunks may need results of the chunks before them."""
        self.prefilling: set[RequestState] = set()
        """Running requests that have more to compute than their last token."""
        self._protected: set[RequestState] = set()
        """Running requests that keep their rows, because they have not made progress since a preemption."""
        self.preemptions: dict[str, int] = dict.fromkeys(PREEMPTIONS, 0)
        """Preemptions since start, by how the request gets its KV cache back."""

    @property
    def num_rows(self) -> int:
        """Requests in the step."""
        return self.order.num_rows

    @property
    def has_free_row(self) -> bool:
        """True if one more request fits in the step."""
        return self.num_rows < self.max_rows

    def rows(self) -> list[RequestState]:
        """Requests in the step."""
        return [state for state in self.running if state.place.has_row]

    @property
    def paused(self) -> list[RequestState]:
        """Requests with pages and without a row."""
        return [state for state in self.running if not state.place.has_row]

    def units_left(self, state: RequestState) -> float:
        """Predicted price of the tokens that are still to be computed for a request."""
        return self.service.units_left(
            state.place, state.pages.num_computed, len(state.output_token_ids)
        )

    def enter(self, state: RequestState, *, is_parked: bool = False) -> None:
        """Take in a request, to wait; one that is parked, until `unpark`."""
        self.requests[state.request_id] = state
        self.num_dependent += state.may_need_results
        self.service.arrive(state.place)
        if is_parked:
            state.waiting_reason = "GRAMMAR"
        else:
            self.order.enter(state.place)
        self.wait(state)

    def unpark(self, state: RequestState) -> None:
        """Let a parked request have a row from now on."""
        state.waiting_reason = "NEW"
        self.order.enter(state.place)
        self.waiting.has_changed = True

    def wait(self, state: RequestState) -> None:
        """Let a request wait from now on."""
        self.waiting.add(state)
        self.service.wait(state.place, self.units_left(state))

    def run(self, state: RequestState) -> None:
        """Give a row to a waiting request that has its pages and its lease."""
        self.waiting.remove(state)
        self.service.stop_waiting(state.place)
        state.status = "running"
        state.num_bypasses = 0
        state.source = None
        self.running.append(state)
        self.order.start(state.place)
        if state.num_left > 1:
            self.prefilling.add(state)
        if state.pages.is_protected:
            state.place.is_protected = True
            self._protected.add(state)

    def note_progress(self) -> None:
        """Take note that chunks were planned, after which requests may be past their prompts, or past protection."""
        if self.prefilling:
            self.prefilling = {state for state in self.prefilling if state.num_left > 1}
        for state in [state for state in self._protected if not state.pages.is_protected]:
            self._unprotect(state)

    def stop(self, state: RequestState) -> None:
        """Let a running request wait again, which gave its device pages up."""
        self.release_lease(state)
        self._stop_running(state)
        state.restart()
        if state.pages.swapped is None:
            state.lose_kv()
        if state.place.has_row:
            self.order.stop(state.place)
        self.wait(state)

    def remove(self, state: RequestState) -> None:
        """Take back everything from a request that has ended."""
        del self.requests[state.request_id]
        self.num_dependent -= state.may_need_results
        self._charge_load(state)
        if not state.is_parked:
            self.order.leave(state.place)
        if state.status == "waiting":
            self.waiting.remove(state)
            self.service.stop_waiting(state.place)
            self.kv.forget_swapped(state)
        else:
            self._stop_running(state)
            self.kv.free(state, state.pages.last_step)
            self.release_lease(state)  # only now: cached blocks of an adapter go with it
        self.service.leave(state.place)

    def release_lease(self, state: RequestState) -> None:
        """Give the running reference to its adapter back, if it has one."""
        adapter = state.adapter
        if adapter.lease is not None:
            self.residency.release(adapter.lease.digest, state.pages.last_step)
            adapter.lease = None

    def lose_swapped(self, step: int) -> None:
        """Have tokens computed again whose pages a failed step should have copied to the host."""
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
        in_order = {key for key, state in self.requests.items() if not state.is_parked}
        if self.order.check() != in_order or self.num_rows > self.max_rows:
            raise EngineError("the fair order has other requests, or more rows than a step")
        if any(
            state.cursor.num_coming > len(state.cursor.in_flight)
            or len(state.cursor.in_flight) > num_steps
            for state in self.requests.values()
        ):
            raise EngineError("a request waits for results of a step that is not in flight")
        for state in self.waiting:
            if state.status != "waiting" or state.adapter.lease is not None or state.place.has_row:
                raise EngineError("a waiting request holds a lease or a row")
            if state.pages.num_computed and state.pages.swapped is None:
                raise EngineError("a waiting request counts tokens as computed that are nowhere")
        for state in self.running:
            adapter = state.adapter
            has_lease = adapter.lease is not None
            if (
                state.status != "running"
                or adapter.is_holding
                or has_lease == (adapter.digest is None)
            ):
                raise EngineError("a running request has no lease, or still a hold")
            if state.place.is_protected != state.pages.is_protected:
                raise EngineError("the fair order does not know which requests keep their rows")
        self.kv.check(self.running, list(self.waiting))

    def _charge_load(self, state: RequestState) -> None:
        """Charge the load that a request caused which ends before it ran with the adapter."""
        digest = state.adapter.digest
        if not state.place.owes_load or digest is None or self.waiting.pass_load_on(state):
            return
        if self.residency.state(digest) == "device":
            self.order.charge(self.service.charge_load(state.place))

    def _stop_running(self, state: RequestState) -> None:
        self.running.remove(state)
        self.prefilling.discard(state)
        self._unprotect(state)

    def _unprotect(self, state: RequestState) -> None:
        state.place.is_protected = False
        self._protected.discard(state)
