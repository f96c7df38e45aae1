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
from manylora.server.limits.accounts import Account, Accounts
from manylora.server.limits.limit_lease import TICK_S, Lease

if TYPE_CHECKING:
    from manylora.registry.registry import Registry
    from manylora.registry.usage.ledger import UsageLedger
    from manylora.server.limits.reservation import Share

AT_ONCE = 3
"""So many exchanges may follow each other without a pause; after that, one per tick."""
SETTLE_S = 2.0
"""So long after an outage other servers have time to renew what they hold."""
ROUNDS = 3
"""A request asks so often: others may take what was fetched for it."""

_logger = logging.getLogger(__name__)


class LeasedAccount(Account):
    """What one tenant or one key may use here, of limits that servers share."""

    def __init__(self, accounts: LeasedAccounts, holder_id: str) -> None:
        super().__init__()
        self._accounts = accounts
        self.requests: Lease = Lease(accounts, holder_id, "requests_per_minute")
        self.tokens: Lease = Lease(accounts, holder_id, "tokens_per_minute")
        self.slots = Lease(accounts, holder_id, "concurrent_requests", lambda: self.in_flight)
        self.of_month = Lease(accounts, holder_id, "tokens_per_month", lambda: self.reserved)
        self._leases = (self.requests, self.slots, self.tokens, self.of_month)

    def follow(self, limits: Limits) -> tuple[Lease, ...]:
        """All four leases, which now have these limits: of requests, of tokens."""
        for lease in self._leases:
            lease.follow(limits)
        return self._leases

    def has_slot(self, now_s: float, limit: int) -> bool:
        """Whether one more request may run here."""
        return self.in_flight < limit and self.slots.has(1, now_s)

    def has_month(self, now_s: float, tokens: int, limit: int) -> bool:
        """Whether the process holds so many tokens of the month."""
        return self.of_month.has_room(now_s, tokens, limit)

    def month_parts(self) -> tuple[int, int]:
        """Tokens of the month that are used, and those that servers hold or have not recorded yet."""
        billed = self.of_month.seen.billed if self.of_month.seen is not None else 0
        return billed, max(0, self.of_month.total(0.0) - billed)

    def settled(self, _ledger_id: str, tokens: int, _at: datetime) -> None:
        """The tokens count for this process until the database has them."""
        if self.of_month.limit is not None:
            self.of_month.amount -= tokens
            self.of_month.unmoved.append((self._accounts.monotonic(), tokens))
            self._accounts.activate(self.of_month)

    def foresee(self, limits: Limits, now_s: float, tokens: int) -> None:
        """Fetch tokens before an answer without a bound needs them."""
        for lease in self.follow(limits)[2:]:
            if lease.limit is not None:
                lease.grow(tokens, now_s)

    def used(self, now_s: float) -> dict[str, int]:
        """What counts against each limit now, as far as it is known here."""
        shared = (lease for lease in (self.slots, self.of_month) if lease.seen is not None)
        return super().used(now_s) | {lease.kind: lease.total(now_s) for lease in shared}

    def is_idle(self, now_s: float) -> bool:
        """Whether the account can be deleted: the database knows all that counts."""
        return super().is_idle(now_s) and not any(
            lease in self._accounts.active for lease in self._leases
        )


class LeasedAccounts(Accounts):
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
        self.usage = usage
        self.monotonic = monotonic
        self._leases = leases
        self.active: dict[Lease, None] = {}
        """Leases that the loop looks after."""
        self._is_urgent = False
        self._wake = asyncio.Event()
        self._next: asyncio.Future[None] | None = None
        """The end of the next exchange; None while nobody waits for it."""
        self._paced_s = self._looked_s = self._retry_s = -math.inf
        self._good_s = monotonic()
        self._blind_s = math.inf
        """When the database last answered before an outage that is not long over."""

    async def secure(self, shares: Sequence[Share], *, requests: int = 0, tokens: int = 0) -> None:
        """Fetch what a request is about to take. The check after it refuses what is not to be had.

        Raises:
            CapacityError: The database cannot answer now, and the process does not hold enough; code db.unavailable.
        """
        amounts = (requests, requests, tokens, tokens)
        wants = [
            (lease, amount)
            for share in shares
            for lease, amount in zip(
                cast(LeasedAccount, share.account).follow(share.limits), amounts, strict=True
            )
            if amount and lease.limit is not None
        ]
        for _ in range(ROUNDS):
            now_s = self.monotonic()
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
        self, shares: Sequence[Share], _month: datetime, _usage: UsageLedger, *, with_month: bool
    ) -> bool:
        """Find out how the limits stand, if the caller wants to show it; decisions need no sum of the month."""
        accounts = {
            cast(LeasedAccount, share.account): share.limits for share in shares if with_month
        }
        leases = [lease for account, limits in accounts.items() for lease in account.follow(limits)]
        for lease in leases:
            if lease.limit is not None or lease.kind == "tokens_per_month":
                lease.needs.append(0)
        if leases:
            await self._exchanged(leases)
        return False

    def activate(self, lease: Lease) -> None:
        """Look after a lease from now on."""
        if lease not in self.active:
            self.active[lease] = None
            self._wake.set()

    def hurry(self) -> None:
        """Ask the database as soon as the pace allows."""
        self._is_urgent = True
        self._wake.set()

    def next_at(self) -> float | None:
        """When `tick` should be called next; None while there is nothing to do."""
        if self._is_urgent:
            return max(self._paced_s, self._retry_s)
        return max(self._paced_s, self._looked_s + TICK_S, self._retry_s) if self.active else None

    async def tick(self) -> None:
        """Tell and ask the database what is due, if anything is."""
        now_s = self._looked_s = self.monotonic()
        self._is_urgent = False
        due = [(lease, ask) for lease in self.active if (ask := lease.ask(now_s)) is not None]
        if not due:
            self.active = {lease: None for lease in self.active if not lease.is_empty(now_s)}
            return
        self._paced_s = max(self._paced_s, now_s - (AT_ONCE - 1) * TICK_S) + TICK_S
        done, self._next = self._next, None
        try:
            answers = await self._leases.exchange(
                [ask for _, ask in due], int(max(0.0, now_s - self._blind_s) * 1e6)
            )
        except (CapacityError, SQLAlchemyError) as error:
            _logger.warning("limits: the database cannot be asked: %s", error)
            self._retry_s = self.monotonic() + MAX_AGE_S
            self._blind_s = min(self._blind_s, self._good_s)
            for lease, ask in due:
                lease.take_failure(ask, is_in_doubt=self._leases.is_in_doubt)
            if done is not None:
                done.set_exception(unavailable())
                done.exception()  # else asyncio logs an error that nobody waited for
            return
        self._good_s = now_s
        if now_s > self._retry_s + SETTLE_S:
            self._blind_s = math.inf
        for (lease, ask), answer in zip(due, answers, strict=True):
            lease.take_answer(now_s, ask, answer)
        if done is not None:
            done.set_result(None)

    async def _exchanged(self, leases: Sequence[Lease]) -> None:
        """Wait for the next exchange, which these leases need."""
        if self.monotonic() < self._retry_s:
            raise unavailable()
        for lease in leases:
            self.activate(lease)
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        self.hurry()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.shield(self._next)
        except TimeoutError as error:
            raise unavailable() from error

    async def run(self) -> None:
        """Ask the database whenever it is time, until cancelled."""
        while True:
            at_s, now_s = self.next_at(), self.monotonic()
            if at_s is not None and at_s <= now_s:
                await self.tick()
                continue
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if at_s is None else at_s - now_s):
                    await self._wake.wait()

    def _new(self, holder_id: str) -> Account:
        return LeasedAccount(self, holder_id)


async def open_leased_accounts(
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
    accounts = LeasedAccounts(leases, registry.usage)
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
