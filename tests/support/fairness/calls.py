"""What clients send and what they see of it. Times are seconds of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request of a client."""

    at_s: float
    tenant: str
    num_prompt: int
    num_output: int
    """It generates exactly so many tokens."""
    adapter: int | None = None
    """Index of the adapter; None is the base model."""
    weight: float = 1.0
    lane: int = 0
    follow: Callable[[float], Call] | None = None
    """What the client sends when this one has ended, by the second at which it did."""


@dataclass(eq=False)
class Record:
    """What came of a call."""

    call: Call
    request_id: str
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def gaps_s(self) -> list[float]:
        """Between two tokens."""
        return [
            after - before
            for before, after in zip(self.token_times_s, self.token_times_s[1:], strict=False)
        ]


@dataclass(frozen=True)
class Records:
    """Records of one run, or some of them."""

    all: Sequence[Record]

    def of(self, *tenants: str) -> Records:
        """Those of some tenants."""
        return Records([record for record in self.all if record.call.tenant in tenants])

    def between(self, start_s: float, end_s: float) -> Records:
        """Those that were asked in a span of time."""
        return Records([record for record in self.all if start_s <= record.call.at_s < end_s])

    def ttft_s(self, share: float, now_s: float) -> float:
        """A percentile of the times to the first token; who still waits counts with the time waited so far."""
        return percentile(
            [(*record.token_times_s, now_s)[0] - record.call.at_s for record in self.all], share
        )

    def itl_s(self, share: float) -> float:
        """A percentile of the times between two tokens."""
        return percentile([gap for record in self.all for gap in record.gaps_s], share)


def percentile(values: Iterable[float], share: float) -> float:
    """The value that a share of the values does not exceed (nearest rank)."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("there is no percentile of nothing")
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
