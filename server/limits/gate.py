"""Admission to the engine's queue, by the predicted wait for the first token of each tenant.

The engine shares its steps fairly among tenants: a tenant waits only behind its own requests, and its wait is its
waiting work divided by its rate. A request that would wait too long is refused before it is tokenized, with the time to
come back (`manylora.server.limits.return_times`). Each decision is O(1) in requests and tenants.

Each tenant's part of the queue goes by what is free: Choudhury and Hahne, "Dynamic Queue Length Thresholds for
Shared-Memory Packet Switches" (1998).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from manylora.engine.fairness.service import Prices
from manylora.errors import CapacityError, ManyloraError, RateLimitError
from manylora.server.limits.prediction import (
    FACTOR_BOUNDS,
    START_FACTOR,
    AdmissionRequest,
    Predicted,
    Prediction,
    cost,
)
from manylora.server.limits.return_times import ReturnTimes

if TYPE_CHECKING:
    from manylora.engine.status import EngineLoad

OVER_SHARE = "limit.queue"
OVERLOADED = "server.overloaded"
QUEUED_IN_VAIN = frozenset({"deadline.queue", "engine_overloaded"})
"""Codes of the engine's refusals when its queue is full or a deadline has passed."""
WAIT_SHARES = {-1: 0.1, 0: 0.22, 1: 0.65, 2: 0.9}
"""Share of `max_wait_s` up to which a request is let in, by `ReturnTimes.turn`: -1 too early for its slot, 0 no slot
while other requests have slots, 1 in time for its slot, 2 in time for its second slot. So the engine always has work,
and a request that comes at its time finds room. The rest is for errors of the prediction."""
BOOKED_SHARE = 0.85
"""Share of a tenant's rate that is given to slots."""
ACTIVE_S = 10.0
"""Seconds after its last request for which a tenant counts as active."""
KEPT_S = 600.0
"""Seconds after its last request for which the state of a tenant is kept."""
FREE_FACTOR = 2
"""Waiting requests that a tenant may have per free place: it gets two thirds of all places if it is alone, so there is
always a place for another tenant."""
OVER_FACTOR = 1.05
MEAN_MEMORY = 64
MAX_SLOTS = 65_536
"""Most open slots of all tenants, about 300 bytes each. Without a slot a refused request is told a time, too, but it is
not recognised when it comes back."""


@dataclass(slots=True)
class TenantQueue:
    """Requests of one tenant that wait or run, and the mean cost of its answers."""

    weight: float = 1.0
    is_active: bool = False
    last_s: float = 0.0
    live: int = 0
    """HTTP requests between admission and end."""
    live_units: float = 0.0
    waiting: int = 0
    """Engine requests without a first output."""
    waiting_units: float = 0.0
    adapters: dict[str | None, list[float]] = field(default_factory=dict)
    """Waiting requests and their units, by adapter."""
    slots: ReturnTimes = field(default_factory=ReturnTimes)
    mean_cost: float = START_FACTOR
    """Actual over predicted units of an answer, on average."""
    refused: Counter[str] = field(default_factory=Counter)

    def enter(self, request: AdmissionRequest, units: float) -> None:
        """Count a request that was let in."""
        self.live += 1
        self.live_units += units
        self.waiting += request.num_choices
        self.waiting_units += units
        of_adapter = self.adapters.setdefault(request.adapter, [0, 0.0])
        of_adapter[0] += request.num_choices
        of_adapter[1] += units

    def start(self, adapter: str | None, count: int, units: float) -> None:
        """Count choices of a request as no longer waiting."""
        of_adapter = self.adapters[adapter]
        self.waiting -= count
        self.waiting_units = max(0.0, self.waiting_units - units) if self.waiting else 0.0
        of_adapter[0] -= count
        of_adapter[1] = max(0.0, of_adapter[1] - units)
        if not of_adapter[0]:
            del self.adapters[adapter]


@dataclass(slots=True, eq=False)
class Admission:
    """A request that was let in. Its owner must call `end`, whatever happens."""

    _gate: Gate
    _tenant: TenantQueue
    _request: AdmissionRequest
    _predicted: Predicted
    _num_waiting: int
    """Choices without a first output; -1 after the end."""
    _num_running: int = 0

    def started(self, queue_s: float | None) -> None:
        """One of the choices has its first output, after `queue_s` seconds in the engine."""
        if self._num_waiting > 0:
            is_first = self._num_waiting == self._request.num_choices
            if is_first and queue_s is not None and not self._gate.was_paused(queue_s):
                self._gate.prediction.learn_wait(self._request.adapter, self._predicted, queue_s)
            self._leave_queue(1)
            self._count_running(1)

    def finished(self, num_computed: int, num_prompt: int, num_output: int) -> None:
        """One of the choices is complete. Of `num_prompt` tokens `num_computed` were computed, the rest was cached."""
        self._count_running(-min(1, self._num_running))
        predicted = self._predicted.units / self._request.num_choices
        share = cost(self._gate.prices, num_computed, num_prompt, num_output) / predicted
        low, high = FACTOR_BOUNDS
        self._tenant.mean_cost += (
            min(high, max(low, share)) - self._tenant.mean_cost
        ) / MEAN_MEMORY
        self._gate.prediction.learn_length(self._request, num_output, self._gate.num_waiting)

    def refused(self, error: ManyloraError) -> ManyloraError:
        """The engine's error; with the time to come back if its queue was full or the deadline passed."""
        if isinstance(error, CapacityError) and error.code in QUEUED_IN_VAIN:
            error.retry_after_s = self._gate.refuse_late(self._request, error.code)
        return error

    def end(self) -> None:
        """The request has ended; later calls do nothing."""
        if self._num_waiting >= 0:
            if self._num_waiting:
                self._leave_queue(self._num_waiting)
            self._gate.leave(self._tenant, self._predicted.units)
            self._count_running(-self._num_running)
            self._num_waiting = -1

    def _leave_queue(self, count: int) -> None:
        self._num_waiting -= count
        self._gate.num_waiting -= count
        self._tenant.start(
            self._request.adapter, count, self._predicted.units / self._request.num_choices * count
        )

    def _count_running(self, change: int) -> None:
        self._num_running += change
        self._gate.num_running += change


class Gate:
    """Lets requests in or refuses them. Thread: the event loop's.

    Args:
        max_wait_s: Longest predicted wait for a first token.
        max_waiting: Most engine requests that wait without a free row.
        load: Returns the engine's last report; None before the first.
        clock: Monotonic seconds.
        on_refusal: Called with the error code and the tenant's name.
    """

    def __init__(
        self,
        max_wait_s: float,
        max_waiting: int,
        load: Callable[[], EngineLoad | None],
        clock: Callable[[], float],
        on_refusal: Callable[[str, str | None], None] = lambda _code, _name: None,
    ) -> None:
        self.prediction = Prediction(max_wait_s)
        self.tenants = defaultdict[str, TenantQueue](TenantQueue)
        """Tenants with requests now or lately, by id."""
        self.num_waiting = 0
        """Engine requests without a first output."""
        self.num_running = 0
        """Engine requests with one."""
        self._max_wait_s = max_wait_s
        self._max_waiting = max_waiting
        self._read_load = load
        self._clock = clock
        self._on_refusal = on_refusal
        self._load: EngineLoad | None = None
        self._sum_rates = 0.0
        self._active_weight = 0.0
        self._live_units = 0.0
        self._num_slots = 0
        self._next_sweep_s = -math.inf
        self._is_paused = False
        self._resumed_s = -math.inf

    @property
    def prices(self) -> Prices:
        """Prices of the engine's work, by its last report."""
        return self._load.prices if self._load else Prices()

    def admit(self, request: AdmissionRequest) -> Admission:
        """Let a request in.

        Raises:
            RateLimitError: It would wait too long because its tenant takes more than its share; code limit.queue.
            CapacityError: It would wait too long although its tenant does not; code server.overloaded.
        """
        now_s = self._clock()
        tenant = self._enter(request, now_s)
        raw_s = self._raw_wait_s(request.tenant, tenant, request.adapter)
        is_loaded = self.prediction.is_loaded(request.adapter)
        wait_s = self.prediction.wait_s(raw_s, is_loaded=is_loaded)
        tenant.slots.expire(now_s)
        turn = tenant.slots.turn(request.key, now_s)
        limit_s = WAIT_SHARES[turn if len(tenant.slots) else max(WAIT_SHARES)] * self._max_wait_s
        # A tenant with rows enough for all its requests waits for none of them long.
        has_row = tenant.live < (self._load.rows if self._load else 0) * self._share(tenant)
        is_late = wait_s > limit_s and not has_row and not self._is_paused
        is_too_late = wait_s > _deadline_s(request) and not self._is_paused
        is_full = self._is_full(tenant)
        is_crowded = tenant.waiting > 0 and (is_late or is_full)
        if turn > 0 and not is_crowded:
            tenant.slots.claim(
                request.key
            )  # it came at its time, even if its own deadline forbids to wait
        if is_crowded or (tenant.waiting and is_too_late):
            after_s = self._after_s(request, wait_s)
            if is_crowded:
                after_s = self._slot_after_s(request, tenant, now_s, after_s, turn)
            raise self._refusal(request, tenant, after_s)
        units = self.prediction.units(request, self.prices)
        tenant.enter(request, units)
        self.num_waiting += request.num_choices
        self._live_units += units
        predicted = Predicted(units=units, raw_s=raw_s, has_row=has_row, is_loaded=is_loaded)
        return Admission(self, tenant, request, predicted, request.num_choices)

    def pause(self, is_paused: bool) -> None:
        """Note that the engine was paused or resumed. What comes meanwhile is not refused for its long wait."""
        if self._is_paused and not is_paused:
            self._resumed_s = self._clock()
        self._is_paused = is_paused

    def was_paused(self, within_s: float) -> bool:
        """Return true if the engine was paused in the last `within_s` seconds: waits say nothing of its speed then."""
        return self._is_paused or self._clock() - within_s < self._resumed_s

    def leave(self, tenant: TenantQueue, units: float) -> None:
        """Count the end of a request that was let in."""
        tenant.live -= 1
        tenant.last_s = self._clock()
        tenant.live_units = max(0.0, tenant.live_units - units) if tenant.live else 0.0
        self._live_units = max(0.0, self._live_units - units)

    def refuse_late(self, request: AdmissionRequest, code: str) -> float:
        """Count a refusal by the engine; returns the seconds after which the request may come back."""
        tenant = self._enter(request, self._clock())
        self._count(request, tenant, code)
        return self._after_s(
            request,
            self.prediction.wait_s(self._raw_wait_s(request.tenant, tenant, request.adapter)),
        )

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """The tenants with waiting requests or recent refusals, by id.

        Each has `wait_s`, the predicted wait in seconds of a request that comes now, and `refused`, refusals by code.
        """
        self._refresh(self._clock())
        return {
            name: {
                "wait_s": self.prediction.wait_s(self._raw_wait_s(name, tenant, None, whole=True)),
                "refused": dict(tenant.refused),
            }
            for name, tenant in self.tenants.items()
            if tenant.waiting or tenant.refused
        }

    def _refresh(self, now_s: float) -> None:
        """Read the engine's last report; once a second delete the state of tenants that are gone."""
        load = self._read_load()
        if load is not self._load:
            self._load = load
            self._sum_rates = sum(tenant.rate for tenant in load.tenants.values()) if load else 0.0
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + 1
        for name, tenant in list(self.tenants.items()):
            tenant.slots.expire(now_s)
            idle_s = 0.0 if tenant.live else now_s - tenant.last_s
            tenant.is_active = idle_s < ACTIVE_S
            if idle_s > KEPT_S and not len(tenant.slots):
                del self.tenants[name]
        self._active_weight = sum(
            tenant.weight for tenant in self.tenants.values() if tenant.is_active
        )
        self._num_slots = sum(len(tenant.slots) for tenant in self.tenants.values())
        self._live_units = sum(tenant.live_units for tenant in self.tenants.values())

    def _enter(self, request: AdmissionRequest, now_s: float) -> TenantQueue:
        self._refresh(now_s)
        tenant = self.tenants[request.tenant]
        self._active_weight += request.weight - (tenant.weight if tenant.is_active else 0.0)
        tenant.weight = request.weight
        tenant.is_active = True
        tenant.last_s = now_s
        return tenant

    def _rate(self, name: str, tenant: TenantQueue) -> float:
        """Units per second that the engine computes for a tenant; 0 before it was measured."""
        if self._load is None:
            return 0.0
        measured = self._load.tenants.get(name)
        return max(measured.rate if measured else 0.0, self._load.rate * self._share(tenant))

    def _share(self, tenant: TenantQueue) -> float:
        """The tenant's part of the engine, by the weights of the active tenants."""
        return tenant.weight / max(self._active_weight, tenant.weight)

    def _is_full(self, tenant: TenantQueue) -> bool:
        """Return true if the tenant has its part of the queue. With a free row, a request waits only for a step."""
        num_free_rows = max(self._load.rows - self.num_running, 0) if self._load else 0
        num_queued = max(self.num_waiting - num_free_rows, 0)
        return tenant.waiting - num_free_rows >= FREE_FACTOR * (self._max_waiting - num_queued)

    def _raw_wait_s(
        self, name: str, tenant: TenantQueue, adapter: str | None, *, whole: bool = False
    ) -> float:
        """Wait by the estimates alone. A tenant's adapters share its rate: a new one does not wait for all others."""
        rate = self._rate(name, tenant)
        if not rate:
            return 0.0
        units = tenant.waiting_units
        if not whole:
            own = tenant.adapters.get(adapter)
            units = min(units, (own[1] if own else 0.0) * (len(tenant.adapters) + (own is None)))
        return units / rate

    def _refusal(
        self, request: AdmissionRequest, tenant: TenantQueue, after_s: float
    ) -> ManyloraError:
        code = OVER_SHARE if self._is_over_share(request.tenant, tenant) else OVERLOADED
        self._count(request, tenant, code)
        bound_s = (
            self._max_wait_s
            if request.deadline_s is None
            else min(self._max_wait_s, request.deadline_s)
        )
        limit = f"the limit is {bound_s:g} s (scheduler.max_wait_s, or the request's own deadline)"
        again = f"Try again in {math.ceil(after_s)} s."
        if code == OVER_SHARE:
            message = f"The tenant has sent more requests than its share can start in time: {limit}. {again}"
            return RateLimitError(message, retry_after_s=after_s, code=code)
        message = f"The server cannot begin the request in time: {limit}. {again}"
        return CapacityError(message, retry_after_s=after_s, code=code)

    def _slot_after_s(
        self,
        request: AdmissionRequest,
        tenant: TenantQueue,
        now_s: float,
        after_s: float,
        turn: int,
    ) -> float:
        """Seconds until the request's slot, at least `after_s`."""
        units = self.prediction.units(request, self.prices)
        units_per_s = self._rate(request.tenant, tenant) / tenant.mean_cost
        if not units_per_s:
            return after_s
        if turn > 0:
            return tenant.slots.give_again(request.key, now_s + after_s, units, units_per_s) - now_s
        self._num_slots += 1  # counted again once a second
        num_left = MAX_SLOTS - self._num_slots
        booked_per_s = BOOKED_SHARE * units_per_s
        slot_s = tenant.slots.give(
            request.key, now_s, now_s + after_s, units, booked_per_s, num_left=num_left
        )
        return slot_s - now_s

    def _is_over_share(self, name: str, tenant: TenantQueue) -> bool:
        measured = self._load.tenants.get(name) if self._load else None
        of_rate = measured.rate / self._sum_rates if measured and self._sum_rates else 0.0
        of_backlog = tenant.live_units / self._live_units if self._live_units else 0.0
        return max(of_rate, of_backlog) > OVER_FACTOR * self._share(tenant)

    def _count(self, request: AdmissionRequest, tenant: TenantQueue, code: str) -> None:
        tenant.refused[code] += 1
        self._on_refusal(code, request.name)

    def _after_s(self, request: AdmissionRequest, wait_s: float) -> float:
        """Seconds until the wait is as short as allowed, if no more requests come."""
        return max(1.0, wait_s - min(WAIT_SHARES[0] * self._max_wait_s, _deadline_s(request)))


def _deadline_s(request: AdmissionRequest) -> float:
    """Longest predicted wait that the client's deadline allows."""
    return math.inf if request.deadline_s is None else WAIT_SHARES[2] * request.deadline_s
