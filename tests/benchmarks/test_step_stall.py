"""What the stall benchmark does and makes of its timings; that steps do not stall is for the benchmark to say."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from weft.benchmarks import step_stall
from weft.benchmarks.main import make_parser
from weft.benchmarks.step_stall import PHASES, Timings, make_result, percentile


def options(*arguments: str) -> argparse.Namespace:
    return make_parser("stall").parse_args(arguments)


def test_a_percentile_is_one_of_the_values() -> None:
    times = [float(value) for value in range(1, 201)]
    assert [percentile(times, percent) for percent in (50, 99, 100)] == [100.0, 198.0, 200.0]
    assert percentile([3.0], 99) == 3.0


def test_ratios_compare_percentiles_with_the_quiet_phase() -> None:
    timings = Timings({"quiet": [0.01] * 9 + [0.02], "swaps": [0.01] * 9 + [0.03], "joins": [0.02] * 10}, {}, joined=4)
    result = make_result(options("--shape", "demo"), timings)
    assert result["ratios"] == pytest.approx(
        {"swaps / quiet, p50": 1.0, "swaps / quiet, p99": 1.5, "joins / quiet, p50": 2.0, "joins / quiet, p99": 1.0}
    )
    assert result["step_ms"]["swaps"] == pytest.approx({"count": 10, "p50": 10, "p90": 10, "p99": 30, "max": 30})
    assert [row["ms"] for row in result["table"]] == ["step, quiet", "step, swaps", "step, joins"]


def test_adapters_come_and_go_beside_a_steady_batch(tmp_path: Path) -> None:
    shape = step_stall._shape(options("--shape", "demo"))
    bench = step_stall.StallBench(shape, requests=4, adapters=2, threads=0, folder=tmp_path)
    try:
        timings = bench.run(rounds=2, phase_steps=30)
        status = bench._core.status()
    finally:
        bench.close()
    assert {phase: len(times) for phase, times in timings.step_s.items()} == dict.fromkeys(PHASES, 60)
    assert len(timings.load_s["idle"]) == 4
    assert timings.load_s["stored"]
    assert timings.joined > 0
    assert (status.running, status.waiting) == (0, 0)
    assert sum(count for kind, count in status.loads.items() if kind.startswith("stored")) > timings.joined
    assert not [kind for kind in status.loads if not kind.endswith(":ok")]
