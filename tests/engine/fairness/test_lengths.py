from __future__ import annotations

import random

import pytest

from manylora.engine.fairness import service
from manylora.engine.fairness.service import HALF_LIFE, MIN_OBSERVATIONS, UNSEEN_TOKENS, Lengths

CAP = 100_000


def taught(values: list[int], tenant: str = "acme", adapter: str | None = "sha256:a") -> Lengths:
    known = Lengths()
    for value in values:
        known.observe(tenant, adapter, value)
    return known


def test_nothing_seen_is_a_fixed_median_up_to_the_cap() -> None:
    known = Lengths()
    assert known.p50("acme", None, CAP) == UNSEEN_TOKENS
    assert known.p50("acme", None, 16) == 16


@pytest.mark.parametrize("tokens", [1, 2, 3, 10, 100, 1000, 30_000])
def test_a_constant_length_is_predicted_within_a_bin(tokens: int) -> None:
    known = taught([tokens] * 50)
    assert tokens / 2**0.5 <= known.p50("acme", "sha256:a", CAP) <= tokens * 2**0.5 + 1


def test_the_median_of_lognormal_lengths_is_within_a_fifth() -> None:
    draw = random.Random(5)
    values = sorted(max(1, round(draw.lognormvariate(5, 0.8))) for _ in range(700))
    known = Lengths()
    for value in draw.sample(values, len(values)):
        known.observe("acme", "sha256:a", value)
    assert known.p50("acme", "sha256:a", CAP) == pytest.approx(values[350], rel=0.2)


def test_no_prediction_is_above_the_cap_or_below_one() -> None:
    known = taught([1000] * 20)
    assert known.p50("acme", "sha256:a", 7) == 7
    assert known.p50("acme", "sha256:a", 0) == 1
    assert taught([0, -3] * 10).p50("acme", "sha256:a", CAP) == 1


def test_lengths_beyond_the_last_bin_count_in_it() -> None:
    assert taught([10**7] * 20).p50("acme", "sha256:a", 10**8) >= 2**15


def test_adapters_of_one_tenant_have_lengths_of_their_own() -> None:
    known = taught([10] * 20)
    for _ in range(20):
        known.observe("acme", None, 2000)
    assert known.p50("acme", "sha256:a", CAP) < 20
    assert known.p50("acme", None, CAP) > 1000


def test_an_adapter_seen_too_seldom_is_predicted_from_its_tenant_then_from_all() -> None:
    known = taught([10] * 30)
    for _ in range(30):
        known.observe("globex", None, 4000)
    for _ in range(MIN_OBSERVATIONS - 1):
        known.observe("acme", "sha256:new", 4000)
    assert known.p50("acme", "sha256:new", CAP) < 20
    known.observe("acme", "sha256:new", 4000)
    assert known.p50("acme", "sha256:new", CAP) > 2000
    assert known.p50("initech", None, CAP) > 2000  # unknown: from everybody


def test_an_observation_counts_half_after_the_half_life() -> None:
    known = taught([10] * HALF_LIFE * 8 + [1000] * (HALF_LIFE - 25))
    assert known.p50("acme", "sha256:a", CAP) < 20
    for _ in range(50):
        known.observe("acme", "sha256:a", 1000)
    assert known.p50("acme", "sha256:a", CAP) > 500


def test_a_very_long_run_keeps_its_precision() -> None:
    known = taught([100] * (64 * HALF_LIFE + 10))  # the weights are scaled back once
    assert 71 <= known.p50("acme", "sha256:a", CAP) <= 142


def test_memory_is_bounded_and_the_least_recently_updated_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "MAX_HISTOGRAMS", 6)
    known = taught([10] * 20, tenant="busy")
    for number in range(40):
        for _ in range(MIN_OBSERVATIONS):
            known.observe(f"tenant-{number}", None, 5000)
        known.observe("busy", "sha256:a", 10)
        assert len(known.histograms) <= 6
    assert known.p50("busy", "sha256:a", CAP) < 20
    assert known.p50("tenant-39", None, CAP) > 2000
