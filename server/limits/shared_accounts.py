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
from manylora.registry.access.limit_allocations import LimitAllocations
from manylora.registry.cache import MAX_AGE_S, PATIENCE_S
from manylora.registry.db.database import unavailable
from manylora.registry.limits import LIMIT_KINDS
from manylora.server.limits.accounts import Account, Accounts, LimitedAccount, ReadMonth
from manylora.server.limits.limit_allocation import TICK_S, DueAllocations, LimitAllocation
from manylora.server.process.threads import cancel_all

if TYPE_CHECKING:
    from manylora.registry.registry import Registry
    from manylora.registry.usage.ledger import UsageLedger

AT_ONCE = 3
"""Exchanges that may follow each other without a pause; after them, one per tick."""
SETTLE_S = 2.0
"""Seconds after an outage in which other servers have time to renew what they hold."""
ROUNDS = 3
"""Exchanges that a request waits for at most: others may take what was fetched for it."""

logger = logging.getLogger(__name__)


class SharedAccounts(Accounts):
    """Accounts whose limits are shared with other servers.

    Args:
        allocations: The shared state.
        usage: Says which tokens are in the database.
        monotonic: Seconds that never jump, as the ledger and the callers have them.
    """

    def __init__(
        self,
        allocations: LimitAllocations,
        usage: UsageLedger,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._allocations = allocations
        self._due = DueAllocations(usage, monotonic)
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
            (allocation, amount)
            for each in held
            for allocation, amount in zip(_allocations_of(each), amounts, strict=True)
            if amount and allocation.limit is not None
        ]
        for _ in range(ROUNDS):
            now_s = self._monotonic()
            short = [
                (allocation, amount)
                for allocation, amount in wants
                if not allocation.has(amount, now_s)
            ]
            if not short:
                for allocation, amount in wants:
                    allocation.expect(amount, now_s)
                return
            if any(allocation.is_hopeless(amount, now_s) for allocation, amount in short):
                return
            # Also what is here: else it may be given back meanwhile.
            for allocation, amount in wants:
                allocation.needs.append(amount)
            await self._exchanged([allocation for allocation, _ in wants])

    async def read_months(
        self,
        held: Sequence[LimitedAccount],
        _month: datetime,
        _read: ReadMonth,
        *,
        with_month: bool,
    ) -> bool:
        """Find out how the limits stand, if the caller wants to show it; decisions need no sum of the month."""
        allocations = [
            allocation for each in held if with_month for allocation in _allocations_of(each)
        ]
        for allocation in allocations:
            if allocation.limit is not None or allocation.kind == "tokens_per_month":
                allocation.needs.append(0)
        if allocations:
            await self._exchanged(allocations)
        return False

    def next_at(self) -> float | None:
        """Time of the next `tick`; None while there is nothing to do."""
        if self._due.is_urgent:
            return max(self._paced_s, self._retry_s)
        if not self._due.allocations:
            return None
        return max(self._paced_s, self._looked_s + TICK_S, self._retry_s)

    async def tick(self) -> None:
        """Exchange the requests that are due with the database, if there are any."""
        now_s = self._looked_s = self._monotonic()
        allocations = self._due.allocations
        self._due.is_urgent = False
        due = [
            (allocation, request)
            for allocation in allocations
            if (request := allocation.request(now_s)) is not None
        ]
        if not due:
            for allocation in [
                allocation for allocation in allocations if allocation.is_empty(now_s)
            ]:
                del allocations[allocation]
            return
        self._paced_s = max(self._paced_s, now_s - (AT_ONCE - 1) * TICK_S) + TICK_S
        done, self._next = self._next, None
        try:
            answers = await self._allocations.exchange(
                [request for _, request in due], int(max(0.0, now_s - self._blind_s) * 1e6)
            )
        except (CapacityError, SQLAlchemyError) as error:
            logger.warning("limits: the database cannot be asked: %s", error)
            self._retry_s = self._monotonic() + MAX_AGE_S
            self._blind_s = min(self._blind_s, self._good_s)
            for allocation, request in due:
                allocation.take_failure(request, is_in_doubt=self._allocations.is_in_doubt)
            if done is not None:
                done.set_exception(unavailable())
                done.exception()  # else asyncio logs an error that nobody waited for
            return
        self._good_s = now_s
        if now_s > self._retry_s + SETTLE_S:
            self._blind_s = math.inf
        for (allocation, request), answer in zip(due, answers, strict=True):
            allocation.take_answer(now_s, request, answer)
        if done is not None:
            done.set_result(None)

    async def _exchanged(self, allocations: Sequence[LimitAllocation]) -> None:
        """Wait for the next exchange, which these allocations need."""
        if self._monotonic() < self._retry_s:
            raise unavailable()
        for allocation in allocations:
            self._due.add(allocation)
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
        return {kind: LimitAllocation(self._due, holder_id, kind) for kind in LIMIT_KINDS}


def _allocations_of(limited: LimitedAccount) -> list[LimitAllocation]:
    """The allocations of an account, by the limits that count now: two of requests, two of tokens."""
    allocations = cast("list[LimitAllocation]", list(limited.account.values()))
    for allocation in allocations:
        allocation.follow(limited.limits)
    return allocations


async def open_shared_accounts(
    registry: Registry, server_name: str, stack: AsyncExitStack
) -> Accounts:
    """Accounts of a server beside others over one database; `stack` gives back what they hold.

    Raises:
        CapacityError: The database cannot answer; code db.unavailable.
    """
    allocations = LimitAllocations(registry.database, server_name)
    await allocations.forget(
        is_billed=False
    )  # of this server's run before: requests that died with it are billed later
    accounts = SharedAccounts(allocations, registry.usage)
    running = asyncio.create_task(accounts.run(), name="manylora-limit-allocations")

    async def close() -> None:
        await cancel_all([running])
        with contextlib.suppress(CapacityError):  # else others wait until the allocations end
            await registry.usage.flush()
            await allocations.forget(is_billed=True)

    stack.push_async_callback(close)
    return accounts
