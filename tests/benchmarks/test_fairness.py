"""The fairness benchmark: what it makes of its measurements, and a small run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from manylora.benchmarks.http import fairness
from manylora.benchmarks.http.fairness import make_result


def run(
    ttft_ms: list[float], *rates: float, step_ms: float = 10.0, kept: float = 1.0
) -> dict[str, Any]:
    return {
        "ttft_ms": ttft_ms,
        "refused": 0,
        "client_delay_ms": [0.5, 1.5],
        "flood_client_delay_ms": [0.5] if rates else [],
        "flood_refused": 0,
        "flood_step_ms": step_ms,
        "rates": list(rates),
        "kept": kept if rates else None,
    }


def goals_of(runs: dict[str, list[dict[str, Any]]]) -> dict[str, tuple[float, bool]]:
    return {goal["goal"]: (goal["limit"], goal["ok"]) for goal in make_result(runs)["goals"]}


def test_a_quiet_tenant_may_wait_three_times_as_long_as_alone_or_five_steps() -> None:
    alone = [run([10.0] * 20)]
    slow, quick = (
        goals_of({"alone": alone, "one": [run([40.0] * 20, 900, step_ms=step)]})
        for step in (10.0, 1.0)
    )
    assert slow["one: quiet TTFT p95, ms"] == (50.0, True)
    assert quick["one: quiet TTFT p95, ms"] == (30.0, False)
    same = goals_of({"alone": alone, "same": [run([90.0] * 20, 900, step_ms=1.0)]})
    assert same["same: quiet TTFT p95, ms"] == (100.0, True)


def test_repeats_are_put_together_and_the_flood_is_weighed_against_itself() -> None:
    found = make_result(
        {
            "alone": [run([10.0] * 10), run([20.0] * 10)],
            "all": [run([30.0] * 10, 800, kept=0.9), run([50.0] * 10, 1000, kept=0.98)],
        }
    )
    arm = found["arms"]["all"]
    assert arm["ttft_ms"] == {"p50": 40.0, "p95": 50.0, "max": 50.0}
    assert arm["ttft_p95_ms_by_repeat"] == [30.0, 50.0]
    assert arm["tokens_per_s"] == 900
    assert arm["kept"]["median"] == pytest.approx(0.94)
    assert [row["p95 / alone"] for row in found["table"]] == [1.0, 2.5]
    kept = next(goal for goal in found["goals"] if "keeps" in goal["goal"])
    assert not kept["ok"]


@pytest.mark.parametrize(
    ("heavy", "ok"), [(3000.0, True), (3140.0, True), (2840.0, False), (3160.0, False)]
)
def test_weights_hold_within_five_percent(heavy: float, ok: bool) -> None:
    found = goals_of({"alone": [run([10.0])], "weights": [run([], heavy, 1000.0)]})
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
    for name, arm in result["arms"].items():
        assert (arm["requests"] > 0) == (name != "weights")
        assert (arm["tokens_per_s"] > 0) == (name != "alone")
        assert arm["refused"] == arm["flood_refused"] == 0
