"""Service in units: prices of work, predicted lengths of answers, and what each tenant got and still asks for.

One unit is the time of one prompt token in a full chunk. Fair shares are counted in units, bills never. Prices are
measured at start (`manylora.engine.execution.costs`). A price per kind of work is an idea of Sheng et al., "Fairness in
Serving Large Language Models" (arXiv:2401.00588).

An adapter is the best predictor of the length that a server has: each (tenant, adapter) has a histogram of its own, and
one that was seen too seldom is predicted from its tenant, then from everybody. Lengths as the basis of reservation and
order are the idea of Jin et al., "S3: Increasing GPU Utilization during Generative Inference" (arXiv:2306.06000).
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from manylora.engine.fairness.shares import FairPlace

NUM_BINS = 32
"""Two bins per doubling, so the last one begins at 2 ** 15.5 (46,341) tokens."""
HALF_LIFE = 500
"""Newer observations of its histogram after which an observation counts half."""
MIN_OBSERVATIONS = 8
"""A histogram with fewer is not asked."""
MAX_HISTOGRAMS = 4096
"""At most this many histograms of about 350 bytes are kept; the one that was updated longest ago goes first."""
UNSEEN_TOKENS = 256
"""Median where nothing was seen yet."""

_GROWTH = 2 ** (1 / HALF_LIFE)
_RESCALE_AT = 2.0**64
MAX_KNOWN_TENANTS = 4096
"""More tenants than this are remembered only while they have requests."""
RATE_HALF_LIFE_S = 1.0
"""Age at which computed units count half for a rate."""
MAX_RATE_SPAN_S = 2.0
"""Longest time between two figures of a rate; a longer one counts as this, so that rates are right again soon after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Units per piece of work. Prompt tokens found in the prefix cache cost nothing."""

    prompt: float = 1.0
    """One computed prompt token."""
    output: float = 2.0
    """One generated token, besides the context that it reads."""
    context: float = 1 / 600
    """One token of context that an output token attends to: it is read from memory for this row alone."""
    prompt_context: float = 1 / 30_000
    """One token of context that a prompt token attends to: the tokens of a chunk share the read, and each computes."""
    rank: float = 1 / 16
    """One rank of a distinct adapter in a step; its requests in the step share this."""
    page_load: float = 2.0
    """One page of an adapter that is brought to the device, paid by the tenant that asked for it."""

    def next_token(self, context: float, *, is_prompt: bool) -> float:
        """Price of a token of the prompt or of the output after `context` tokens."""
        if is_prompt:
            return self.prompt + self.prompt_context * context
        return self.output + self.context * context

    def load(self, num_pages: int | None) -> float:
        """Price of bringing an adapter to the device; 0 while its size is unknown."""
        return self.page_load * (num_pages or 0)


# Frozen ones take three times as long to make, and there may be thousands.
@dataclass(slots=True, kw_only=True)
class TenantLoad:
    """Requests and work of one tenant in the engine now."""

    weight: float = 1.0
    running: int = 0
    """Requests with pages."""
    paused: int = 0
    """Requests with pages that sat out the last step."""
    waiting: int = 0
    """Requests without pages."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Waiting requests by reason, as in `EngineStatus.waiting_reasons`."""
    queued: float = 0.0
    """Units still to compute for its waiting requests, with predicted output lengths."""
    backlog: float = 0.0
    """Units still to compute for its waiting and running requests."""
    rate: float = 0.0
    """Units per second computed for it lately."""
    service: float = 0.0
    """Units computed for it since start."""


class Lengths:
    """Histograms of output lengths. Not thread-safe; memory is bounded by `MAX_HISTOGRAMS`."""

    def __init__(self) -> None:
        self._all = _Histogram()
        self.histograms: dict[tuple[str | None, ...], _Histogram] = {}
        """By tenant, and by tenant and adapter; the one updated last is at the end."""

    def observe(self, tenant: str, adapter: str | None, tokens: int) -> None:
        """Take in the length of an answer that ended by itself or at its bound, never that of an aborted one.

        Args:
            tenant: The tenant that sent the request.
            adapter: The adapter's digest; None is the base model.
            tokens: Generated tokens; less than one counts as one.
        """
        self._all.add(tokens)
        for key in ((tenant,), (tenant, adapter)):
            histogram = self.histograms.pop(key, None) or _Histogram()
            histogram.add(tokens)
            self.histograms[key] = histogram
        while len(self.histograms) > MAX_HISTOGRAMS:
            del self.histograms[next(iter(self.histograms))]

    def p50(self, tenant: str, adapter: str | None, cap: int) -> int:
        """Median length in tokens, from 1 to `cap`; `UNSEEN_TOKENS` where nothing is known."""
        candidates = (
            self.histograms.get((tenant, adapter)),
            self.histograms.get((tenant,)),
            self._all,
        )
        known = (
            one
            for one in candidates
            if one is not None and one.num_observations >= MIN_OBSERVATIONS
        )
        histogram = next(known, None)
        tokens = UNSEEN_TOKENS if histogram is None else histogram.median()
        return max(1, min(tokens, cap))


class _Histogram:
    """Counts by logarithmic bins. Newer observations get more weight instead of older ones less, which is O(1)."""

    __slots__ = ("_bins", "_total", "_weight")

    def __init__(self) -> None:
        self._bins = array("d", bytes(8 * NUM_BINS))
        self._total = 0.0
        self._weight = 1.0

    @property
    def num_observations(self) -> float:
        """Sum of the observations' weights."""
        # The newest count a little less than 1: 8 of them must reach 8.
        return self._total / self._weight + 0.5

    def add(self, tokens: int) -> None:
        self._weight *= _GROWTH
        if self._weight > _RESCALE_AT:
            self._bins = array("d", (count / self._weight for count in self._bins))
            self._total /= self._weight
            self._weight = 1.0
        self._bins[min(int(2 * math.log2(max(1, tokens))), NUM_BINS - 1)] += self._weight
        self._total += self._weight

    def median(self) -> int:
        """Tokens that half of the answers do not exceed, interpolated within a bin on the logarithmic scale."""
        left = self._total / 2
        for index, count in enumerate(self._bins):
            if count and left <= count:
                return round(2 ** ((index + left / count) / 2))
            left -= count
        return round(2 ** (NUM_BINS / 2))  # rounding errors of the sums may leave a little


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
        return prompt * prices.next_token(
            place.num_prompt / 2, is_prompt=True
        ) + output * prices.next_token(context, is_prompt=False)

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
