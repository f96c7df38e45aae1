"""Limits that hold across servers: this process's parts of them, taken from the database before they are used.

One loop asks for all accounts together, at most ten times a second, and at once when a request waits for its first
part.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import TYPE_CHECKING, cast

from sqlalchemy.exc import SQLAlchemyError

from manylora.errors import CapacityError
from manylora.registry.access.limit_leases import LimitLeases
from manylora.registry.cache import MAX_AGE_S, PATIENCE_S
from manylora.registry.db.database import unavailable
from manylora.registry.limits import Limits
from manylora.server.limits.accounts import Account, Accounts, LimitedAccount, ReadMonth
from manylora.server.limits.limit_lease import TICK_S, DueLeases, LimitLease

if TYPE_CHECKING:
    from manylora.registry.registry import Registry
    from manylora.registry.usage.ledger import UsageLedger

AT_ONCE = 3
"""Exchanges that may follow each other without a pause; after them, one per tick."""
SETTLE_S = 2.0
"""Seconds after an outage in which other servers have time to renew what they hold."""
ROUNDS = 3
"""Exchanges that a request waits for at most: others may take what was fetched for it."""

_logger = logging.getLogger(__name__)


class SharedAccount(Account):
    """Account of one tenant or key whose limits servers share: it has a lease of each.

    Args:
        due: Looks after the leases.
        monotonic: Seconds that never jump.
        holder_id: The tenant or key.
    """

    def __init__(self, due: DueLeases, monotonic: Callable[[], float], holder_id: str) -> None:
        super().__init__()
        self._due = due
        self._monotonic = monotonic
        self.requests: LimitLease = LimitLease(due, holder_id, "requests_per_minute")
        self.tokens: LimitLease = LimitLease(due, holder_id, "tokens_per_minute")
        self.slots = LimitLease(due, holder_id, "concurrent_requests", lambda: self.in_flight)
        self.of_month = LimitLease(due, holder_id, "tokens_per_month", lambda: self.reserved)
        self._leases = (self.requests, self.slots, self.tokens, self.of_month)

    def follow(self, limits: Limits) -> tuple[LimitLease, ...]:
        """Give the leases these limits, and return them: two of requests, two of tokens."""
        for lease in self._leases:
            lease.follow(limits)
        return self._leases

    def has_slot(self, now_s: float, limit: int) -> bool:
        """Return true if one more request may run here."""
        return self.in_flight < limit and self.slots.has(1, now_s)

    def has_month(self, now_s: float, tokens: int, limit: int) -> bool:
        """Return true if the process holds this number of the month's tokens."""
        return self.of_month.has_room(now_s, tokens, limit)

    def month_parts(self) -> tuple[int, int]:
        """Tokens of the month that are used, and those that servers hold or have not recorded yet."""
        billed = self.of_month.seen.billed if self.of_month.seen is not None else 0
        return billed, max(0, self.of_month.total(0.0) - billed)

    def settled(self, _ledger_id: str, tokens: int, _at: datetime) -> None:
        """Count used tokens for this process until the database has them."""
        if self.of_month.limit is not None:
            self.of_month.amount -= tokens
            self.of_month.unmoved.append((self._monotonic(), tokens))
            self._due.add(self.of_month)

    def foresee(self, limits: Limits, now_s: float, tokens: int) -> None:
        """Fetch tokens before an answer without a bound needs them."""
        for lease in self.follow(limits)[2:]:
            if lease.limit is not None:
                lease.grow(tokens, now_s)

    def used(self, now_s: float) -> dict[str, int]:
        """Amount that counts against each limit now, as far as it is known here."""
        shared = (lease for lease in (self.slots, self.of_month) if lease.seen is not None)
        return super().used(now_s) | {lease.kind: lease.total(now_s) for lease in shared}

    def is_idle(self, now_s: float) -> bool:
        """Return true if the account can be deleted: the database knows all that counts."""
        return super().is_idle(now_s) and self._due.leases.keys().isdisjoint(self._leases)


class SharedAccounts(Accounts):
    """Accounts whose limits are shared with other servers.

    Args:
        leases: The shared state.
        usage: Says which tokens are in the database.
        monotonic: Seconds that never jump, as the ledger and the callers have them.
    """

    def __init__(
        self,
        leases: LimitLeases,
        usage: UsageLedger,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._leases = leases
        self._due = DueLeases(usage)
        self._next: asyncio.Future[None] | None = None
        """The end of the next exchange; None while nobody waits for it."""
        self._paced_s = self._looked_s = self._retry_s = -math.inf
        self._good_s = monotonic()
        self._blind_s = math.inf
        """Time of the database's last answer before an outage that is not long over."""

    async def secure(
        self, held: Sequence[LimitedAccount], *, requests: int = 0, tokens: int = 0
    ) -> None:
        """Fetch the amounts that a request is about to take. The check after it refuses what could not be fetched.

        Raises:
            CapacityError: The database cannot answer now, and the process does not hold enough; code db.unavailable.
        """
        amounts = (requests, requests, tokens, tokens)
        wants = [
            (lease, amount)
            for each in held
            for lease, amount in zip(
                cast(SharedAccount, each.account).follow(each.limits), amounts, strict=True
            )
            if amount and lease.limit is not None
        ]
        for _ in range(ROUNDS):
            now_s = self._monotonic()
            short = [(lease, amount) for lease, amount in wants if not lease.has(amount, now_s)]
            if not short:
                for lease, amount in wants:
                    lease.expect(amount, now_s)
                return
            if any(lease.is_hopeless(amount, now_s) for lease, amount in short):
                return
            for lease, amount in wants:
                lease.needs.append(amount)  # also what is here: else it may be given back meanwhile
            await self._exchanged([lease for lease, _ in wants])

    async def read_months(
        self,
        held: Sequence[LimitedAccount],
        _month: datetime,
        _read: ReadMonth,
        *,
        with_month: bool,
    ) -> bool:
        """Find out how the limits stand, if the caller wants to show it; decisions need no sum of the month."""
        accounts = {cast(SharedAccount, each.account): each.limits for each in held if with_month}
        leases = [lease for account, limits in accounts.items() for lease in account.follow(limits)]
        for lease in leases:
            if lease.limit is not None or lease.kind == "tokens_per_month":
                lease.needs.append(0)
        if leases:
            await self._exchanged(leases)
        return False

    def next_at(self) -> float | None:
        """Time of the next `tick`; None while there is nothing to do."""
        if self._due.is_urgent:
            return max(self._paced_s, self._retry_s)
        if not self._due.leases:
            return None
        return max(self._paced_s, self._looked_s + TICK_S, self._retry_s)

    async def tick(self) -> None:
        """Exchange the requests that are due with the database, if there are any."""
        now_s = self._looked_s = self._monotonic()
        leases = self._due.leases
        self._due.is_urgent = False
        due = [
            (lease, request) for lease in leases if (request := lease.request(now_s)) is not None
        ]
        if not due:
            for lease in [lease for lease in leases if lease.is_empty(now_s)]:
                del leases[lease]
            return
        self._paced_s = max(self._paced_s, now_s - (AT_ONCE - 1) * TICK_S) + TICK_S
        done, self._next = self._next, None
        try:
            answers = await self._leases.exchange(
                [request for _, request in due], int(max(0.0, now_s - self._blind_s) * 1e6)
            )
        except (CapacityError, SQLAlchemyError) as error:
            _logger.warning("limits: the database cannot be asked: %s", error)
            self._retry_s = self._monotonic() + MAX_AGE_S
            self._blind_s = min(self._blind_s, self._good_s)
            for lease, request in due:
                lease.take_failure(request, is_in_doubt=self._leases.is_in_doubt)
            if done is not None:
                done.set_exception(unavailable())
                done.exception()  # else asyncio logs an error that nobody waited for
            return
        self._good_s = now_s
        if now_s > self._retry_s + SETTLE_S:
            self._blind_s = math.inf
        for (lease, request), answer in zip(due, answers, strict=True):
            lease.take_answer(now_s, request, answer)
        if done is not None:
            done.set_result(None)

    async def _exchanged(self, leases: Sequence[LimitLease]) -> None:
        """Wait for the next exchange, which these leases need."""
        if self._monotonic() < self._retry_s:
            raise unavailable()
        for lease in leases:
            self._due.add(lease)
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        self._due.hurry()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.shield(self._next)
        except TimeoutError as error:
            raise unavailable() from error

    async def run(self) -> None:
        """Ask the database whenever it is time, until cancelled."""
        while True:
            at_s = self.next_at()
            now_s = self._monotonic()
            if at_s is not None and at_s <= now_s:
                await self.tick()
                continue
            self._due.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if at_s is None else at_s - now_s):
                    await self._due.changed.wait()

    def _new(self, holder_id: str) -> Account:
        return SharedAccount(self._due, self._monotonic, holder_id)


async def open_shared_accounts(
    registry: Registry, server_name: str, stack: AsyncExitStack
) -> Accounts:
    """Accounts of a server beside others over one database; `stack` gives back what they hold.

    Raises:
        CapacityError: The database cannot answer; code db.unavailable.
    """
    leases = LimitLeases(registry.database, server_name)
    await leases.forget(
        is_billed=False
    )  # of this server's run before: requests that died with it are billed later
    accounts = SharedAccounts(leases, registry.usage)
    running = asyncio.create_task(accounts.run(), name="manylora-limit-leases")

    async def close() -> None:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        with contextlib.suppress(CapacityError):  # else others wait until the leases end
            await registry.usage.flush()
            await leases.forget(is_billed=True)

    stack.push_async_callback(close)
    return accounts
