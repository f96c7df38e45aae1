"""Static and windowed batching: whom they admit, and a small run beside continuous batching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manylora.benchmarks.pool.batching import MODES, Batches


@pytest.mark.parametrize(
    ("due", "in_flight", "waited_s", "is_last", "static", "windowed"),
    [
        (0, 0, -1.0, False, 0, 0),
        (3, 0, 0.05, False, 0, 0),
        (3, 0, 0.10, False, 0, 3),
        (4, 0, 0.00, False, 4, 4),
        (9, 0, 0.00, False, 4, 4),
        (9, 1, 9.00, True, 0, 0),
        (2, 0, 0.00, True, 2, 2),
    ],
)
def test_batches_start_when_they_are_full_and_none_runs(
    due: int, in_flight: int, waited_s: float, is_last: bool, static: int, windowed: int
) -> None:
    for window_s, admitted in ((None, static), (0.1, windowed)):
        batches = Batches(4, window_s)
        assert batches.admit(due, in_flight, waited_s, is_last) == admitted
        assert batches.sizes == [admitted][: admitted > 0]


def test_three_generations_answer_the_same_requests(
    tmp_path: Path, measure: Callable[..., dict[str, Any]]
) -> None:
    small = "--requests 12 --repeats 1 --files 8 --max-running 4 --loads 0.5 --lengths 4 16 --window-ms 20"
    result = measure("batching", small, "--cache", str(tmp_path))
    assert tuple(result["modes"]) == MODES
    for found in result["modes"].values():
        assert found["0.5"]["requests/s"]["median"] == pytest.approx(
            result["saturated_requests_per_s"] / 2, rel=1e-3
        )
        assert (
            0 < found["0.5"]["mean latency, ms"]["median"] <= found["0.5"]["p95 latency, ms"]["max"]
        )
