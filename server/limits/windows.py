"""What tenants and keys have used of their limits: in the last minute, now, and in the month.

Sums, O(1) per request. The minute is a sliding window of whole seconds, by a clock that never jumps. A second counts
until all of it is 60 seconds old: for 60 to 61 seconds, so no minute has more than the limit. Tokens are reserved
before a request runs, and replaced by the used tokens when it ends, in the second of the reservation. The wall clock
decides only to which month (UTC) a usage event belongs.
"""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime

SPAN_S = 60
MAX_ACCOUNTS = 10_000
"""Most accounts before idle ones are deleted."""


class Window:
    """A sum over the last minute; at most 61 seconds."""

    def __init__(self) -> None:
        self._seconds: dict[int, int] = {}
        self._total = 0

    def total(self, now_s: float) -> int:
        """The sum now."""
        oldest = math.floor(now_s) - SPAN_S
        while self._seconds and (second := next(iter(self._seconds))) < oldest:
            self._total -= self._seconds.pop(second)
        return self._total

    def take(self, now_s: float, amount: int) -> int:
        """Add to the sum; returns the second, for `give_back`."""
        second = math.floor(now_s)
        self._seconds[second] = self._seconds.get(second, 0) + amount
        self._total += amount
        return second

    def give_back(self, second: int, amount: int) -> None:
        """Subtract from the sum, unless the second no longer counts."""
        if second in self._seconds:
            self._seconds[second] -= amount
            self._total -= amount

    def wait_s(self, now_s: float, amount: int) -> float:
        """Seconds until the sum of now is smaller by `amount`, if nothing is added."""
        end_s = now_s
        for second, taken in self._seconds.items():
            if amount <= 0:
                break
            amount -= taken
            end_s = second + SPAN_S + 1
        return end_s - now_s


class Account:
    """What one tenant or one key has used."""

    def __init__(self) -> None:
        self.requests = Window()
        self.tokens = Window()
        self.in_flight = 0
        self.reserved = 0
        """Tokens reserved by requests that run."""
        self.month: datetime | None = None
        """The month of `month_tokens`; None before its sum was read."""
        self.month_tokens = 0
        self.reading = asyncio.Lock()
        """Held while the month's sum is read from the ledger."""
        self.arrived: dict[str, tuple[datetime, int]] | None = None
        """Requests that ended during that: month and tokens by ledger id."""

    def used(self, now_s: float) -> dict[str, int]:
        """What counts against each limit now."""
        return {
            "requests_per_minute": self.requests.total(now_s),
            "tokens_per_minute": self.tokens.total(now_s),
            "concurrent_requests": self.in_flight,
            "tokens_per_month": self.month_tokens + self.reserved,
        }

    def is_idle(self, now_s: float) -> bool:
        """Whether the account can be deleted: its month can be read again."""
        counts = self.in_flight or self.requests.total(now_s) or self.tokens.total(now_s)
        return not counts and not self.reading.locked()


class Accounts:
    """Accounts of tenants and keys, by id; idle ones are deleted when there are many. Thread: one event loop."""

    def __init__(self, max_accounts: int = MAX_ACCOUNTS) -> None:
        self._accounts: dict[str, Account] = {}
        self._max_accounts = self._sweep_at = max_accounts

    def __len__(self) -> int:
        """How many there are."""
        return len(self._accounts)

    def of(self, holder_id: str, now_s: float) -> Account:
        """The account of a tenant or key; made at first use."""
        if holder_id not in self._accounts:
            if len(self._accounts) >= self._sweep_at:
                self._accounts = {key: kept for key, kept in self._accounts.items() if not kept.is_idle(now_s)}
                self._sweep_at = max(self._max_accounts, 2 * len(self._accounts))
            self._accounts[holder_id] = Account()
        return self._accounts[holder_id]


def month_of(moment: datetime) -> datetime:
    """The first moment of its calendar month in UTC."""
    return moment.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def month_after(month: datetime) -> datetime:
    """The first moment of the next month."""
    return month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)
