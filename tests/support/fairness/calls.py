"""What clients send and what they see of it. Times are seconds of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean


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
    priority: int | None = None
    """None leaves the default."""
    deadline_s: float | None = None
    tries: int = 1
    """How often the client comes again after a refusal, this one included."""
    follow: Callable[[float], Call | None] | None = None
    """What the client sends when this one has ended, by the second at which it did."""


@dataclass(eq=False)
class Record:
    """What came of a call."""

    call: Call
    request_id: str
    first_asked_s: float
    """When the client asked first; later than that, it was refused and came again."""
    token_times_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    """When it was refused."""
    retry_after_s: list[float] = field(default_factory=list)
    """What each refusal said."""
    ended_s: float | None = None
    """With all its tokens."""
    failed: str = ""
    """The code of the error that ended it."""

    @property
    def ttft_s(self) -> float | None:
        """From when the call was let in to its first token."""
        return self.token_times_s[0] - self.call.at_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first."""
        times_s = self.token_times_s
        return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else 0.0

    @property
    def gaps_s(self) -> list[float]:
        """Between two tokens."""
        return [after - before for before, after in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


@dataclass(frozen=True)
class Records:
    """Records of one run, or some of them."""

    all: Sequence[Record]

    def of(self, tenant: str) -> Records:
        """Those of one tenant."""
        return Records([record for record in self.all if record.call.tenant == tenant])

    def between(self, start_s: float, end_s: float) -> Records:
        """Those that were asked in a span of time."""
        return Records([record for record in self.all if start_s <= record.call.at_s < end_s])

    def ttft_s(self, share: float, now_s: float) -> float:
        """A percentile of the times to the first token; who still waits counts with the time waited so far."""
        waits_s = [now_s - record.call.at_s if record.ttft_s is None else record.ttft_s for record in self.admitted]
        return percentile(waits_s, share)

    def itl_s(self, share: float) -> float:
        """A percentile of the times between two tokens."""
        return percentile([gap for record in self.all for gap in record.gaps_s], share)

    @property
    def admitted(self) -> list[Record]:
        """Those that were not refused for good."""
        return [record for record in self.all if record.failed != REFUSED]

    @property
    def worst_pause_s(self) -> float:
        """Longest time between two tokens of a stream."""
        return max((gap for record in self.all for gap in record.gaps_s), default=0.0)

    @property
    def mean_e2e_s(self) -> float:
        """Mean seconds from asking to the last token, of those that have ended."""
        return fmean(record.ended_s - record.call.at_s for record in self.all if record.ended_s is not None)

    def share_inside(self, ttft_s: float, tpot_s: float) -> float:
        """Share of the calls that ended inside both objectives; a refusal is outside."""
        return self.num_inside(ttft_s, tpot_s) / len(self.all)

    def num_inside(self, ttft_s: float, tpot_s: float) -> int:
        """Calls that ended inside both objectives."""
        return sum(
            record.ended_s is not None
            and record.ttft_s is not None
            and record.ttft_s <= ttft_s
            and record.tpot_s <= tpot_s
            for record in self.all
        )


REFUSED = "refused"
"""What `Record.failed` says of a call that was refused until its client gave up."""


def percentile(values: Iterable[float], share: float) -> float:
    """The value that a share of the values does not exceed (nearest rank)."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("there is no percentile of nothing")
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
