"""The fairness benchmark: what it makes of its measurements, and a small run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from manylora.benchmarks.http import fairness
from manylora.benchmarks.http.fairness import Arm, make_result
from manylora.benchmarks.metrics import Reply


def arm(
    ttft_ms: list[float], *rates: list[float], step_ms: float = 10.0, without: float = 0.0
) -> Arm:
    """An arm with these quiet times; its flood has these rates in each repeat beside quiet requests."""
    replies = [Reply("m", 0.0, token_times_s=[each / 1e3], done_s=1.0) for each in ttft_ms]
    spans = [{"with": each, "without": [without or sum(each)]} for each in rates]
    return Arm([], None, replies, [0.0005, 0.0015], [step_ms / 1e3], spans)


def goals_of(arms: dict[str, Arm]) -> dict[str, tuple[Any, bool]]:
    goals = make_result(arms)["goals"]
    return {goal["goal"]: (pytest.approx(goal["limit"]), goal["ok"]) for goal in goals}


def test_a_quiet_tenant_may_wait_three_times_as_long_as_alone_or_five_steps() -> None:
    alone = arm([10.0] * 20)
    slow, quick = (
        goals_of({"alone": alone, "one": arm([40.0] * 20, [900.0], step_ms=step)})
        for step in (10.0, 1.0)
    )
    assert slow["one: quiet TTFT p95, ms"] == (50.0, True)
    assert quick["one: quiet TTFT p95, ms"] == (30.0, False)
    same = goals_of({"alone": alone, "same": arm([90.0] * 20, [900.0], step_ms=1.0)})
    assert same["same: quiet TTFT p95, ms"] == (100.0, True)


def test_repeats_are_put_together_and_the_flood_is_weighed_against_itself() -> None:
    both = arm([30.0] * 10 + [50.0] * 10, [900.0], [980.0], without=1000.0)
    found = make_result({"alone": arm([10.0] * 10 + [20.0] * 10), "all": both})
    figures = found["arms"]["all"]
    assert figures["ttft_ms"] == pytest.approx({"p50": 40.0, "p95": 50.0, "max": 50.0})
    assert figures["tokens_per_s"] == 940
    assert figures["kept"]["median"] == pytest.approx(0.94)
    assert figures["client_delay_ms"]["mean"] == pytest.approx(1.0)
    assert [row["p95 / alone"] for row in found["table"]] == pytest.approx([1.0, 2.5])
    kept = next(goal for goal in found["goals"] if "keeps" in goal["goal"])
    assert not kept["ok"]


@pytest.mark.parametrize(
    ("heavy", "ok"), [(3000.0, True), (3140.0, True), (2840.0, False), (3160.0, False)]
)
def test_weights_hold_within_five_percent(heavy: float, ok: bool) -> None:
    found = goals_of({"alone": arm([10.0]), "weights": arm([], [heavy, 1000.0])})
    assert found["weights 3:1: error of the ratio of tokens/s"] == (0.05, ok)


@pytest.mark.slow
def test_a_small_run_tells_of_every_arm(
    measure: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairness, "TURNS", 2)
    small = "--seconds 0.2 --repeats 1 --streams 4 --many 2 --flood-tokens 30 --quiet-tokens 2 --pause-ms 10"
    result = measure(
        "fairness",
        f"{small} --set=memory.gib=0.05 --set=memory.host_gib=0.05 --set=model.threads=1",
    )
    assert set(result["arms"]) == {"alone", "one", "all", "hundred", "same", "weights"}
    for name, found in result["arms"].items():
        assert (found["requests"] > 0) == (name != "weights")
        assert (found["tokens_per_s"] > 0) == (name != "alone")
        assert found["refused"] == 0
