"""What tenants and keys have taken of their limits: in the last minute, at this moment, and in the month.

Plain sums, O(1) a request. The minute is a sliding one, in slots of a second by a clock that never jumps: what was
taken in a slot counts until all of the slot is 60 seconds old. So it counts for 60 to 61 seconds, and in no minute is
more taken than the limit. Tokens are reserved before a request runs, count where they were reserved, and become what
was really used when the request ends. The wall clock decides one thing: to which month, in UTC, a usage event belongs.
"""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime

SPAN_S = 60
MAX_ACCOUNTS = 10_000
"""Accounts kept although nothing of them counts."""


class Window:
    """The sum of what was taken in the last minute; at most 61 slots."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._total = 0

    def total(self, now_s: float) -> int:
        """What counts now."""
        oldest = math.floor(now_s) - SPAN_S
        while self._slots and (slot := next(iter(self._slots))) < oldest:
            self._total -= self._slots.pop(slot)
        return self._total

    def take(self, now_s: float, amount: int) -> int:
        """Add to what counts; returns the slot, for `give_back`."""
        slot = math.floor(now_s)
        self._slots[slot] = self._slots.get(slot, 0) + amount
        self._total += amount
        return slot

    def give_back(self, slot: int, amount: int) -> None:
        """Take from what counts, unless it no longer does."""
        if slot in self._slots:
            self._slots[slot] -= amount
            self._total -= amount

    def wait_s(self, now_s: float, amount: int) -> float:
        """Seconds until so much of what counts now no longer does."""
        end_s = now_s
        for slot, taken in self._slots.items():
            if amount <= 0:
                break
            amount -= taken
            end_s = slot + SPAN_S + 1
        return end_s - now_s


class Account:
    """What one tenant or one key has taken."""

    def __init__(self) -> None:
        self.requests = Window()
        self.tokens = Window()
        self.in_flight = 0
        self.reserved = 0
        """Tokens of requests that have not ended."""
        self.month: datetime | None = None
        """The month that `month_tokens` is the sum of; None as long as nobody asked."""
        self.month_tokens = 0
        self.reading = asyncio.Lock()
        """Held while the month is read from the ledger."""
        self.arrived: dict[str, tuple[datetime, int]] | None = None
        """Requests that ended while it is read: ledger id to month and tokens."""

    def used(self, now_s: float) -> dict[str, int]:
        """What counts against each limit now; the month once it was read."""
        return {
            "requests_per_minute": self.requests.total(now_s),
            "tokens_per_minute": self.tokens.total(now_s),
            "concurrent_requests": self.in_flight,
            "tokens_per_month": self.month_tokens + self.reserved,
        }

    def is_idle(self, now_s: float) -> bool:
        """Whether nothing would be lost with it but what can be read again."""
        counts = self.in_flight or self.requests.total(now_s) or self.tokens.total(now_s)
        return not counts and not self.reading.locked()


class Accounts:
    """The accounts of all who came lately, by id. Thread: one event loop."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._sweep_at = MAX_ACCOUNTS

    def of(self, holder_id: str, now_s: float) -> Account:
        """The account of a tenant or key, new at its first use."""
        if holder_id not in self._accounts:
            if len(self._accounts) >= self._sweep_at:
                self._accounts = {key: kept for key, kept in self._accounts.items() if not kept.is_idle(now_s)}
                self._sweep_at = max(MAX_ACCOUNTS, 2 * len(self._accounts))
            self._accounts[holder_id] = Account()
        return self._accounts[holder_id]


def month_of(moment: datetime) -> datetime:
    """The first moment of its calendar month in UTC."""
    return moment.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def month_after(month: datetime) -> datetime:
    """The first moment of the next month."""
    return month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)
