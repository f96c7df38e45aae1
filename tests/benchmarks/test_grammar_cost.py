"""What the benchmark of grammars times; whether its goals are reached is for its result to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_a_small_run_times_held_steps_a_flood_and_refusals(
    measure: Callable[..., dict[str, Any]],
) -> None:
    result = measure("grammar", "--shape demo --requests 4 --rounds 1 --steps 3 --seconds 0.8")
    assert 0 < result["step_ms"]["held"]["p50"] <= result["step_ms"]["held"]["max"]
    for phase in ("quiet", "flooded"):
        first_ms = result["first_token_ms"][phase]
        assert 0 < first_ms["p50"] <= first_ms["p99 of a turn"] <= first_ms["max"]
    assert len(result["refused_cpu_ms"]) == 5
    assert all(found > 0 for found in result["refused_cpu_ms"].values()), (
        "NaN: the schema was not refused"
    )
    assert len(result["goals"]) == 4
