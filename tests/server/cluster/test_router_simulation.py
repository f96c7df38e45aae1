"""What routers reach with up to 64 replicas, 2,000 adapters, and several gateways with old views, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router_simulation import Case, Outcome, RouterSimulation

pytestmark = pytest.mark.no_cover

STALE = Case(num_replicas=64, num_gateways=4, view_s=5.0)


def simulate(case: Case) -> Outcome:
    return RouterSimulation(case).run()


def holds_the_goals(outcome: Outcome) -> bool:
    return outcome.cold <= 0.15 and outcome.imbalance <= 1.4 and outcome.copies <= 1.7


def test_adapters_stay_where_they_are_and_the_load_is_even_though_views_are_old() -> None:
    routed = simulate(STALE)
    assert holds_the_goals(routed), routed
    by_load = simulate(replace(STALE, is_power_of_two=True, warm_s=10.0, seconds=15.0))
    assert by_load.cold > 4 * max(routed.cold, 0.1), by_load
    assert by_load.copies > 4 * routed.copies, by_load
    assert by_load.throughput == pytest.approx(routed.throughput, abs=0.02)


def test_one_adapter_with_a_quarter_of_the_work_is_spread() -> None:
    outcome = simulate(replace(STALE, zipf=1.3))
    assert holds_the_goals(outcome), outcome


def test_an_adapter_that_is_new_and_hot_at_once_overloads_nobody_for_long() -> None:
    outcome = simulate(replace(STALE, view_s=0.25, new_share=0.2, warm_s=20.0))
    assert holds_the_goals(outcome), outcome
    assert outcome.p99_wait_s < 1.0, "two if they stayed on its first copies and the two after them"


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 16, 64])
def test_throughput_grows_with_the_replicas(num_replicas: int) -> None:
    case = Case(
        num_replicas=num_replicas,
        num_gateways=4,
        view_s=0.25,
        utilisation=1.5,
        warm_s=10,
        seconds=15,
    )
    assert simulate(case).throughput >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "zipf", "view_s"), [(2, 0.9, 0.0), (3, 0.9, 5.0), (4, 1.3, 0.0), (5, 1.3, 5.0)]
)
def test_the_goals_hold_for_other_adapters(seed: int, zipf: float, view_s: float) -> None:
    outcome = simulate(replace(STALE, seed=seed, zipf=zipf, view_s=view_s))
    assert holds_the_goals(outcome), outcome


@pytest.mark.slow
def test_slow_replicas_get_less_to_do() -> None:
    outcome = simulate(replace(STALE, view_s=1.0, num_slow=4))
    assert holds_the_goals(outcome), outcome
    assert outcome.p99_wait_s < 1.0, "and nobody waits for them"


@pytest.mark.slow
def test_reports_that_come_every_five_seconds_are_enough() -> None:
    outcome = simulate(replace(STALE, view_s=0.0, period_s=5.0))
    assert holds_the_goals(outcome), outcome
