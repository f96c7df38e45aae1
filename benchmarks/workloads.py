"""Who asks for which adapter, when, and how long: the workloads of the papers that others measure with.

Popularity patterns follow Punica (arXiv:2310.18547, section 7), arrivals follow S-LoRA
(arXiv:2311.03285, section 7). Everything is seeded. It knows no servers and no models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from weft.errors import ConfigError

PATTERNS = ("identical", "distinct", "uniform", "zipf:1.5", "one-against-many")
"""Popularity patterns; zipf takes any base above 1."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request of a workload."""

    arrival_s: float
    """Seconds after the start."""
    adapter: int
    """Index of the adapter, from 0."""
    prompt_tokens: int
    output_tokens: int


def adapter_counts(pattern: str, num_requests: int, num_adapters: int | None = None) -> list[int]:
    """Requests per adapter, most popular first.

    Semantics:
        identical           all requests ask for one adapter
        distinct            every request asks for its own
        uniform             ceil(sqrt(num_requests)) adapters, as equal as possible
        zipf:b              groups of floor(b**k), k = 0, 1, ..., as long as they leave a rest; the rest is one group
        one-against-many    one request for the first adapter, all others for the second

    Args:
        pattern: One of the above.
        num_requests: Requests in all, at least 1.
        num_adapters: Adapters there are. `distinct` and `uniform` then spread over exactly these; the smallest zipf
            groups are merged into the last adapter. None takes as many as the pattern wants.

    Raises:
        ConfigError: The pattern is unknown or needs more adapters or requests than there are.
    """
    if num_requests < 1 or (num_adapters is not None and num_adapters < 1):
        raise ConfigError(f"need at least one request and one adapter, got {num_requests} and {num_adapters}")
    if pattern == "identical":
        return [num_requests]
    if pattern == "distinct":
        return _equal_shares(num_requests, min(num_requests, num_adapters or num_requests))
    if pattern == "uniform":
        return _equal_shares(num_requests, min(num_requests, num_adapters or math.ceil(math.sqrt(num_requests))))
    if pattern == "one-against-many":
        if num_requests < 2 or (num_adapters is not None and num_adapters < 2):
            raise ConfigError("one-against-many needs two requests and two adapters")
        return [1, num_requests - 1]
    return _merge_tail(_zipf_groups(_zipf_base(pattern), num_requests), num_adapters)


def assign_adapters(pattern: str, num_requests: int, num_adapters: int | None = None, seed: int = 0) -> list[int]:
    """Adapter index of each request: the pattern's counts, shuffled."""
    counts = adapter_counts(pattern, num_requests, num_adapters)
    indices = np.repeat(np.arange(len(counts)), counts)
    np.random.Generator(np.random.PCG64(seed)).shuffle(indices)
    return indices.tolist()


def slora_trace(
    *,
    num_adapters: int,
    alpha: float = 1.0,
    rate: float,
    duration_s: float = 1.0,
    input_range: tuple[int, int] = (8, 512),
    output_range: tuple[int, int] = (8, 512),
    seed: int = 42,
) -> list[TimedRequest]:
    """Requests as S-LoRA's generator draws them: the same calls in the same order of numpy's legacy generator.

    Args:
        num_adapters: Adapters there are.
        alpha: Popularity, `P(i) = ((i + 1) / n) ** alpha - (i / n) ** alpha`. 1 is uniform, smaller favours adapter 0.
        rate: Requests per second; arrivals are a Poisson process.
        duration_s: Seconds of arrivals.
        input_range: Prompt tokens, upper end excluded.
        output_range: Output tokens, upper end excluded.
        seed: Of all draws.
    """
    random = np.random.RandomState(seed)
    total = int(rate * duration_s)
    adapters = (random.power(alpha, total) * num_adapters).astype(int)
    inputs = random.randint(*input_range, total)
    outputs = random.randint(*output_range, total)
    arrivals = np.cumsum(random.gamma(1, 1 / rate, total))
    return [
        TimedRequest(float(arrival), int(adapter), int(prompt), int(output))
        for arrival, adapter, prompt, output in zip(arrivals, adapters, inputs, outputs, strict=True)
    ]


def gamma_arrivals(num_requests: int, rate: float, cv: float, seed: int) -> list[float]:
    """Arrival times in seconds with gamma-distributed gaps; cv 1 is a Poisson process, cv 0 is evenly spaced."""
    if cv == 0:
        return [(i + 1) / rate for i in range(num_requests)]
    random = np.random.Generator(np.random.PCG64(seed))
    return cast("list[float]", np.cumsum(random.gamma(1 / cv**2, cv**2 / rate, num_requests)).tolist())


def zipf_adapters(num_adapters: int, *, exponent: float = 1.0, seed: int) -> Iterator[int]:
    """Adapters by Zipf's law, without end: `P(i)` is proportional to `(i + 1) ** -exponent`."""
    weights = np.arange(1, num_adapters + 1) ** -exponent
    random = np.random.Generator(np.random.PCG64(seed))
    while True:
        yield from random.choice(num_adapters, 4096, p=weights / weights.sum()).tolist()


def _equal_shares(total: int, parts: int) -> list[int]:
    share, rest = divmod(total, parts)
    return [share + 1] * rest + [share] * (parts - rest)


def _zipf_base(pattern: str) -> float:
    name, _, number = pattern.partition(":")
    try:
        base = float(number)
    except ValueError:
        base = math.nan
    if name != "zipf" or not base > 1:
        known = ", ".join(PATTERNS)
        raise ConfigError(f"popularity must be one of {known} (zipf with a base above 1), got {pattern!r}")
    return base


def _zipf_groups(base: float, num_requests: int) -> list[int]:
    groups: list[int] = []
    while (rest := num_requests - sum(groups)) > (size := math.floor(base ** len(groups))):
        groups.append(size)
    return sorted([*groups, rest], reverse=True)


def _merge_tail(counts: list[int], num_adapters: int | None) -> list[int]:
    if num_adapters is None or len(counts) <= num_adapters:
        return counts
    return [*counts[: num_adapters - 1], sum(counts[num_adapters - 1 :])]
