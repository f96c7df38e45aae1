"""What must hold of rows, pauses and counters of service, looked at after every pump and at every plan.

The bound on service differences is derived and held in `fairness.random_backlogs`: here tenants wait for loads and
pages all the time, which no order can make up for.
"""

from __future__ import annotations

from simulation.pages import Fail
from weft.engine.scheduling.plan import StepPlan
from weft.engine.scheduling.request_table import MAX_BYPASSES
from weft.engine.scheduling.scheduler import Scheduler

MAX_BARREN_STEPS = 64
"""Steps in a row that compute nothing: each has a preemption that a request is protected from for a page of tokens."""
Standing = tuple[list[list[int]], int, int]
"""Its pages, computed tokens and preemptions."""


class FairChecks:
    """Watches one scheduler.

    Args:
        scheduler: Real, with its requests.
        max_rows: Most requests of a step.
        step_tokens: Most tokens of a step.
        fail: Takes note of what must not happen.
    """

    def __init__(self, scheduler: Scheduler, max_rows: int, step_tokens: int, fail: Fail) -> None:
        self._scheduler = scheduler
        self._max_rows = max_rows
        self._step_tokens = step_tokens
        self._fail = fail
        self._paused: dict[str, Standing] = {}
        self._counters: dict[tuple[object, ...], float] = {}
        self._service: dict[str, float] = {}
        self._ran: set[str] = set()
        """Requests of the last plan."""
        self._bypasses: dict[str, int] = {}
        self._num_barren = 0
        self.num_pauses = 0

    def look(self, tenants: frozenset[str]) -> None:
        """After a pump."""
        self._check_places()
        self._check_paused()
        self._check_service(tenants)

    def see(self, plan: StepPlan) -> None:
        """At a plan, before it is carried out: its requests have rows, and it is no larger than a step may be."""
        self._ran = {chunk.request_id for chunk in plan.chunks}
        for chunk in plan.chunks:
            state = self._scheduler.table.requests.get(chunk.request_id)
            if state is None or state.status != "running" or not state.has_row:
                self._fail(f"{chunk.request_id} is in the step without a row: {state}")
        if len(self._ran) != len(plan.chunks) or len(plan.chunks) > self._max_rows:
            self._fail(f"step {plan.step} has {len(plan.chunks)} chunks for {len(self._ran)} requests")
        if plan.num_tokens > self._step_tokens:
            self._fail(f"step {plan.step} computes {plan.num_tokens} tokens")
        self._num_barren = 0 if plan.chunks else self._num_barren + 1
        if self._num_barren > MAX_BARREN_STEPS:
            self._fail(f"{self._num_barren} steps in a row computed nothing, up to step {plan.step}")

    def _check_places(self) -> None:
        """Every request is in exactly one of waiting, paused and in the step."""
        scheduler = self._scheduler
        running = scheduler.table.running
        waiting = [state.request_id for state in scheduler.table.waiting]
        paused = [state.request_id for state in scheduler.table.order.paused]
        rows = [state.request_id for state in running if state.has_row]
        if sorted(waiting + paused + rows) != sorted(scheduler.table.requests):
            self._fail(f"waiting {waiting}, paused {paused}, in the step {rows}: not each request once")
        if {state.request_id for state in running if not state.has_row} != set(paused):
            self._fail(f"paused are {paused}, without a row are others")
        if len(rows) > self._max_rows or len(rows) != scheduler.num_rows:
            self._fail(f"{rows} have rows, of {self._max_rows}; told are {scheduler.num_rows}")
        before, self._bypasses = self._bypasses, {}
        for state in scheduler.table.waiting:
            was = before.get(state.request_id, 0)
            if state.num_bypasses > was >= MAX_BYPASSES and state.num_bypasses < was + MAX_BYPASSES:
                self._fail(f"{state.request_id} was overtaken in {state.num_bypasses} steps")  # a stall adds the limit
            self._bypasses[state.request_id] = state.num_bypasses

    def _check_paused(self) -> None:
        """A request that was paused and sat the step out has what it had, or gave all of it up."""
        before, self._paused = self._paused, {}
        for state in self._scheduler.table.order.paused:
            standing = ([list(pages) for pages in state.pages.table.pages], state.num_computed, state.num_preemptions)
            self._paused[state.request_id] = standing
            held = before.get(state.request_id)
            if held is None:
                self.num_pauses += 1
            elif held != standing and held[2] == state.num_preemptions and state.request_id not in self._ran:
                self._fail(f"{state.request_id} was paused with {held}, and now has {standing}")
            if state.num_computed and not state.pages.table.pages[0]:
                self._fail(f"{state.request_id} is paused without pages")
        self._ran = set()

    def _check_service(self, tenants: frozenset[str]) -> None:
        """Counters of service only grow, whatever becomes of requests, weights and idle tenants."""
        for tenant in tenants:
            units = self._scheduler.table.service.service(tenant)
            if units < self._service.get(tenant, 0.0):
                self._fail(f"{tenant} was served {self._service[tenant]} units and now {units}")
            self._service[tenant] = units
        for key, counter in _counters(self._scheduler):
            if counter < self._counters.get(key, 0.0) - 1e-9:
                self._fail(f"the counter of {key} fell from {self._counters.get(key, 0.0)} to {counter}")
            self._counters[key] = counter


def _counters(scheduler: Scheduler) -> list[tuple[tuple[object, ...], float]]:
    """Counters of lanes, tenants and adapters that have requests now, by parent and name.

    A parent that comes anew, after it had nothing left to remember, is another one: its tickets tell.
    """
    found: list[tuple[tuple[object, ...], float]] = []
    left = [scheduler.table.order.root]
    while left:
        share = left.pop()
        found += [((share.ticket, key), child.counter) for key, child in share.children.items()]
        left += share.children.values()
    return found
