"""Service that each tenant got and still asks for, in units. Knows tenants by id.

Work is counted in units: one unit is the time of one prompt token in a full chunk. Fair shares are counted in units,
bills never. The prices are measured at start (`manylora.engine.execution.costs`); the idea of a cost per kind of work
is from Sheng et al., "Fairness in Serving Large Language Models" (arXiv:2401.00588).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from manylora.engine.fairness.lengths import Lengths
from manylora.engine.fairness.prices import Prices
from manylora.engine.scheduling.plan import Chunk
from manylora.engine.scheduling.request_state import RequestState
from manylora.engine.status import TenantLoad

NUM_KEPT_ENDS = 64
MAX_RETRY_AFTER_S = 60.0
MAX_KNOWN_TENANTS = 4096
"""More tenants than this are remembered only while they have requests."""
RATE_HALF_LIFE_S = 1.0
"""What was computed so long ago counts half for a rate."""
MAX_RATE_SPAN_S = 2.0
"""A longer time without figures counts as this long; rates are right again soon after it."""


class Rate:
    """Units per second of late: what was noted, decaying by half every `RATE_HALF_LIFE_S` seconds."""

    __slots__ = ("_seconds", "_units")

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    def note(self, units: float, seconds: float) -> None:
        """Count units that took so many seconds."""
        self.note_decayed(units, seconds, 0.5 ** (seconds / RATE_HALF_LIFE_S))

    def note_decayed(self, units: float, seconds: float, kept: float) -> None:
        """The same with the part that what was noted before still counts, for many that note at the same time."""
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
    queued: float = 0.0
    service: float = 0.0
    told_service: float | None = None
    """What was told last; None before the first time."""
    tokens: int = 0
    rate: Rate = field(default_factory=Rate)


class TenantService:
    """Prices what is computed, and tells what is left to compute.

    Args:
        prices: Of the work of a step.
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
        """Those with requests, and the last ones without."""
        self._ends_s: deque[float] = deque(maxlen=NUM_KEPT_ENDS)
        self._rate, self._full_rate = Rate(), Rate()
        self._told_s = 0.0
        """When loads were told last."""

    def arrive(self, state: RequestState) -> None:
        """A request comes to the engine."""
        tenant = self.tenants.get(state.tenant)
        if tenant is None:
            tenant = self.tenants[state.tenant] = _Tenant()
            if len(self.tenants) > MAX_KNOWN_TENANTS:
                self.tenants = {
                    key: kept
                    for key, kept in self.tenants.items()
                    if kept.num_requests or kept is tenant
                }
        tenant.weight = state.request.flow.weight
        tenant.num_requests += 1

    def note_end(self, state: RequestState) -> None:
        """A request has left the engine."""
        self.tenants[state.tenant].num_requests -= 1
        if not state.is_beam_fork:
            self._ends_s.append(self._clock())

    def wait(self, state: RequestState) -> None:
        """A request begins to wait: its predicted work is in the queue."""
        state.queued_units = self.units_left(state)
        self.tenants[state.tenant].queued += state.queued_units

    def stop_waiting(self, state: RequestState) -> None:
        """It no longer waits."""
        self.tenants[state.tenant].queued -= state.queued_units

    def units_left(self, state: RequestState) -> float:
        """Predicted price of what is still to be computed for a request."""
        prices, num_prompt = self.prices, state.num_prompt
        prompt = max(num_prompt - max(state.num_computed, state.num_charged), 0)
        output = max(state.predicted_tokens - len(state.output_token_ids), 1)
        context = num_prompt + len(state.output_token_ids) + output / 2
        return prompt * (prices.prompt + prices.prompt_context * num_prompt / 2) + output * (
            prices.output + prices.context * context
        )

    def token_price(self, state: RequestState) -> float:
        """The price of a request's next token; at least 1."""
        if state.num_left > 1:
            return self.prices.prompt + self.prices.prompt_context * state.num_computed
        return self.prices.output + self.prices.context * state.num_computed

    def charge(
        self, chunks: Sequence[tuple[RequestState, Chunk]]
    ) -> list[tuple[RequestState, float]]:
        """The price of each chunk that was just computed, in units. Tokens computed again cost nothing.

        A distinct adapter in the step has its price once, divided among the requests that use it.
        """
        charges: list[tuple[RequestState, float]] = []
        num_users = Counter([state.digest for state, _ in chunks])
        prices = self.prices
        for state, chunk in chunks:
            num_tokens, units = len(chunk.token_ids), 0.0
            end = chunk.start + num_tokens
            if end > state.num_charged:
                start = max(chunk.start, state.num_charged)
                state.num_charged = end
                context = (start + end) / 2
                prompt = min(max(state.num_prompt - start, 0), end - start)
                units = (end - start - prompt) * (prices.output + prices.context * context)
                if prompt:
                    units += prompt * (prices.prompt + prices.prompt_context * context)
            if state.caused_load:
                units += self._load_price(state)
            if state.rank:
                units += prices.rank * state.rank / num_users[state.digest]
            tenant = self.tenants[state.tenant]
            tenant.tokens += num_tokens
            tenant.service += units
            charges.append((state, units))
        return charges

    def charge_load(self, state: RequestState) -> list[tuple[RequestState, float]]:
        """The price of the load that a request caused which leaves before it ran."""
        units = self._load_price(state)
        self.tenants[state.tenant].service += units
        return [(state, units)]

    def _load_price(self, state: RequestState) -> float:
        """Units for the load of its adapter that a request caused; once."""
        is_due, state.caused_load = state.caused_load, False
        return self.prices.page_load * (state.adapter_pages or 0) if is_due else 0.0

    def note_step(self, units: float, seconds: float, is_full: bool) -> None:
        """A step of so many units is done; `is_full` if requests waited for a place in it."""
        self._rate.note(units, seconds)
        if is_full:
            self._full_rate.note(units, seconds)

    @property
    def full_rate(self) -> float:
        """Units per second in steps that others waited for, or in all of late if more; 0 until others waited."""
        full = self._full_rate.per_s
        return max(full, self._rate.per_s) if full else 0.0

    def tokens(self, limit: int) -> dict[str, int]:
        """Tokens computed since start, of the `limit` busiest tenants, those computed again included."""
        busiest = sorted(self.tenants.items(), key=lambda item: -item[1].tokens)[:limit]
        return {name: tenant.tokens for name, tenant in busiest if tenant.tokens}

    def loads(
        self,
        running: Iterable[RequestState],
        waiting: Mapping[str, int],
        reasons: Mapping[str, dict[str, int]],
    ) -> dict[str, TenantLoad]:
        """What each tenant with requests has here, and its rate since the last call."""
        by_tenant: defaultdict[str, list[RequestState]] = defaultdict(list)
        for state in running:
            by_tenant[state.tenant].append(state)
        seconds = min(self._clock() - self._told_s, MAX_RATE_SPAN_S)
        kept = 0.5 ** (seconds / RATE_HALF_LIFE_S)
        self._told_s = self._clock()
        found = {}
        for name, tenant in self.tenants.items():
            if tenant.told_service is not None:
                tenant.rate.note_decayed(tenant.service - tenant.told_service, seconds, kept)
            tenant.told_service = tenant.service
            if tenant.num_requests:
                states, queued = by_tenant[name], max(tenant.queued, 0.0)
                found[name] = TenantLoad(
                    weight=tenant.weight,
                    running=len(states),
                    paused=sum(not state.has_row for state in states),
                    waiting=waiting.get(name, 0),
                    reasons=reasons.get(name, {}),
                    queued=queued,
                    backlog=queued + sum(map(self.units_left, states)),
                    rate=tenant.rate.per_s,
                    service=tenant.service,
                )
        return found

    def retry_after_s(self, num_waiting: int) -> float:
        """When a place in a queue may be free, from the rate at which requests end."""
        ends = self._ends_s
        if len(ends) < 2 or ends[-1] <= ends[0]:
            return 1.0
        rate = (len(ends) - 1) / (ends[-1] - ends[0])
        return min(max(num_waiting / rate, 1.0), MAX_RETRY_AFTER_S)
