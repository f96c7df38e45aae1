"""The workloads equal the formulas of the papers they come from."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from weft.benchmarks.workloads import (
    adapter_counts,
    assign_adapters,
    gamma_arrivals,
    slora_trace,
)
from weft.errors import ConfigError


@pytest.mark.parametrize(
    ("pattern", "num_requests", "counts"),
    [
        ("identical", 32, [32]),
        ("distinct", 4, [1, 1, 1, 1]),
        ("uniform", 32, [6, 6, 5, 5, 5, 5]),
        ("uniform", 64, [8] * 8),
        ("zipf:1.5", 32, [11, 7, 5, 3, 2, 2, 1, 1]),
        ("zipf:1.5", 64, [17, 17, 11, 7, 5, 3, 2, 1, 1]),
        ("one-against-many", 8, [1, 7]),
    ],
)
def test_punica_patterns_have_the_papers_counts(pattern: str, num_requests: int, counts: list[int]) -> None:
    assert adapter_counts(pattern, num_requests) == counts


def test_a_zipf_batch_of_128_has_eleven_adapters() -> None:
    assert len(adapter_counts("zipf:1.5", 128)) == 11


@pytest.mark.parametrize("pattern", ["identical", "distinct", "uniform", "zipf:1.5", "zipf:2", "one-against-many"])
@pytest.mark.parametrize("num_adapters", [None, 2, 5])
def test_counts_always_sum_to_the_requests(pattern: str, num_adapters: int | None) -> None:
    for num_requests in range(2, 70):
        counts = adapter_counts(pattern, num_requests, num_adapters)
        assert sum(counts) == num_requests
        assert min(counts) >= 1
        assert num_adapters is None or len(counts) <= num_adapters


def test_patterns_spread_over_the_adapters_there_are() -> None:
    assert adapter_counts("uniform", 10, 5) == [2, 2, 2, 2, 2]
    assert adapter_counts("distinct", 10, 4) == [3, 3, 2, 2]
    assert adapter_counts("zipf:1.5", 32, 3) == [11, 7, 14]


@pytest.mark.parametrize("pattern", ["zipf", "zipf:1", "zipf:x", "pareto", ""])
def test_an_unknown_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="popularity must be one of"):
        adapter_counts(pattern, 8)


def test_one_against_many_needs_two_adapters() -> None:
    with pytest.raises(ConfigError, match="two"):
        adapter_counts("one-against-many", 8, 1)


def test_assignment_shuffles_exactly_the_counts_and_repeats_with_the_seed() -> None:
    first = assign_adapters("zipf:1.5", 32, seed=3)
    assert sorted(Counter(first).values(), reverse=True) == [11, 7, 5, 3, 2, 2, 1, 1]
    assert first == assign_adapters("zipf:1.5", 32, seed=3)
    assert first != assign_adapters("zipf:1.5", 32, seed=4)
    assert first != sorted(first)


def test_slora_adapters_follow_their_probability() -> None:
    n, alpha = 20, 0.3
    trace = slora_trace(num_adapters=n, alpha=alpha, rate=1000, duration_s=200)
    share = np.bincount([request.adapter for request in trace], minlength=n) / len(trace)
    edges = [(i / n) ** alpha for i in range(n + 1)]
    np.testing.assert_allclose(share, np.diff(edges), atol=0.004)


def test_slora_gaps_have_the_rate_asked_for_and_vary_as_a_poisson_process() -> None:
    trace = slora_trace(num_adapters=4, alpha=1, rate=2, duration_s=100_000)
    gaps = np.diff([request.arrival_s for request in trace])
    assert gaps.mean() == pytest.approx(0.5, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.05)


def test_slora_lengths_stay_in_their_half_open_ranges() -> None:
    trace = slora_trace(num_adapters=4, rate=100, duration_s=100, input_range=(8, 12), output_range=(3, 5))
    assert {request.prompt_tokens for request in trace} == {8, 9, 10, 11}
    assert {request.output_tokens for request in trace} == {3, 4}


def test_open_loop_arrivals_rise_at_the_rate() -> None:
    arrivals = gamma_arrivals(50_000, rate=10, cv=1, seed=0)
    assert all(later >= earlier for earlier, later in pairwise(arrivals))
    assert len(arrivals) / arrivals[-1] == pytest.approx(10, rel=0.03)
    assert gamma_arrivals(3, rate=2, cv=0, seed=0) == [0.5, 1.0, 1.5]
