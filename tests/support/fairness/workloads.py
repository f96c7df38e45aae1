"""Workloads by name: W1 to W10. Endless streams of calls, or calls until a second; each from a seed of its own.

A rate is in requests per second. The lengths of the default sizes are 256 prompt and 64 output tokens, which cost
about 400 units, so an engine of 64 rows serves some 80 of them in a second.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter

from fairness.calls import Call

Sizes = Callable[[random.Random], tuple[int, int]]
"""Draws prompt and output tokens."""
Adapters = Callable[[random.Random], int | None]
"""Draws an adapter; None is the base."""


def fixed(num_prompt: int, num_output: int) -> Sizes:
    """Always the same lengths."""
    return lambda _: (num_prompt, num_output)


def lognormal(mean_prompt: int, mean_output: int, sigma: float = 0.6) -> Sizes:
    """Lengths with a long tail, at most eight times the mean."""

    def draw(rng: random.Random) -> tuple[int, int]:
        factors = [min(rng.lognormvariate(-sigma * sigma / 2, sigma), 8.0) for _ in range(2)]
        return max(round(mean_prompt * factors[0]), 1), max(round(mean_output * factors[1]), 1)

    return draw


def mixed(share: float, one: Sizes, other: Sizes) -> Sizes:
    """`one` for a share of the calls, `other` for the rest."""
    return lambda rng: (one if rng.random() < share else other)(rng)


DEFAULT_SIZES = lognormal(256, 64)


def base(_rng: random.Random) -> None:
    """The base model."""


def among(indices: Sequence[int], exponent: float = 0.0) -> Adapters:
    """One of several adapters, by a Zipf law whose first is the most popular; 0 makes all alike."""
    sums = list(accumulate((rank + 1) ** -exponent for rank in range(len(indices))))
    return lambda rng: rng.choices(indices, cum_weights=sums)[0]


@dataclass(frozen=True, kw_only=True)
class Client:
    """Somebody who sends calls of a kind."""

    tenant: str
    sizes: Sizes = DEFAULT_SIZES
    adapters: Adapters = base
    weight: float = 1.0
    lane: int = 0
    tries: int = 1
    weight_at: Callable[[float], float] | None = None
    """The weight by the second, where it changes."""

    def call(self, rng: random.Random, at_s: float) -> Call:
        """One call."""
        num_prompt, num_output = self.sizes(rng)
        return Call(
            at_s=at_s,
            tenant=self.tenant,
            num_prompt=num_prompt,
            num_output=num_output,
            adapter=self.adapters(rng),
            weight=self.weight if self.weight_at is None else self.weight_at(at_s),
            lane=self.lane,
            tries=self.tries,
        )

    def poisson(self, rate: float, seed: int, start_s: float = 0.0, end_s: float | None = None) -> Iterator[Call]:
        """Calls that come whatever became of those before."""
        return self.varying(lambda _: rate, rate, seed, start_s, end_s)

    def varying(
        self,
        rate_at: Callable[[float], float],
        max_rate: float,
        seed: int,
        start_s: float = 0.0,
        end_s: float | None = None,
    ) -> Iterator[Call]:
        """Calls at a rate that changes with the second and is never above `max_rate`."""
        rng = random.Random(f"{self.tenant} {seed}")
        at_s = start_s
        while True:
            at_s += rng.expovariate(max_rate)
            if end_s is not None and at_s >= end_s:
                return
            if rng.random() * max_rate < rate_at(at_s):
                yield self.call(rng, at_s)

    def always(self, clients: int, seed: int, start_s: float = 0.0, end_s: float | None = None) -> list[Call]:
        """So many streams at once: each sends its next call when the last has ended."""
        rng = random.Random(f"{self.tenant} {seed}")

        def next_call(now_s: float) -> Call | None:
            if end_s is not None and now_s >= end_s:
                return None
            return replace(self.call(rng, now_s), follow=next_call)

        return [call for _ in range(clients) if (call := next_call(start_s)) is not None]

    def burst(self, count: int, at_s: float, seed: int) -> list[Call]:
        """So many calls at once."""
        rng = random.Random(f"{self.tenant} {seed}")
        return [self.call(rng, at_s) for _ in range(count)]


def together(*streams: Iterable[Call]) -> Iterator[Call]:
    """All calls in the order of their time."""
    return heapq.merge(*streams, key=attrgetter("at_s"))


def two_backlogged(
    seed: int,
    streams: int = 96,
    weights: tuple[float, float] = (1.0, 1.0),
    adapters: tuple[Adapters, Adapters] = (base, base),
    sizes: Sizes = DEFAULT_SIZES,
) -> Iterator[Call]:
    """W1: tenants a and b, each with more streams at once than a step has rows."""
    pairs = zip("ab", weights, adapters, strict=True)
    return together(
        *(
            Client(tenant=tenant, weight=weight, adapters=drawn, sizes=sizes).always(streams, seed)
            for tenant, weight, drawn in pairs
        )
    )


def flood_and_quiet(
    seed: int,
    flood_rate: float,
    quiet_rate: float = 2.0,
    flood_adapters: Adapters = base,
    quiet_adapters: Adapters = base,
) -> Iterator[Call]:
    """W2: one tenant that asks for more than the engine has, and one that asks now and then."""
    return together(
        Client(tenant="flood", adapters=flood_adapters).poisson(flood_rate, seed),
        Client(tenant="quiet", adapters=quiet_adapters).poisson(quiet_rate, seed),
    )


def idle_credit(seed: int, rate: float, burst: int = 1_500, at_s: float = 20.0) -> Iterator[Call]:
    """W3: tenant a asks steadily for less than its share; tenant b comes from nowhere with all its calls at once."""
    return together(Client(tenant="a").poisson(rate, seed), Client(tenant="b").burst(burst, at_s, seed))


def many_adapters(
    seed: int,
    rate: float,
    num_adapters: int = 2_000,
    exponent: float = 0.9,
    tenants: int = 4,
    sizes: Sizes = DEFAULT_SIZES,
) -> Iterator[Call]:
    """W4: thousands of adapters by a Zipf law, dealt out to some tenants; adapter 0 is the most popular."""
    drawn = among(range(num_adapters), exponent)
    for call in Client(tenant="t", sizes=sizes, adapters=drawn).poisson(rate, seed):
        yield replace(call, tenant=f"t{(call.adapter or 0) % tenants}")


def long_among_short(seed: int, rate: float, long_rate: float = 0.2, long_prompt: int = 20_000) -> Iterator[Call]:
    """W5: chat of one tenant beside prompts of 20,000 tokens of another."""
    return together(
        Client(tenant="chat").poisson(rate, seed),
        Client(tenant="long", sizes=fixed(long_prompt, 64)).poisson(long_rate, seed),
    )


def short_and_long_outputs(seed: int, rate: float, end_s: float | None = None) -> Iterator[Call]:
    """W6: of one tenant's calls 80 % are short (64 in, 32 out) and 20 % long (512 in, 1,024 out)."""
    sizes = mixed(0.8, fixed(64, 32), fixed(512, 1_024))
    return Client(tenant="a", sizes=sizes).poisson(rate, seed, end_s=end_s)


def overload(seed: int, rate: float, shares: Sequence[float] = (0.7, 0.2, 0.1), tries: int = 1) -> Iterator[Call]:
    """W7, and with `tries` W10: tenants t0, t1, ... with such shares of the demand and equal weights."""
    return together(
        *(Client(tenant=f"t{index}", tries=tries).poisson(rate * share, seed) for index, share in enumerate(shares))
    )


def zipf_tenants(seed: int, rate: float, tenants: int = 10) -> Iterator[Call]:
    """Tenants t0, t1, ... of equal weight, whose demands fall by a Zipf law of exponent 1."""
    total = sum(1 / (index + 1) for index in range(tenants))
    return overload(seed, rate, [1 / (index + 1) / total for index in range(tenants)])


def on_and_off(seed: int, rate: float, period_s: float = 4.0, others: float = 0.5) -> Iterator[Call]:
    """W8: tenant a asks at twice `rate` in every second half of a period, tenant b steadily at `others` of it."""
    return together(
        Client(tenant="a").varying(lambda at_s: 2 * rate * (at_s % period_s >= period_s / 2), 2 * rate, seed),
        Client(tenant="b").poisson(others * rate, seed),
    )


def increasing(seed: int, rate: float, end_s: float, others: float = 0.5) -> Iterator[Call]:
    """W8: tenant a asks for more and more, from nothing to twice `rate`; tenant b steadily at `others` of it."""
    return together(
        Client(tenant="a").varying(lambda at_s: 2 * rate * min(at_s / end_s, 1.0), 2 * rate, seed),
        Client(tenant="b").poisson(others * rate, seed),
    )


def changing_weights(seed: int, change_s: float, streams: int = 96) -> Iterator[Call]:
    """W9: as W1 with weights 3 and 1 until `change_s`, then 1 and 1."""
    return together(
        Client(tenant="a", weight_at=lambda at_s: 3.0 if at_s < change_s else 1.0).always(streams, seed),
        Client(tenant="b").always(streams, seed),
    )
