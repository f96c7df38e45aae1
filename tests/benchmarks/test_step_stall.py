"""What the stall benchmark does and makes of its timings; that steps do not stall is for the benchmark to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from manylora.benchmarks.engine.step_stall import make_result


def test_ratios_compare_percentiles_with_the_quiet_phase() -> None:
    steps = {"quiet": [0.01] * 9 + [0.02], "swaps": [0.01] * 5 + [0.03] * 5}
    result = make_result(steps, {"idle": [0.07], "stored": []})
    assert result["ratios"] == pytest.approx(
        {"swaps / quiet, p50": 2.0, "swaps / quiet, p99": 0.03 / 0.0191}
    )
    assert result["step_ms"]["swaps"]["count"] == 10
    assert result["step_ms"]["swaps"]["max"] == pytest.approx(30)
    assert result["load_ms"]["idle"]["p50"] == pytest.approx(70)
    assert [row["ms"] for row in result["table"]] == [
        "step, quiet",
        "step, swaps",
        "load, idle",
        "load, stored",
    ]


def test_adapters_come_and_go_beside_a_steady_batch(measure: Callable[..., dict[str, Any]]) -> None:
    result = measure("stall", "--shape demo --requests 4 --adapters 2 --rounds 2 --phase-steps 30")
    assert {phase: found["count"] for phase, found in result["step_ms"].items()} == {
        "quiet": 60,
        "swaps": 60,
    }
    assert result["load_ms"]["idle"]["count"] == 4
    assert result["load_ms"]["stored"]["count"] > 2
    assert result["load_ms"]["stored"]["p50"] > 0
