"""How long loads took: the last few, and the time within which 95 of 100 are done."""

from __future__ import annotations

PERCENT = 95


class LoadTimes:
    """Seconds of loads that succeeded.

    Args:
        limit: How many of the last loads count for `p95_s`.
    """

    __slots__ = ("_last", "_limit", "count", "p95_s")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last: list[float] = []
        self.count = 0
        """All loads that were noted."""
        self.p95_s: float | None = None
        """The smallest of the last times that 95 % of them do not exceed; None before the first."""

    def note(self, seconds: float) -> None:
        """Count a load."""
        self.count += 1
        self._last = [*self._last[1 - self._limit :], seconds]
        self.p95_s = sorted(self._last)[(PERCENT * len(self._last) + 99) // 100 - 1]
