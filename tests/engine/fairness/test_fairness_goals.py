"""The goals of fairness under load, in virtual time, and what they are measured with.

`scripts/fairness_goals.py` prints all of them as a table.
"""

from __future__ import annotations

import pytest

from fairness.engine import EngineSettings, VirtualEngine
from fairness.goals import GOALS, Goal
from fairness.service import UNIT_PRICES, ServiceLog, jain_index, max_min_shares
from fairness.workloads import many_adapters
from manylora.adapters.residency.entry import SlotLease
from manylora.engine.scheduling.plan import Chunk, StepPlan


@pytest.mark.slow
@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.name)
def test_goal_is_reached(goal: Goal) -> None:
    value = goal.measure("fair")
    assert goal.holds(value), f"{goal.name}: {value:.4g}, wanted {goal.bound}"


@pytest.mark.slow
def test_first_come_first_served_misses_what_fairness_reaches() -> None:
    """Otherwise the goals would say nothing of the order."""
    by_name = {goal.name: goal for goal in GOALS}
    for name in (
        "A-1 shares, 3:1",
        "A-3 TTFT p95 of the smallest five, s",
        "A-3 Jain's index of ten tenants",
    ):
        assert not by_name[name].holds(by_name[name].measure("fcfs")), name


def test_service_is_counted_once_and_by_the_prices() -> None:
    log = ServiceLog(UNIT_PRICES, {"d": 32})
    adapter = SlotLease(slot=0, generation=0, digest="d")
    owners = {"x": ("a", 4), "y": ("b", 600)}

    def note(ended_s: float, *chunks: tuple[str, int, int]) -> None:
        made = [
            Chunk(
                request_id=name,
                token_ids=[1] * count,
                start=start,
                block_table=[[]],
                adapter=adapter,
            )
            for name, start, count in chunks
        ]
        log.note(StepPlan(step=1, chunks=made), ended_s, owners)

    note(1.0, ("x", 0, 4))
    assert log.served("a", 0, 1) == pytest.approx(4 + 2), (
        "four prompt tokens, and an adapter of rank 32 alone"
    )
    note(2.0, ("x", 4, 1), ("y", 0, 600))
    assert log.served("a", 1, 2) == pytest.approx(2 + 5 / 600 + 1), (
        "an output token, and half of the adapter"
    )
    note(3.0, ("x", 0, 5), ("y", 600, 1))
    assert log.served("a", 2, 3) == pytest.approx(1), (
        "what is computed again is free, its adapter is not"
    )
    assert log.served("b", 2, 3) == pytest.approx(2 + 601 / 600 + 1)
    ahead = 6.0, 6 + 3 + 5 / 600 - 601
    assert log.max_gap("a", "b", {"a": 1.0, "b": 1.0}, 1, 2) == pytest.approx(ahead[0] - ahead[1])
    assert log.least_share("a", 1, 0.5, 2) == pytest.approx((3 + 5 / 600) / (604 + 5 / 600))


def test_max_min_shares_give_no_more_than_is_asked_for_and_the_rest_by_weight() -> None:
    weights = {"a": 1.0, "b": 3.0, "c": 1.0}
    assert max_min_shares({"a": 10, "b": 500, "c": 500}, 90, weights) == {"a": 10, "b": 60, "c": 20}
    assert max_min_shares({"a": 1, "b": 2, "c": 3}, 6, weights) == {"a": 1, "b": 2, "c": 3}


def test_jain_index_is_one_for_equals_and_one_over_n_for_a_monopoly() -> None:
    assert jain_index([2.0, 2.0, 2.0]) == pytest.approx(1)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_a_run_is_played_the_same_way_each_time() -> None:
    def times() -> list[list[float]]:
        settings = EngineSettings(ranks=(16,) * 50, fetch_s=0.05, num_pages=1_200)
        engine = VirtualEngine(settings).play(many_adapters(40, num_adapters=50, seed=3), until_s=1)
        return [record.token_times_s for record in engine.records.all]

    assert times() == times()
