"""All requests of the engine: each is in one of waiting and running, and in the fair order, with its pages and lease.

What moves a request from one place to another is decided elsewhere; here it is written down in all books at once.
"""

from __future__ import annotations

from weft.engine.fairness.fair_order import FairOrder
from weft.engine.fairness.tenant_service import TenantService
from weft.engine.scheduling.kv_pages import PREEMPTIONS, KvPages
from weft.engine.scheduling.protocols import AdapterResidency
from weft.engine.scheduling.request_state import RequestState
from weft.engine.scheduling.waiting import WaitingQueue
from weft.errors import EngineError


class RequestTable:
    """The requests and the books that have them.

    Args:
        order: Who is next for a row.
        service: What tenants were given and still ask for.
        kv: Pages of requests.
        residency: Where adapters are.
        max_rows: Most requests in a step.
    """

    def __init__(
        self, order: FairOrder, service: TenantService, kv: KvPages, residency: AdapterResidency, max_rows: int
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
        self.prefilling: set[RequestState] = set()
        """Running requests that have more to compute than their last token."""
        self.preemptions: dict[str, int] = dict.fromkeys(PREEMPTIONS, 0)
        """Preemptions since start, by how the request gets its KV cache back."""

    @property
    def num_rows(self) -> int:
        """Requests in the step."""
        return len(self.requests) - self.order.num_queued

    @property
    def has_free_row(self) -> bool:
        """Whether one more request fits in the step."""
        return self.num_rows < self.max_rows

    def rows(self) -> list[RequestState]:
        """Requests in the step."""
        return [state for state in self.running if state.has_row]

    def enter(self, state: RequestState) -> None:
        """A request arrives, to wait."""
        self.requests[state.request_id] = state
        self.service.arrive(state)
        self.order.enter(state)
        self.wait(state)

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
        self._charge_load(state)
        self.order.leave(state)
        if state.status == "waiting":
            self.waiting.remove(state)
            self.service.stop_waiting(state)
            self.kv.forget_swapped(state)
        else:
            self.running.remove(state)
            self.prefilling.discard(state)
            self.kv.give_back(state, state.last_step)
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

    def check(self) -> None:
        """Verify that every request is in one place, and that pages and references are those of the requests.

        Raises:
            EngineError: A request is in no place, in two, or has what its place does not allow.
            PageAccountingError: Pages were lost or are held twice.
        """
        running = {state.request_id for state in self.running}
        waiting = self.waiting.request_ids
        if running & waiting or running | waiting != self.requests.keys():
            raise EngineError("a request is not in exactly one of waiting and running")
        if self.order.check() != self.requests.keys() or self.num_rows > self.max_rows:
            raise EngineError("the fair order has other requests, or more rows than a step")
        for state in self.waiting:
            if state.status != "waiting" or state.lease is not None or state.has_row:
                raise EngineError("a waiting request holds a lease or a row")
            if state.num_computed and state.pages.swapped is None:
                raise EngineError("a waiting request counts tokens as computed that are nowhere")
        for state in self.running:
            if state.status != "running" or state.is_holding or (state.lease is None) != (state.digest is None):
                raise EngineError("a running request has no lease, or still a hold")
        self.kv.check(self.running, list(self.waiting))

    def _charge_load(self, state: RequestState) -> None:
        """Charge the load that a request caused which ends before it ran with the adapter."""
        if not state.caused_load or state.digest is None or self.waiting.pass_load_on(state):
            return
        if self.residency.state(state.digest) == "device":
            self.order.charge(self.service.charge_load(state))
