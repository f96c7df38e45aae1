"""Clients by kind: endless streams of calls, each from a seed of its own.

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
    seed: int = 1
    sizes: Sizes = DEFAULT_SIZES
    adapters: Adapters = base
    lane: int = 0
    weight: Callable[[float], float] = lambda _: 1.0
    """By the second."""

    def poisson(self, rate: float) -> Iterator[Call]:
        """Calls that come whatever became of those before."""
        return self.varying(lambda _: rate, rate)

    def varying(self, rate_at: Callable[[float], float], max_rate: float) -> Iterator[Call]:
        """Calls at a rate that changes with the second and is never above `max_rate`."""
        rng = self._rng()
        at_s = 0.0
        while True:
            at_s += rng.expovariate(max_rate)
            if rng.random() * max_rate < rate_at(at_s):
                yield self._call(rng, at_s)

    def always(self, clients: int) -> list[Call]:
        """So many streams at once: each sends its next call when the last has ended."""
        rng = self._rng()

        def next_call(now_s: float) -> Call:
            return replace(self._call(rng, now_s), follow=next_call)

        return [next_call(0.0) for _ in range(clients)]

    def burst(self, count: int, at_s: float) -> list[Call]:
        """So many calls at once."""
        rng = self._rng()
        return [self._call(rng, at_s) for _ in range(count)]

    def _rng(self) -> random.Random:
        return random.Random(f"{self.tenant} {self.seed}")

    def _call(self, rng: random.Random, at_s: float) -> Call:
        num_prompt, num_output = self.sizes(rng)
        return Call(
            at_s=at_s,
            tenant=self.tenant,
            num_prompt=num_prompt,
            num_output=num_output,
            adapter=self.adapters(rng),
            weight=self.weight(at_s),
            lane=self.lane,
        )


def together(*streams: Iterable[Call]) -> Iterator[Call]:
    """All calls in the order of their time."""
    return heapq.merge(*streams, key=attrgetter("at_s"))


def many_adapters(
    rate: float, num_adapters: int, seed: int = 1, tenants: int = 4
) -> Iterator[Call]:
    """Many adapters by a Zipf law, dealt out to some tenants; adapter 0 is the most popular."""
    for call in Client(tenant="t", seed=seed, adapters=among(range(num_adapters), 0.9)).poisson(
        rate
    ):
        yield replace(call, tenant=f"t{(call.adapter or 0) % tenants}")
