"""Popularity of adapters, and times at which requests arrive.

Popularity patterns follow Punica (arXiv:2310.18547, section 7). Everything is seeded. It knows no servers and no
models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from manylora.errors import ConfigError

PATTERNS = ("uniform", "zipf:1.5")
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


def adapter_counts(pattern: str, num_requests: int, num_adapters: int) -> list[int]:
    """Requests per adapter, most popular first.

    Semantics:
        uniform    all adapters, as equally as possible
        zipf:b     groups of floor(b**k), k = 0, 1, ..., as long as they leave a rest; the rest is one group

    Args:
        pattern: One of the above.
        num_requests: Requests in all, at least 1.
        num_adapters: Adapters there are. The smallest zipf groups are merged into the last one.

    Raises:
        ConfigError: The pattern is unknown, or there are no requests or adapters.
    """
    if num_requests < 1 or num_adapters < 1:
        raise ConfigError(
            f"need at least one request and one adapter, got {num_requests} and {num_adapters}"
        )
    if pattern == "uniform":
        share, rest = divmod(num_requests, num_adapters)
        return [count for count in [share + 1] * rest + [share] * (num_adapters - rest) if count]
    counts = _zipf_counts(_zipf_base(pattern), num_requests)
    return (
        [*counts[: num_adapters - 1], sum(counts[num_adapters - 1 :])]
        if len(counts) > num_adapters
        else counts
    )


def assign_adapters(pattern: str, num_requests: int, num_adapters: int, seed: int) -> list[int]:
    """Adapter index of each request: the pattern's counts, shuffled."""
    counts = adapter_counts(pattern, num_requests, num_adapters)
    indices = np.repeat(np.arange(len(counts)), counts)
    np.random.Generator(np.random.PCG64(seed)).shuffle(indices)
    return indices.tolist()


def poisson_arrivals(num_requests: int, rate: float, seed: int) -> list[float]:
    """Arrival times in seconds of a Poisson process with this rate in requests a second."""
    random = np.random.Generator(np.random.PCG64(seed))
    return cast("list[float]", np.cumsum(random.gamma(1, 1 / rate, num_requests)).tolist())


def zipf_adapters(num_adapters: int, *, seed: int) -> Iterator[int]:
    """Adapters by Zipf's law with exponent 1, without end: `P(i)` is proportional to `1 / (i + 1)`."""
    weights = 1 / np.arange(1, num_adapters + 1)
    random = np.random.Generator(np.random.PCG64(seed))
    while True:
        yield from random.choice(num_adapters, 4096, p=weights / weights.sum()).tolist()


def _zipf_base(pattern: str) -> float:
    found = re.fullmatch(r"zipf:(\d+(\.\d+)?)", pattern, re.ASCII)
    base = float(found[1]) if found else 0.0
    if base <= 1:
        known = ", ".join(PATTERNS)
        raise ConfigError(
            f"popularity must be one of {known} (zipf with a base above 1), got {pattern!r}"
        )
    return base


def _zipf_counts(base: float, num_requests: int) -> list[int]:
    groups: list[int] = []
    while (rest := num_requests - sum(groups)) > (size := math.floor(base ** len(groups))):
        groups.append(size)
    return sorted([*groups, rest], reverse=True)
