"""Admission to the engine's queue, by the predicted wait for the first token of each tenant.

The engine shares its steps fairly among tenants: a tenant waits only behind its own requests, and its wait is its
waiting work divided by its rate. A request that would wait too long is refused before it is tokenized, with the time to
come back (`weft.server.limits.return_slots`). Each decision is O(1) in requests and tenants.

Predicted waits from measured throughput: Patke et al., "Queue Management for SLO-Oriented Large Language Model Serving"
(arXiv:2407.00047). Each tenant's part of the queue goes by what is free: Choudhury and Hahne, "Dynamic Queue Length
Thresholds for Shared-Memory Packet Switches" (1998).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from weft.engine.fairness.lengths import Lengths
from weft.engine.fairness.prices import Prices
from weft.errors import CapacityError, RateLimitError, WeftError
from weft.server.limits.return_slots import ReturnSlots

if TYPE_CHECKING:
    from weft.engine.status import EngineLoad

OVER_SHARE = "limit.queue"
OVERLOADED = "server.overloaded"
QUEUED_IN_VAIN = frozenset({"deadline.queue", "engine_overloaded"})
"""Codes of the engine's refusals when its queue is full or a deadline has passed."""
WAIT_SHARES = {-1: 0.1, 0: 0.22, 1: 0.65, 2: 0.9}
"""Share of `max_wait_s` up to which a request is let in, by `ReturnSlots.turn`: -1 too early for its slot, 0 no slot
while other requests have slots, 1 in time for its slot, 2 in time for its second slot. So the engine always has work,
and a request that comes at its time finds room. The rest is for errors of the prediction."""
BOOKED_SHARE = 0.85
"""Share of a tenant's rate that is given to slots."""
ACTIVE_S = 10.0
"""A tenant counts as active for so long after its last request."""
KEPT_S = 600.0
"""The state of a tenant is deleted so long after its last request."""
FREE_FACTOR = 2
"""A tenant may have so many times as many requests waiting as there are free places: two thirds of all places if it is
alone. So there is always a place for another tenant."""
OVER_FACTOR = 1.05
START_FACTOR = 1.25
"""Predictions use the median length of answers; the mean is longer."""
FACTOR_UP, FACTOR_DOWN = 1.05, 0.995
FACTOR_BOUNDS = (0.1, 10.0)
LEARN_SHARE = 0.05
"""Predictions below this share of the longest wait are not learned from: they are as short as a step."""
MEAN_MEMORY = 64
MIN_ANSWERS = 64
"""Predictions are not learned from before so many answers were seen."""
MAX_SLOTS = 65_536
"""Most open slots of all tenants, about 300 bytes each. Without a slot a refused request is told a time, too, but it is
not recognised when it comes back."""
MAX_ADAPTERS = 4096
"""Most adapters that are remembered as loaded."""
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """An HTTP request for a generation, before it is tokenized."""

    tenant: str
    """Id; empty for an admin without a tenant."""
    name: str | None
    """The tenant's name, for the metrics."""
    weight: float
    adapter: str | None
    """Digest; None: the base model."""
    num_bytes: int
    """Length of the body."""
    num_choices: int
    """Number of engine requests."""
    max_tokens: int
    """Longest answer of a choice."""
    deadline_s: float | None
    """Seconds in which the client wants the first token."""
    key: int
    """Recognises a request that is sent again."""


class TenantState(TypedDict):
    """What the gate knows of a tenant."""

    wait_s: float
    """Predicted wait of a request that comes now."""
    refused: dict[str, int]
    """Refusals by error code."""


@dataclass(slots=True)
class _Tenant:
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
    slots: ReturnSlots = field(default_factory=ReturnSlots)
    mean_cost: float = START_FACTOR
    """Actual over predicted units of an answer, on average."""
    refused: Counter[str] = field(default_factory=Counter)


class Admission:
    """A request that was let in. Its owner must call `end`, whatever happens."""

    __slots__ = ("_ask", "_gate", "_has_row", "_is_loaded", "_num_running", "_num_waiting", "_raw_s", "_units")

    def __init__(self, gate: Gate, ask: Ask, units: float, raw_s: float, *, has_row: bool, is_loaded: bool) -> None:
        self._gate = gate
        self._ask = ask
        self._units = units
        self._raw_s = raw_s
        self._has_row = has_row
        self._is_loaded = is_loaded
        self._num_waiting = ask.num_choices
        self._num_running = 0

    def started(self, queue_s: float | None) -> None:
        """One of the choices has its first output, after `queue_s` seconds in the engine."""
        if self._num_waiting > 0:
            if self._num_waiting == self._ask.num_choices and queue_s is not None:
                self._gate._learn(self._ask, self._raw_s, queue_s, has_row=self._has_row, is_loaded=self._is_loaded)
            self._gate._leave_queue(self._ask, 1, self._units / self._ask.num_choices)
            self._num_waiting -= 1
            self._count_running(1)

    def finished(self, num_computed: int, num_prompt: int, num_output: int) -> None:
        """One of the choices is complete. Of `num_prompt` tokens `num_computed` were computed, the rest was cached."""
        self._count_running(-min(1, self._num_running))
        self._gate._finished(self._ask, self._units / self._ask.num_choices, num_computed, num_prompt, num_output)

    def refused(self, error: WeftError) -> WeftError:
        """The engine's error; with the time to come back if its queue was full or the deadline passed."""
        if isinstance(error, CapacityError) and error.code in QUEUED_IN_VAIN:
            error.retry_after_s = self._gate._refuse_late(self._ask, error.code)
        return error

    def end(self) -> None:
        """The request has ended; later calls do nothing."""
        if self._num_waiting >= 0:
            share = self._units / self._ask.num_choices
            self._gate._leave_queue(self._ask, self._num_waiting, share * self._num_waiting)
            self._gate._leave(self._ask, self._units)
            self._count_running(-self._num_running)
            self._num_waiting = -1

    def _count_running(self, change: int) -> None:
        self._num_running += change
        self._gate._running += change


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
        self.lengths = Lengths()
        self.factor = START_FACTOR
        """Actual over predicted wait; few requests exceed it."""
        self._max_wait_s = max_wait_s
        self._max_waiting = max_waiting
        self._read_load = load
        self._clock = clock
        self._on_refusal = on_refusal
        self._load: EngineLoad | None = None
        self._sum_rates = 0.0
        self._tenants: dict[str, _Tenant] = {}
        self._active_weight = 0.0
        self._waiting = 0
        self._running = 0
        self._live_units = 0.0
        self._num_slots = 0
        self._load_s = 0.0
        self._loaded: dict[str, None] = {}
        self._next_sweep_s = -math.inf
        self._num_answers = 0
        self._num_untaught: int | None = None
        """Number of starts still to come that waited behind requests of unknown length; None before any length is
        known."""

    def admit(self, ask: Ask) -> Admission:
        """Let a request in.

        Raises:
            RateLimitError: It would wait too long because its tenant takes more than its share; code limit.queue.
            CapacityError: It would wait too long although its tenant does not; code server.overloaded.
        """
        now_s = self._clock()
        self._refresh(now_s)
        tenant = self._enter(ask, now_s)
        raw_s = self._raw_wait_s(ask.tenant, tenant, ask.adapter)
        is_loaded = ask.adapter is None or ask.adapter in self._loaded
        wait_s = self.factor * raw_s + (0.0 if is_loaded else self._load_s)
        tenant.slots.expire(now_s)
        turn = tenant.slots.turn(ask.key, now_s)
        limit_s = WAIT_SHARES[turn if len(tenant.slots) else max(WAIT_SHARES)] * self._max_wait_s
        has_row = self._has_rows(tenant)
        is_late = wait_s > limit_s and not has_row
        is_full = self._is_full(tenant)
        is_crowded = tenant.waiting > 0 and (is_late or is_full)
        if turn > 0 and not is_crowded:
            tenant.slots.claim(ask.key)  # it came at its time, even if its own deadline forbids to wait
        if is_crowded or (tenant.waiting and wait_s > _deadline_s(ask)):
            after_s = _after_s(ask, wait_s, WAIT_SHARES[0] * self._max_wait_s)
            if is_crowded:
                after_s = self._slot_after_s(ask, tenant, now_s, after_s, turn)
            raise self._refusal(ask, tenant, after_s)
        units = self._units(ask)
        tenant.live += 1
        tenant.live_units += units
        tenant.waiting += ask.num_choices
        tenant.waiting_units += units
        of_adapter = tenant.adapters.setdefault(ask.adapter, [0, 0.0])
        of_adapter[0] += ask.num_choices
        of_adapter[1] += units
        self._waiting += ask.num_choices
        self._live_units += units
        return Admission(self, ask, units, raw_s, has_row=has_row, is_loaded=is_loaded)

    def snapshot(self) -> dict[str, TenantState]:
        """The tenants with waiting requests or recent refusals, by id."""
        self._refresh(self._clock())
        return {
            name: {
                "wait_s": self.factor * self._raw_wait_s(name, tenant, None, whole=True),
                "refused": dict(tenant.refused),
            }
            for name, tenant in self._tenants.items()
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
        for name, tenant in list(self._tenants.items()):
            tenant.slots.expire(now_s)
            idle_s = 0.0 if tenant.live else now_s - tenant.last_s
            tenant.is_active = idle_s < ACTIVE_S
            if idle_s > KEPT_S and not len(tenant.slots):
                del self._tenants[name]
        self._active_weight = sum(tenant.weight for tenant in self._tenants.values() if tenant.is_active)
        self._num_slots = sum(len(tenant.slots) for tenant in self._tenants.values())
        self._live_units = sum(tenant.live_units for tenant in self._tenants.values())

    def _enter(self, ask: Ask, now_s: float) -> _Tenant:
        tenant = self._tenants.get(ask.tenant)
        if tenant is None:
            tenant = self._tenants[ask.tenant] = _Tenant()
        self._active_weight += ask.weight - (tenant.weight if tenant.is_active else 0.0)
        tenant.weight, tenant.is_active, tenant.last_s = ask.weight, True, now_s
        return tenant

    def _rate(self, name: str, tenant: _Tenant) -> float:
        """Units per second that the engine computes for a tenant; 0 before it was measured."""
        if self._load is None:
            return 0.0
        told = self._load.tenants.get(name)
        return max(told.rate if told else 0.0, self._load.rate * self._share(tenant))

    def _share(self, tenant: _Tenant) -> float:
        """The tenant's part of the engine, by the weights of the active tenants."""
        return tenant.weight / max(self._active_weight, tenant.weight)

    def _has_rows(self, tenant: _Tenant) -> bool:
        """Whether the tenant's share of the rows is enough for all its requests; then none of them waits long."""
        rows = self._load.rows if self._load else 0
        return tenant.live < rows * self._share(tenant)

    def _is_full(self, tenant: _Tenant) -> bool:
        """Whether the tenant has its part of the queue. With a free row a request waits for the next step only."""
        num_free_rows = max(self._load.rows - self._running, 0) if self._load else 0
        num_queued = max(self._waiting - num_free_rows, 0)
        return tenant.waiting - num_free_rows >= FREE_FACTOR * (self._max_waiting - num_queued)

    def _raw_wait_s(self, name: str, tenant: _Tenant, adapter: str | None, *, whole: bool = False) -> float:
        """Wait by the estimates alone. A tenant's adapters share its rate: a new one does not wait for all others."""
        rate = self._rate(name, tenant)
        if not rate:
            return 0.0
        units = tenant.waiting_units
        if not whole:
            own = tenant.adapters.get(adapter)
            units = min(units, (own[1] if own else 0.0) * (len(tenant.adapters) + (own is None)))
        return units / rate

    def _units(self, ask: Ask) -> float:
        """Predicted cost of a request."""
        prompt = ask.num_bytes / BYTES_PER_TOKEN
        output = self.lengths.p50(ask.tenant, ask.adapter, ask.max_tokens)
        return self._cost(prompt, prompt, output) + (ask.num_choices - 1) * self._cost(0, prompt, output)

    def _cost(self, computed: float, prompt: float, output: float) -> float:
        """Units of an answer. Cached prompt tokens are not computed, but attention reads them."""
        prices = self._load.prices if self._load else Prices()
        per_output = prices.output + prices.context * (prompt + output / 2)
        return computed * (prices.prompt + prices.prompt_context * prompt / 2) + output * per_output

    def _refusal(self, ask: Ask, tenant: _Tenant, after_s: float) -> WeftError:
        code = OVER_SHARE if self._is_over_share(ask.tenant, tenant) else OVERLOADED
        self._count(ask, tenant, code)
        bound_s = self._max_wait_s if ask.deadline_s is None else min(self._max_wait_s, ask.deadline_s)
        limit = f"the limit is {bound_s:g} s (scheduler.max_wait_s, or the request's own deadline)"
        again = f"Try again in {math.ceil(after_s)} s."
        if code == OVER_SHARE:
            message = f"The tenant has sent more requests than its share can start in time: {limit}. {again}"
            return RateLimitError(message, retry_after_s=after_s, code=code)
        message = f"The server cannot begin the request in time: {limit}. {again}"
        return CapacityError(message, retry_after_s=after_s, code=code)

    def _slot_after_s(self, ask: Ask, tenant: _Tenant, now_s: float, after_s: float, turn: int) -> float:
        """Seconds until the request's slot, at least `after_s`."""
        units, units_per_s = self._units(ask), self._rate(ask.tenant, tenant) / tenant.mean_cost
        if not units_per_s:
            return after_s
        if turn > 0:
            return tenant.slots.give_again(ask.key, now_s + after_s, units, units_per_s) - now_s
        self._num_slots += 1  # counted again once a second
        num_left, booked_per_s = MAX_SLOTS - self._num_slots, BOOKED_SHARE * units_per_s
        slot_s = tenant.slots.give(ask.key, now_s, now_s + after_s, units, booked_per_s, num_left=num_left)
        return slot_s - now_s

    def _is_over_share(self, name: str, tenant: _Tenant) -> bool:
        told = self._load.tenants.get(name) if self._load else None
        of_rate = told.rate / self._sum_rates if told and self._sum_rates else 0.0
        of_backlog = tenant.live_units / self._live_units if self._live_units else 0.0
        return max(of_rate, of_backlog) > OVER_FACTOR * self._share(tenant)

    def _refuse_late(self, ask: Ask, code: str) -> float:
        """Count a refusal by the engine; returns the seconds after which the request may come back."""
        now_s = self._clock()
        self._refresh(now_s)
        tenant = self._enter(ask, now_s)
        self._count(ask, tenant, code)
        wait_s = self.factor * self._raw_wait_s(ask.tenant, tenant, ask.adapter)
        return _after_s(ask, wait_s, WAIT_SHARES[0] * self._max_wait_s)

    def _count(self, ask: Ask, tenant: _Tenant, code: str) -> None:
        tenant.refused[code] += 1
        self._on_refusal(code, ask.name)

    def _finished(self, ask: Ask, units: float, num_computed: int, num_prompt: int, num_output: int) -> None:
        tenant = self._tenants[ask.tenant]
        cost = self._cost(num_computed, num_prompt, num_output) / units
        tenant.mean_cost += (min(FACTOR_BOUNDS[1], max(FACTOR_BOUNDS[0], cost)) - tenant.mean_cost) / MEAN_MEMORY
        self.lengths.observe(ask.tenant, ask.adapter, num_output)
        if self._num_untaught is None:
            self._num_answers += 1
            if self._num_answers == MIN_ANSWERS:
                self._num_untaught = 2 * self._waiting

    def _learn(self, ask: Ask, raw_s: float, queue_s: float, *, has_row: bool, is_loaded: bool) -> None:
        """Learn from the actual wait of a request."""
        if ask.adapter is not None:
            self._loaded.pop(ask.adapter, None)
            self._loaded[ask.adapter] = None
            if len(self._loaded) > MAX_ADAPTERS:
                del self._loaded[next(iter(self._loaded))]
        if not is_loaded:
            if has_row:  # else it waited for a row, too
                self._load_s += (max(0.0, queue_s - self.factor * raw_s) - self._load_s) / 8
        elif self._num_untaught is None or self._num_untaught > 0:
            self._num_untaught = self._num_untaught and self._num_untaught - 1
        elif raw_s > LEARN_SHARE * self._max_wait_s:
            low, high = FACTOR_BOUNDS
            step = FACTOR_UP if queue_s > self.factor * raw_s else FACTOR_DOWN
            self.factor = min(high, max(low, self.factor * step))

    def _leave_queue(self, ask: Ask, count: int, units: float) -> None:
        tenant = self._tenants[ask.tenant]
        of_adapter = tenant.adapters.get(ask.adapter)
        if not count or of_adapter is None:
            return
        self._waiting -= count
        tenant.waiting -= count
        tenant.waiting_units = max(0.0, tenant.waiting_units - units) if tenant.waiting else 0.0
        of_adapter[0] -= count
        of_adapter[1] = max(0.0, of_adapter[1] - units)
        if not of_adapter[0]:
            del tenant.adapters[ask.adapter]

    def _leave(self, ask: Ask, units: float) -> None:
        tenant = self._tenants[ask.tenant]
        tenant.live -= 1
        tenant.last_s = self._clock()
        tenant.live_units = max(0.0, tenant.live_units - units) if tenant.live else 0.0
        self._live_units = max(0.0, self._live_units - units)


def _deadline_s(ask: Ask) -> float:
    """Longest predicted wait that the client's deadline allows."""
    return math.inf if ask.deadline_s is None else WAIT_SHARES[2] * ask.deadline_s


def _after_s(ask: Ask, wait_s: float, limit_s: float) -> float:
    """Seconds until the wait is as short as allowed, if no more requests come."""
    return max(1.0, wait_s - min(limit_s, _deadline_s(ask)))
