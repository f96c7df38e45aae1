"""The figures of a run, computed by hand."""

from __future__ import annotations

import math

import pytest

from manylora.benchmarks.metrics import Reply, distribution, percentile, summarise
from manylora.benchmarks.report import ratios, without_nan


def record(due: float, tokens: list[float], error: str | None = None) -> Reply:
    return Reply(
        model="base",
        due_s=due,
        token_times_s=tokens,
        done_s=(tokens or [due])[-1],
        prompt_tokens=10,
        completion_tokens=len(tokens),
        error=error,
    )


def test_percentiles_lie_between_the_closest_ranks() -> None:
    found = [percentile([5.0, 1.0, 4.0, -2.0], percent) for percent in (0, 50, 90, 100)]
    assert found == pytest.approx([-2.0, 2.5, 4.7, 5.0])


def test_nothing_has_no_percentile() -> None:
    assert math.isnan(percentile([], 50))
    assert all(math.isnan(value) for value in distribution([math.nan]).values())
    assert ratios([1.0, math.nan, 3.0], [0.0, 1.0, 2.0])["repeats"] == pytest.approx(
        [math.nan, math.nan, 1.5], nan_ok=True
    )


def test_one_request_has_the_times_read_off_its_tokens() -> None:
    one = record(1.0, [1.5, 1.75, 2.5])
    assert (one.ttft_s, one.tpot_s, one.gaps_s, one.latency_s) == (0.5, 0.5, [0.25, 0.75], 1.5)
    merged = record(0.0, [1.0, 3.0])
    merged.completion_tokens = 5
    assert merged.tpot_s == 0.5, "tokens count even if they came in one piece"
    assert math.isnan(record(0.0, [1.0]).tpot_s)


def test_a_summary_has_rates_over_the_whole_run_and_counts_failures() -> None:
    records = [
        record(0.0, [1.0, 2.0, 3.0]),
        record(1.0, [2.0, 5.0]),
        record(2.0, [], error="HTTP 503"),
    ]
    summary = summarise(records)
    rates = [summary[f"{name}_per_s"] for name in ("output_tokens", "total_tokens", "requests")]
    assert rates == pytest.approx([1.0, 5.0, 2 / 5])
    assert (summary["requests"], summary["errors"], summary["completion_tokens"]) == (3, 1, 5)
    assert summary["duration_s"] == 5.0
    assert summary["ttft_ms"]["mean"] == 1000.0
    assert summary["itl_ms"]["max"] == 3000.0
    assert summary["latency_ms"]["p50"] == 3500.0


def test_json_results_hold_no_nan() -> None:
    assert without_nan({"a": [float("nan"), float("inf"), 1 / 3], "b": "x"}) == {
        "a": [None, None, 0.333333],
        "b": "x",
    }
