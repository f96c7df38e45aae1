"""Accounts of tenants and keys: what they have used of their limits in the last minute, now, and in the month.

Sums, O(1) per request. The minute is a sliding window of whole seconds, by a clock that never jumps. A second counts
until all of it is 60 seconds old: for 60 to 61 seconds, so no minute has more than the limit. Tokens are reserved
before a request runs, and replaced by the used tokens when it ends, in the second of the reservation. The wall clock
decides only to which month (UTC) a usage event belongs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Literal, NamedTuple, cast

from manylora.registry.db.clock import month_of
from manylora.registry.limits import LimitKind, Limits

SPAN_S = 60
BUSY_S = 1.0
"""Retry-After in seconds where a limit becomes free only when other requests end."""
TakenAt = int | Sequence[float] | None
"""Moment of a `take`, for `give_back`: the second of a window; for a shared limit, its `AllocationAnswer` before it."""
ReadMonth = Callable[[str, datetime, Collection[str]], Awaitable[int]]
"""`UsageLedger.month_tokens`."""
Holder = Literal["tenant", "key"]
MAX_ACCOUNTS = 10_000
"""Most accounts before idle ones are deleted."""


class LimitUse:
    """Use of one limit: the amount that running requests hold until they end."""

    def __init__(self) -> None:
        self.in_use = 0
        """Amount that running requests hold."""
        self.billed = 0
        """Tokens of the month: those that are in the ledger, as far as it is known here."""

    def total(self, _now_s: float) -> int:
        """Amount that counts against the limit now, as far as it is known here."""
        return self.billed + self.in_use

    def has_room(self, now_s: float, amount: int, limit: int) -> bool:
        """Return true if `amount` may be taken."""
        return self.total(now_s) + amount <= limit

    def take(self, _now_s: float, amount: int) -> TakenAt:
        """Take an amount; returns the moment, for `give_back`."""
        self.in_use += amount
        return None

    def give_back(self, _taken_at: TakenAt, amount: int) -> None:
        """Give back what was taken and not used."""
        self.in_use -= amount

    def settle(self, ledger_id: str, tokens: int, at: datetime) -> None:
        """Count the tokens of a request that ended, after what it reserved was given back; its event is recorded."""

    def foresee(self, limits: Limits, now_s: float, tokens: int) -> None:
        """Prepare for an unbounded answer that takes `tokens` now and more later; a single server has them all."""

    def wait_s(self, _now_s: float, _amount: int) -> float:
        """Seconds until the present sum is smaller by this amount, if nothing is added."""
        return BUSY_S

    def is_idle(self, now_s: float) -> bool:
        """Return true if the object can be deleted: it can be made again as it is."""
        return not self.total(now_s)


class Window(LimitUse):
    """A sum over the last minute; at most 61 seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds: dict[int, int] = {}
        self._sum = 0

    def total(self, now_s: float) -> int:
        """The sum now."""
        oldest = math.floor(now_s) - SPAN_S
        while self._seconds and (second := next(iter(self._seconds))) < oldest:
            self._sum -= self._seconds.pop(second)
        return self._sum

    def take(self, now_s: float, amount: int) -> TakenAt:
        """Add to the sum; returns the second, for `give_back`."""
        second = math.floor(now_s)
        self._seconds[second] = self._seconds.get(second, 0) + amount
        self._sum += amount
        return second

    def give_back(self, taken_at: TakenAt, amount: int) -> None:
        """Subtract from the sum, unless the second no longer counts."""
        if isinstance(taken_at, int) and taken_at in self._seconds:
            self._seconds[taken_at] -= amount
            self._sum -= amount

    def wait_s(self, now_s: float, amount: int) -> float:
        """Seconds until the present sum is smaller by `amount`, if nothing is added."""
        end_s = now_s
        for second, taken in self._seconds.items():
            if amount <= 0:
                break
            amount -= taken
            end_s = second + SPAN_S + 1
        return end_s - now_s


class MonthUse(LimitUse):
    """Tokens of a calendar month: what was billed, and what running requests have reserved."""

    def __init__(self) -> None:
        super().__init__()
        self.month: datetime | None = None
        """The month of `billed`; None before its sum was read."""
        self._reading = asyncio.Lock()
        """Held while the month's sum is read from the ledger."""
        self._arrived: dict[str, tuple[datetime, int]] | None = None
        """Requests that ended during that: month and tokens by ledger id."""

    def settle(self, ledger_id: str, tokens: int, at: datetime) -> None:
        """Count the tokens of a request that ended; its usage event is recorded."""
        if self.month == month_of(at):
            self.billed += tokens
        if self._arrived is not None:
            self._arrived[ledger_id] = (month_of(at), tokens)

    def is_idle(self, _now_s: float) -> bool:
        """Return true if the sum can be read again: no request has reserved a part of it."""
        return not self.in_use and not self._reading.locked()

    async def read(self, read: ReadMonth, holder_id: str, month: datetime) -> None:
        """Read the month's sum from the ledger; requests that end meanwhile count once."""
        async with self._reading:
            if self.month == month:
                return
            arrived: dict[str, tuple[datetime, int]] = {}
            self._arrived = arrived
            try:
                tokens = await read(holder_id, month, arrived)
                self.billed = tokens + sum(
                    count for ended, count in arrived.values() if ended == month
                )
                self.month = month
            finally:
                self._arrived = None


Account = Mapping[LimitKind, LimitUse]
"""Use of the limits of one tenant or key, by limit."""


class LimitedAccount(NamedTuple):
    """An account with the limits of its holder."""

    holder: Holder
    holder_id: str
    account: Account
    limits: Limits

    def limit(self, kind: LimitKind) -> int | None:
        """The holder's limit of this kind; None for none."""
        limit: int | None = getattr(self.limits, kind)
        return limit

    def used(self, now_s: float) -> dict[str, int]:
        """Amount that counts against each limit now, as far as it is known here."""
        return {kind: use.total(now_s) for kind, use in self.account.items()}


def own_account() -> Account:
    """The account of a single server, which has all of each limit."""
    return {
        "requests_per_minute": Window(),
        "concurrent_requests": LimitUse(),
        "tokens_per_minute": Window(),
        "tokens_per_month": MonthUse(),
    }


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
                    key: kept
                    for key, kept in self._accounts.items()
                    if not all(use.is_idle(now_s) for use in kept.values())
                }
                self._sweep_at = max(MAX_ACCOUNTS, 2 * len(self._accounts))
            self._accounts[holder_id] = self._new(holder_id)
        return self._accounts[holder_id]

    def _new(self, _holder_id: str) -> Account:
        return own_account()

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
        was_read = False
        for each in held:
            use = cast(MonthUse, each.account["tokens_per_month"])
            if use.month != month and (with_month or each.limits.tokens_per_month is not None):
                await use.read(read, each.holder_id, month)
                was_read = True
        return was_read
