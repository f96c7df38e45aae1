"""How long loads took: the last few, and the time within which 95 of 100 are done."""

from __future__ import annotations

from collections import deque

PERCENT = 95


class LoadTimes:
    """Seconds of loads that succeeded.

    Args:
        limit: How many of the last loads count for `p95_s`.
    """

    __slots__ = ("_last", "_p95_s", "count")

    def __init__(self, limit: int) -> None:
        self._last: deque[float] = deque(maxlen=limit)
        self._p95_s: float | None = None
        """None if a load was noted since it was last computed."""
        self.count = 0
        """All loads that were noted."""

    def note(self, seconds: float) -> None:
        """Count a load."""
        self.count += 1
        self._last.append(seconds)
        self._p95_s = None

    @property
    def p95_s(self) -> float | None:
        """The smallest of the last times that 95 % of them do not exceed; None before the first."""
        if self._p95_s is None and self._last:
            self._p95_s = sorted(self._last)[(PERCENT * len(self._last) + 99) // 100 - 1]
        return self._p95_s
