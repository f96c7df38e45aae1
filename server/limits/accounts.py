"""Accounts of tenants and keys: what they have used of their limits in the last minute, now, and in the month.

Sums, O(1) per request. The minute is a sliding window of whole seconds, by a clock that never jumps. A second counts
until all of it is 60 seconds old: for 60 to 61 seconds, so no minute has more than the limit. Tokens are reserved
before a request runs, and replaced by the used tokens when it ends, in the second of the reservation. The wall clock
decides only to which month (UTC) a usage event belongs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from manylora.registry.db.clock import month_of
from manylora.registry.limits import Limits

SPAN_S = 60
TakenAt = int | Sequence[float] | None
"""Moment of a `take`, for `give_back`: the second of a window; for a lease, its `LeaseAnswer` before it."""
ReadMonth = Callable[[str, datetime, Collection[str]], Awaitable[int]]
"""`UsageLedger.month_tokens`."""
Holder = Literal["tenant", "key"]
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

    def has_room(self, now_s: float, amount: int, limit: int) -> bool:
        """Return true if `amount` may be added."""
        return self.total(now_s) + amount <= limit

    def take(self, now_s: float, amount: int) -> TakenAt:
        """Add to the sum; returns the second, for `give_back`."""
        second = math.floor(now_s)
        self._seconds[second] = self._seconds.get(second, 0) + amount
        self._total += amount
        return second

    def give_back(self, taken_at: TakenAt, amount: int) -> None:
        """Subtract from the sum, unless the second no longer counts."""
        if isinstance(taken_at, int) and taken_at in self._seconds:
            self._seconds[taken_at] -= amount
            self._total -= amount

    def wait_s(self, now_s: float, amount: int) -> float:
        """Seconds until the present sum is smaller by `amount`, if nothing is added."""
        end_s = now_s
        for second, taken in self._seconds.items():
            if amount <= 0:
                break
            amount -= taken
            end_s = second + SPAN_S + 1
        return end_s - now_s


class Account:
    """Use of the limits of one tenant or key."""

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

    def has_slot(self, _now_s: float, limit: int) -> bool:
        """Return true if one more request may run."""
        return self.in_flight < limit

    def has_month(self, _now_s: float, tokens: int, limit: int) -> bool:
        """Return true if this number of the month's tokens may be reserved."""
        return sum(self.month_parts()) + tokens <= limit

    def month_parts(self) -> tuple[int, int]:
        """Tokens of the month that are used, and those that are reserved."""
        return self.month_tokens, self.reserved

    def settled(self, ledger_id: str, tokens: int, at: datetime) -> None:
        """Count the tokens of a request that ended, which are no longer reserved; its usage event is recorded."""
        if self.month == month_of(at):
            self.month_tokens += tokens
        if self.arrived is not None:
            self.arrived[ledger_id] = (month_of(at), tokens)

    def foresee(self, limits: Limits, now_s: float, tokens: int) -> None:
        """Prepare for an unbounded answer that takes `tokens` now and more later; a single server has them all."""

    def used(self, now_s: float) -> dict[str, int]:
        """Amount that counts against each limit now."""
        return {
            "requests_per_minute": self.requests.total(now_s),
            "tokens_per_minute": self.tokens.total(now_s),
            "concurrent_requests": self.in_flight,
            "tokens_per_month": self.month_tokens + self.reserved,
        }

    def is_idle(self, now_s: float) -> bool:
        """Return true if the account can be deleted: its month can be read again."""
        counts = self.in_flight or self.requests.total(now_s) or self.tokens.total(now_s)
        return not counts and not self.reading.locked()


class LimitedAccount(NamedTuple):
    """An account with the limits of its holder."""

    holder: Holder
    holder_id: str
    account: Account
    limits: Limits


class Accounts:
    """Accounts of tenants and keys, by id; idle ones are deleted when there are many. Thread: one event loop."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._sweep_at = MAX_ACCOUNTS

    def of(self, holder_id: str, now_s: float) -> Account:
        """The account of a tenant or key; made at first use."""
        if holder_id not in self._accounts:
            if len(self._accounts) >= self._sweep_at:
                self._accounts = {
                    key: kept for key, kept in self._accounts.items() if not kept.is_idle(now_s)
                }
                self._sweep_at = max(MAX_ACCOUNTS, 2 * len(self._accounts))
            self._accounts[holder_id] = self._new(holder_id)
        return self._accounts[holder_id]

    def _new(self, _holder_id: str) -> Account:
        return Account()

    async def secure(
        self, held: Sequence[LimitedAccount], *, requests: int = 0, tokens: int = 0
    ) -> None:
        """Fetch the amounts that a request is about to take; nothing to do on a single server, which has them all."""

    async def read_months(
        self,
        held: Sequence[LimitedAccount],
        month: datetime,
        read: ReadMonth,
        *,
        with_month: bool,
    ) -> bool:
        """Read the month's sums that are not known, of holders with a limit or `with_month` of all.

        Returns:
            True if any was read, which takes time.

        Raises:
            CapacityError: The database cannot answer now.
        """
        unread = [
            each
            for each in held
            if each.account.month != month
            and (with_month or each.limits.tokens_per_month is not None)
        ]
        for each in unread:
            await _read_month(read, each, month)
        return bool(unread)


async def _read_month(read: ReadMonth, held: LimitedAccount, month: datetime) -> None:
    """Read the month's sum from the ledger; requests that end meanwhile count once."""
    account = held.account
    async with account.reading:
        if account.month == month:
            return
        account.arrived = {}
        try:
            tokens = await read(held.holder_id, month, account.arrived)
            account.month_tokens = tokens + sum(
                count for ended, count in account.arrived.values() if ended == month
            )
            account.month = month
        finally:
            account.arrived = None
