"""In what order waiting requests are looked at: candidates in, order out.

Fair order is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (arXiv:2401.00588),
kept per tenant, so that a tenant with a hundred adapters has one share. Knows nothing of pages or adapters.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Literal, Protocol

from weft.engine.request_state import RequestState

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""A generated token costs a step of its own; prompt tokens share one."""
MAX_IDLE_TENANTS = 4096
"""More tenants than this are remembered only while they have requests or owe service."""


class AdmissionOrder(Protocol):
    """A policy. All methods are called by the scheduler; counters belong to the policy."""

    def arrive(self, tenant: str) -> None:
        """A request of the tenant starts to wait."""

    def leave(self, tenant: str) -> None:
        """A request of the tenant no longer waits."""

    def charge(self, tenant: str, weight: float, prompt_tokens: int, output_tokens: int) -> None:
        """Tokens were computed for the tenant."""

    def order(self, candidates: Iterable[RequestState], limit: int) -> list[RequestState]:
        """The first `limit` candidates, first to be admitted first."""


def admission_order(policy: Literal["fcfs", "fair"]) -> AdmissionOrder:
    """The policy of that name."""
    return FairOrder() if policy == "fair" else ArrivalOrder()


def _classes(candidates: Iterable[RequestState]) -> list[list[RequestState]]:
    """Candidates by lane, and in a lane those that go on with what has run before those that never ran; by arrival."""
    classes: dict[tuple[int, bool], list[RequestState]] = {}
    for state in candidates:
        key = (state.request.flow.lane, not state.is_returning)
        if key in classes:
            classes[key].append(state)
        else:
            classes[key] = [state]
    for members in classes.values():
        members.sort(key=attrgetter("arrival_index"))
    return [members for _, members in sorted(classes.items(), key=itemgetter(0))]


class ArrivalOrder:
    """First come, first served."""

    def arrive(self, tenant: str) -> None:
        """Nothing to count."""

    def leave(self, tenant: str) -> None:
        """Nothing to count."""

    def charge(self, tenant: str, weight: float, prompt_tokens: int, output_tokens: int) -> None:
        """Nothing to count."""

    def order(self, candidates: Iterable[RequestState], limit: int) -> list[RequestState]:
        """By lane, preempted before new, then arrival."""
        return list(islice(chain.from_iterable(_classes(candidates)), limit))


class FairOrder:
    """Least service first, among tenants; by arrival within a tenant."""

    def __init__(self) -> None:
        self._service: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}
        self._last_to_leave: str | None = None

    def arrive(self, tenant: str) -> None:
        """Lift a tenant that returns to the least served of those that wait, so that idle time is no credit."""
        is_new = tenant not in self._num_waiting
        if is_new:
            self._service[tenant] = max(self._service.get(tenant, 0.0), self._floor())
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1
        if is_new:
            self._prune()

    def leave(self, tenant: str) -> None:
        """Forget the tenant's place in the queue with its last waiting request."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._last_to_leave = tenant

    def charge(self, tenant: str, weight: float, prompt_tokens: int, output_tokens: int) -> None:
        """Add to the tenant's service, in proportion to one over its weight."""
        cost = (PROMPT_TOKEN_COST * prompt_tokens + OUTPUT_TOKEN_COST * output_tokens) / weight
        self._service[tenant] = self._service.get(tenant, 0.0) + cost

    def order(self, candidates: Iterable[RequestState], limit: int) -> list[RequestState]:
        """By lane, preempted before new, then least service; what is ahead in the order counts as served."""
        promised: dict[str, float] = {}
        ordered: list[RequestState] = []
        for members in _classes(candidates):
            queues: dict[str, list[RequestState]] = {}
            for state in members:
                queues.setdefault(state.request.flow.tenant, []).append(state)
            ordered += islice(self._interleave(queues, promised), limit - len(ordered))
        return ordered

    def _interleave(self, queue: dict[str, list[RequestState]], promised: dict[str, float]) -> Iterable[RequestState]:
        def entry(tenant: str, index: int) -> tuple[float, int, int]:
            service = self._service.get(tenant, 0.0) + promised.get(tenant, 0.0)
            return service, queue[tenant][index].arrival_index, index

        heap = [(entry(tenant, 0), tenant) for tenant in queue]
        heapq.heapify(heap)
        while heap:
            (_, _, index), tenant = heapq.heappop(heap)
            state = queue[tenant][index]
            yield state
            promised[tenant] = (
                promised.get(tenant, 0.0) + PROMPT_TOKEN_COST * state.num_left / state.request.flow.weight
            )
            if index + 1 < len(queue[tenant]):
                heapq.heappush(heap, (entry(tenant, index + 1), tenant))

    def _floor(self) -> float:
        if self._num_waiting:
            return min(self._service[tenant] for tenant in self._num_waiting)
        return self._service.get(self._last_to_leave, 0.0) if self._last_to_leave is not None else 0.0

    def _prune(self) -> None:
        """Forget tenants that a return would lift anyway, and keep the counters small."""
        floor = self._floor()
        if len(self._service) <= MAX_IDLE_TENANTS and floor < 1e12:
            return
        keep = {
            tenant: service - floor
            for tenant, service in self._service.items()
            if service > floor or tenant in self._num_waiting or tenant == self._last_to_leave
        }
        self._service = keep
