"""Computes the figures of a run from the times of its requests. No I/O, no clock.

In an open loop all times count from when a request was due: a client that falls behind must not hide a slow server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class RequestRecord:
    """The times and tokens of one request; times in seconds on one clock."""

    model: str
    due_s: float
    """When it should start; in a closed loop, when it was sent."""
    token_times_s: list[float] = field(default_factory=list)
    """When each piece of output arrived."""
    done_s: float = math.nan
    prompt_tokens: int = 0
    """As the server reports it."""
    completion_tokens: int = 0
    """As the server reports it."""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.token_times_s[0] - self.due_s if self.token_times_s else math.nan

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; NaN with fewer than two tokens."""
        if self.completion_tokens < 2 or not self.token_times_s:
            return math.nan
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.completion_tokens - 1)

    @property
    def latency_s(self) -> float:
        """Seconds to the end of the answer."""
        return self.done_s - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive pieces of output."""
        return [
            later - earlier
            for earlier, later in zip(self.token_times_s, self.token_times_s[1:], strict=False)
        ]


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation between closest ranks; NaN of nothing."""
    return float(np.percentile(values, percent)) if values else math.nan


def distribution(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Mean, percentiles and maximum of the values that are numbers, times `scale`; NaN where there are none."""
    numbers = [value * scale for value in values if not math.isnan(value)]
    return {
        "mean": sum(numbers) / len(numbers) if numbers else math.nan,
        **{f"p{p}": percentile(numbers, p) for p in PERCENTILES},
        "max": max(numbers, default=math.nan),
    }


def summarise(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Figures of a run of finished and failed requests, in any order.

    Rates are over the time from the first due request to the end of the last.
    """
    good = [record for record in records if record.error is None]
    ends = [record.done_s for record in records if not math.isnan(record.done_s)]
    duration = max(ends) - min(record.due_s for record in records) if ends else math.nan
    completion = sum(record.completion_tokens for record in good)
    prompt = sum(record.prompt_tokens for record in good)
    return {
        "requests": len(records),
        "errors": len(records) - len(good),
        "duration_s": duration,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "requests_per_s": len(good) / duration,
        "output_tokens_per_s": completion / duration,
        "total_tokens_per_s": (prompt + completion) / duration,
        "ttft_ms": distribution([record.ttft_s for record in good], 1e3),
        "tpot_ms": distribution([record.tpot_s for record in good], 1e3),
        "itl_ms": distribution([gap for record in good for gap in record.gaps_s], 1e3),
        "latency_ms": distribution([record.latency_s for record in good], 1e3),
    }
