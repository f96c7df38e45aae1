"""Service that each tenant got and still asks for, in the units of `manylora.engine.fairness.prices`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from manylora.engine.fairness.lengths import Lengths
from manylora.engine.fairness.prices import Prices, TenantLoad
from manylora.engine.fairness.shares import FairPlace

MAX_KNOWN_TENANTS = 4096
"""More tenants than this are remembered only while they have requests."""
RATE_HALF_LIFE_S = 1.0
"""Age at which computed units count half for a rate."""
MAX_RATE_SPAN_S = 2.0
"""Longest time between two figures of a rate; a longer one counts as this, so that rates are right again soon after."""


class ComputedTokens(Protocol):
    """Consecutive tokens of one request that a step computed."""

    start: int
    """Position of the first token."""
    token_ids: list[int]


class Rate:
    """Units per second of late: units noted count half after every `RATE_HALF_LIFE_S` seconds."""

    __slots__ = ("_seconds", "_units")

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    def note(self, units: float, seconds: float) -> None:
        """Count units that took `seconds`."""
        self.note_decayed(units, seconds, 0.5 ** (seconds / RATE_HALF_LIFE_S))

    def note_decayed(self, units: float, seconds: float, kept: float) -> None:
        """Count units that took `seconds`, where earlier units still count by the factor `kept`."""
        self._units = self._units * kept + units
        self._seconds = self._seconds * kept + seconds

    @property
    def per_s(self) -> float:
        """Units per second; 0 before anything took time."""
        return self._units / self._seconds if self._seconds > 0 else 0.0


@dataclass(slots=True)
class _Tenant:
    weight: float = 1.0
    num_requests: int = 0
    num_waiting: int = 0
    queued: float = 0.0
    service: float = 0.0
    reported_service: float | None = None
    """Service at the last report of loads; None before the first."""
    tokens: int = 0
    rate: Rate = field(default_factory=Rate)


class TenantService:
    """Charges tenants for computed tokens, and estimates the work that they still ask for.

    Args:
        prices: Prices of the work of a step.
        lengths: Predicts how many output tokens a request will have.
        clock: Monotonic seconds.
    """

    def __init__(
        self, prices: Prices, lengths: Lengths, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.prices = prices
        self.lengths = lengths
        self._clock = clock
        self.tenants: dict[str, _Tenant] = {}
        """Tenants with requests, and the latest ones without."""
        self._rate = Rate()
        self._full_rate = Rate()
        self._reported_s = 0.0
        """Second of the last report of loads."""

    def arrive(self, place: FairPlace) -> None:
        """Count a request that comes to the engine."""
        name = place.key.tenant
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = _Tenant()
            if len(self.tenants) > MAX_KNOWN_TENANTS:
                self.tenants = {
                    key: kept
                    for key, kept in self.tenants.items()
                    if kept.num_requests or kept is tenant
                }
        tenant.weight = place.key.weight
        tenant.num_requests += 1

    def leave(self, place: FairPlace) -> None:
        """Count a request that leaves the engine."""
        self.tenants[place.key.tenant].num_requests -= 1

    def wait(self, place: FairPlace, units: float) -> None:
        """Count the predicted work of a request that begins to wait."""
        place.queued_units = units
        tenant = self.tenants[place.key.tenant]
        tenant.queued += units
        tenant.num_waiting += 1

    def stop_waiting(self, place: FairPlace) -> None:
        """Take the work of a request that waits no longer out of the queue."""
        tenant = self.tenants[place.key.tenant]
        tenant.queued -= place.queued_units
        tenant.num_waiting -= 1

    def units_left(self, place: FairPlace, num_computed: int, num_output: int) -> float:
        """Predicted price of the tokens still to compute for a request, of which it has some."""
        prices = self.prices
        prompt = max(place.num_prompt - max(num_computed, place.num_charged), 0)
        output = max(place.predicted_tokens - num_output, 1)
        context = place.num_prompt + num_output + output / 2
        return prompt * (prices.prompt + prices.prompt_context * place.num_prompt / 2) + output * (
            prices.output + prices.context * context
        )

    def charge(
        self, computed: Sequence[tuple[FairPlace, ComputedTokens]]
    ) -> list[tuple[FairPlace, float]]:
        """Charge tenants for tokens just computed, in units. Tokens computed again cost nothing.

        A distinct adapter in the step has its price once, divided among the requests that use it.
        """
        charges: list[tuple[FairPlace, float]] = []
        num_users = Counter([place.adapter for place, _ in computed])
        prices = self.prices
        for place, tokens in computed:
            num_tokens = len(tokens.token_ids)
            units = 0.0
            end = tokens.start + num_tokens
            if end > place.num_charged:
                start = max(tokens.start, place.num_charged)
                place.num_charged = end
                context = (start + end) / 2
                prompt = min(max(place.num_prompt - start, 0), end - start)
                units = (end - start - prompt) * (prices.output + prices.context * context)
                if prompt:
                    units += prompt * (prices.prompt + prices.prompt_context * context)
            if place.owes_load:
                place.owes_load = False
                units += place.load_units
            if place.rank:
                units += prices.rank * place.rank / num_users[place.adapter]
            tenant = self.tenants[place.key.tenant]
            tenant.tokens += num_tokens
            tenant.service += units
            charges.append((place, units))
        return charges

    def charge_load(self, place: FairPlace) -> list[tuple[FairPlace, float]]:
        """Charge the load that a request caused which leaves before it ran."""
        place.owes_load = False
        self.tenants[place.key.tenant].service += place.load_units
        return [(place, place.load_units)]

    def note_step(self, units: float, seconds: float, is_full: bool) -> None:
        """Take note of a step that is done; `is_full` if requests waited for a place in it."""
        self._rate.note(units, seconds)
        if is_full:
            self._full_rate.note(units, seconds)

    @property
    def full_rate(self) -> float:
        """Units per second in steps that others waited for, or in all steps of late if more; 0 until others waited."""
        full = self._full_rate.per_s
        return max(full, self._rate.per_s) if full else 0.0

    def tokens(self, limit: int) -> dict[str, int]:
        """Tokens computed since start, of the `limit` busiest tenants, those computed again included."""
        busiest = sorted(self.tenants.items(), key=lambda item: -item[1].tokens)[:limit]
        return {name: tenant.tokens for name, tenant in busiest if tenant.tokens}

    def loads(self, running: Iterable[tuple[FairPlace, float]]) -> dict[str, TenantLoad]:
        """Report the load of each tenant with requests, and its rate since the last call.

        Args:
            running: Requests with pages, and the units still to compute for each.
        """
        seconds = min(self._clock() - self._reported_s, MAX_RATE_SPAN_S)
        kept = 0.5 ** (seconds / RATE_HALF_LIFE_S)
        self._reported_s = self._clock()
        found = {}
        for name, tenant in self.tenants.items():
            if tenant.reported_service is not None:
                tenant.rate.note_decayed(tenant.service - tenant.reported_service, seconds, kept)
            tenant.reported_service = tenant.service
            if tenant.num_requests:
                queued = max(tenant.queued, 0.0)
                found[name] = TenantLoad(
                    weight=tenant.weight,
                    waiting=tenant.num_waiting,
                    queued=queued,
                    backlog=queued,
                    rate=tenant.rate.per_s,
                    service=tenant.service,
                )
        for place, units in running:
            load = found[place.key.tenant]
            load.running += 1
            load.paused += not place.has_row
            load.backlog += units
        return found
