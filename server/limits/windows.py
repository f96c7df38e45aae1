"""What tenants and keys have used of their limits: in the last minute, now, and in the month.

Sums, O(1) per request. The minute is a sliding window of whole seconds, by a clock that never jumps. A second counts
until all of it is 60 seconds old: for 60 to 61 seconds, so no minute has more than the limit. Tokens are reserved
before a request runs, and replaced by the used tokens when it ends, in the second of the reservation. The wall clock
decides only to which month (UTC) a usage event belongs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from manylora.registry.db.clock import month_of
from manylora.registry.limits import Limits

if TYPE_CHECKING:
    from manylora.registry.usage.ledger import UsageLedger
    from manylora.server.limits.reservation import Share

SPAN_S = 60
Mark = object
"""What `take` returns for `give_back`: here the second."""
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
        """Whether so much may be added."""
        return self.total(now_s) + amount <= limit

    def take(self, now_s: float, amount: int) -> Mark:
        """Add to the sum; returns the second, for `give_back`."""
        second = math.floor(now_s)
        self._seconds[second] = self._seconds.get(second, 0) + amount
        self._total += amount
        return second

    def give_back(self, mark: Mark, amount: int) -> None:
        """Subtract from the sum, unless the second no longer counts."""
        if isinstance(mark, int) and mark in self._seconds:
            self._seconds[mark] -= amount
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

    def has_slot(self, _now_s: float, limit: int) -> bool:
        """Whether one more request may run."""
        return self.in_flight < limit

    def has_month(self, _now_s: float, tokens: int, limit: int) -> bool:
        """Whether so many tokens of the month may be reserved."""
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
        """An answer without a bound goes on: it takes so many tokens now and will need more. All of them are here."""

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

    async def secure(self, shares: Sequence[Share], *, requests: int = 0, tokens: int = 0) -> None:
        """Get hold of what a request is about to take, if it is elsewhere. All that this server may use is here."""

    async def read_months(
        self, shares: Sequence[Share], month: datetime, usage: UsageLedger, *, with_month: bool
    ) -> bool:
        """Read the month's sums that are not known, of holders with a limit or `with_month` of all.

        Returns:
            Whether any was read, which takes time.

        Raises:
            CapacityError: The database cannot answer now.
        """
        needed = [
            share for share in shares if with_month or share.limits.tokens_per_month is not None
        ]
        unread = [share for share in needed if share.account.month != month]
        for share in unread:
            await _read_month(usage, share, month)
        return bool(unread)


async def _read_month(usage: UsageLedger, share: Share, month: datetime) -> None:
    """Read the month's sum from the ledger; requests that end meanwhile count once."""
    account = share.account
    async with account.reading:
        if account.month == month:
            return
        account.arrived = {}
        try:
            tokens = await usage.month_tokens(share.holder_id, month, account.arrived)
            account.month_tokens = tokens + sum(
                count for ended, count in account.arrived.values() if ended == month
            )
            account.month = month
        finally:
            account.arrived = None
