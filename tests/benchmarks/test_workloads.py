"""Workloads follow their formulas."""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from manylora.benchmarks.workloads import draw_adapters, poisson_arrivals
from manylora.errors import ConfigError


def drawn(pattern: str, num_adapters: int, count: int, seed: int = 3) -> list[int]:
    return list(itertools.islice(draw_adapters(pattern, num_adapters, seed), count))


def test_uniform_popularity_asks_for_each_adapter_equally_often_in_a_shuffled_order() -> None:
    found = drawn("uniform", 9, 32)
    assert sorted(Counter(found).values()) == [3, 3, 3, 3, 4, 4, 4, 4, 4]
    assert found == drawn("uniform", 9, 32)
    assert found != drawn("uniform", 9, 32, seed=4)
    assert found[:9] != sorted(found[:9])


def test_an_unknown_pattern_is_refused() -> None:
    for pattern in ("zipf", "zipf:", "zipf:x", "zipf:inf", "zipf:nan", "zipf:-1", "pareto", ""):
        with pytest.raises(ConfigError, match="popularity must be uniform, or zipf"):
            draw_adapters(pattern, 8, 0)


@pytest.mark.parametrize("exponent", [1, 1.5])
def test_popularity_follows_zipfs_law(exponent: float) -> None:
    counts = Counter(drawn(f"zipf:{exponent}", 50, 50_000))
    whole = sum(rank**-exponent for rank in range(1, 51))
    for rank in (1, 2, 5, 20):
        assert counts[rank - 1] == pytest.approx(50_000 / rank**exponent / whole, rel=0.1)
    assert max(counts) == 49
    assert drawn("zipf:1", 50, 100) == drawn("zipf:1", 50, 100)


def test_open_loop_arrivals_rise_at_the_rate() -> None:
    arrivals = poisson_arrivals(50_000, rate=10, seed=0)
    assert all(later >= earlier for earlier, later in pairwise(arrivals))
    assert len(arrivals) / arrivals[-1] == pytest.approx(10, rel=0.03)
    gaps = np.diff(arrivals)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.03), "as of a Poisson process"
