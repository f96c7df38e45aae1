"""Popularity of adapters, and times at which requests arrive.

Everything is seeded. It knows no servers and no models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

import numpy as np

from manylora.errors import ConfigError

PATTERNS = "uniform, or zipf:1.5 with any exponent"
"""Popularity patterns."""
_DRAWN = 4096


def draw_adapters(pattern: str, num_adapters: int, seed: int) -> Iterator[int]:
    """Draw the adapters of requests, without end.

    Semantics:
        uniform    all adapters, shuffled, again and again
        zipf:e     Zipf's law with exponent e: `P(i)` is proportional to `1 / (i + 1) ** e`

    Args:
        pattern: One of the above.
        num_adapters: Number of adapters, at least 1.
        seed: Determines the draws.

    Raises:
        ConfigError: The pattern is unknown.
    """
    found = re.fullmatch(r"uniform|zipf:(\d+(\.\d+)?)", pattern, re.ASCII)
    if found is None:
        raise ConfigError(f"popularity must be {PATTERNS}, got {pattern!r}", param="popularity")
    random = np.random.Generator(np.random.PCG64(seed))
    return (
        _uniform(random, num_adapters)
        if found[1] is None
        else _zipf(random, num_adapters, float(found[1]))
    )


def _uniform(random: np.random.Generator, num_adapters: int) -> Iterator[int]:
    while True:
        yield from random.permutation(num_adapters).tolist()


def _zipf(random: np.random.Generator, num_adapters: int, exponent: float) -> Iterator[int]:
    weights = 1 / np.arange(1, num_adapters + 1) ** exponent
    while True:
        yield from random.choice(num_adapters, _DRAWN, p=weights / weights.sum()).tolist()


def poisson_arrivals(num_requests: int, rate: float, seed: int) -> list[float]:
    """Arrival times in seconds of a Poisson process with this rate in requests a second."""
    random = np.random.Generator(np.random.PCG64(seed))
    return cast("list[float]", np.cumsum(random.gamma(1, 1 / rate, num_requests)).tolist())
