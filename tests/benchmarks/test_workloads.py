"""Workloads follow their formulas."""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from manylora.benchmarks.workloads import (
    adapter_counts,
    assign_adapters,
    poisson_arrivals,
    zipf_adapters,
)
from manylora.errors import ConfigError


@pytest.mark.parametrize(
    ("pattern", "num_requests", "num_adapters", "counts"),
    [
        ("uniform", 4, 9, [1, 1, 1, 1]),
        ("uniform", 32, 6, [6, 6, 5, 5, 5, 5]),
        ("uniform", 64, 8, [8] * 8),
        ("zipf:1.5", 32, 9, [11, 7, 5, 3, 2, 2, 1, 1]),
        ("zipf:1.5", 64, 9, [17, 17, 11, 7, 5, 3, 2, 1, 1]),
        ("zipf:1.5", 32, 3, [11, 7, 14]),
    ],
)
def test_punica_patterns_have_the_papers_counts_over_the_adapters_there_are(
    pattern: str, num_requests: int, num_adapters: int, counts: list[int]
) -> None:
    assert adapter_counts(pattern, num_requests, num_adapters) == counts


@pytest.mark.parametrize("pattern", ["uniform", "zipf:1.5", "zipf:2"])
@pytest.mark.parametrize("num_adapters", [2, 5, 100])
def test_counts_always_sum_to_the_requests(pattern: str, num_adapters: int) -> None:
    for num_requests in range(2, 70):
        counts = adapter_counts(pattern, num_requests, num_adapters)
        assert sum(counts) == num_requests
        assert min(counts) >= 1
        assert len(counts) <= num_adapters


def test_an_unknown_pattern_and_a_load_of_nothing_are_refused() -> None:
    for pattern in ("zipf", "zipf:1", "zipf:x", "zipf:inf", "zipf:nan", "pareto", ""):
        with pytest.raises(ConfigError, match="popularity must be one of"):
            adapter_counts(pattern, 8, 8)
    for none in ((0, 8), (8, 0)):
        with pytest.raises(ConfigError, match="need at least one request and one adapter"):
            adapter_counts("uniform", *none)


def test_assignment_shuffles_exactly_the_counts_and_repeats_with_the_seed() -> None:
    first = assign_adapters("zipf:1.5", 32, 9, seed=3)
    assert sorted(Counter(first).values(), reverse=True) == [11, 7, 5, 3, 2, 2, 1, 1]
    assert first == assign_adapters("zipf:1.5", 32, 9, seed=3)
    assert first != assign_adapters("zipf:1.5", 32, 9, seed=4)
    assert first != sorted(first)


def test_popularity_follows_zipfs_law() -> None:
    drawn = Counter(itertools.islice(zipf_adapters(50, seed=3), 50_000))
    whole = sum(1 / rank for rank in range(1, 51))
    for rank in (1, 2, 5, 20):
        assert drawn[rank - 1] == pytest.approx(50_000 / rank / whole, rel=0.1)
    assert max(drawn) == 49
    again = itertools.islice(zipf_adapters(50, seed=3), 100)
    assert list(again) == list(itertools.islice(zipf_adapters(50, seed=3), 100))


def test_open_loop_arrivals_rise_at_the_rate() -> None:
    arrivals = poisson_arrivals(50_000, rate=10, seed=0)
    assert all(later >= earlier for earlier, later in pairwise(arrivals))
    assert len(arrivals) / arrivals[-1] == pytest.approx(10, rel=0.03)
    gaps = np.diff(arrivals)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.03), "as of a Poisson process"
