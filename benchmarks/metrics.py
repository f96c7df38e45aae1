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
class Reply:
    """The answer to one request, with its times; times in seconds on one clock."""

    model: str
    due_s: float
    """When the request should start; in a closed loop, when it was sent."""
    token_times_s: list[float] = field(default_factory=list)
    """When each piece of output arrived."""
    done_s: float = math.nan
    prompt_tokens: int = 0
    """As the server reports it; 0 before it does, as the next one."""
    completion_tokens: int = 0
    finish_reason: str | None = None
    is_whole: bool = False
    """True if the answer came to its end."""
    error: str | None = None
    attempt: int = 1
    """Number of this sending of the request; one that was refused may be sent again."""
    sent_s: float = math.nan
    head_s: float = math.nan
    """When status and headers were there."""
    status: int = 0
    """0 when no answer came."""
    headers: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def is_refused(self) -> bool:
        """True if the server refused the request with 429 or 503, so that it may be sent again later."""
        return self.status in (429, 503)

    @property
    def is_answered(self) -> bool:
        """True if tokens came and nothing failed."""
        return self.error is None and self.completion_tokens > 0

    @property
    def retry_after_s(self) -> float | None:
        """Retry-After in seconds; None without one."""
        value = self.headers.get(b"retry-after", b"")
        return float(value) if value.isdigit() else None

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


def tokens_per_s(replies: Sequence[Reply], start_s: float, end_s: float) -> float:
    """Tokens that came within a span, per second of it."""
    tokens = sum(start_s <= time_s < end_s for reply in replies for time_s in reply.token_times_s)
    return tokens / (end_s - start_s)


def summarise(replies: Sequence[Reply]) -> dict[str, Any]:
    """Figures of finished and failed requests, in any order.

    Rates are over the time from the first due request to the end of the last.
    """
    good = [reply for reply in replies if reply.error is None]
    ends = [reply.done_s for reply in replies if not math.isnan(reply.done_s)]
    duration = max(ends) - min(reply.due_s for reply in replies) if ends else math.nan
    completion = sum(reply.completion_tokens for reply in good)
    prompt = sum(reply.prompt_tokens for reply in good)
    return {
        "requests": len(replies),
        "errors": len(replies) - len(good),
        "duration_s": duration,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "requests_per_s": len(good) / duration,
        "output_tokens_per_s": completion / duration,
        "total_tokens_per_s": (prompt + completion) / duration,
        "ttft_ms": distribution([reply.ttft_s for reply in good], 1e3),
        "tpot_ms": distribution([reply.tpot_s for reply in good], 1e3),
        "itl_ms": distribution([gap for reply in good for gap in reply.gaps_s], 1e3),
        "latency_ms": distribution([reply.latency_s for reply in good], 1e3),
    }
