"""Limits that hold across servers: this process's parts of them, taken from the database before they are used.

One loop asks for all accounts together, at most ten times a second, and at once when a request waits for its first
part. While requests keep coming it fetches ahead, so they do not wait. What nobody needed for about a second goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import TYPE_CHECKING, cast

from sqlalchemy.exc import SQLAlchemyError

from weft.errors import CapacityError
from weft.registry.cache import MAX_AGE_S, MAX_OUTAGE_S, PATIENCE_S
from weft.registry.db.database import unavailable
from weft.registry.limit_leases import AHEAD_SHARE, MINUTELY, SLOT_US, Kind, LeaseAnswer, LeaseAsk, LimitLeases
from weft.registry.limits import Limits
from weft.server.limits.windows import SPAN_S, Account, Accounts, Mark, Window

if TYPE_CHECKING:
    from weft.registry.registry import Registry
    from weft.registry.usage.ledger import UsageLedger
    from weft.server.limits.reservation import Share

TICK_S = 0.1
LEASE_S = 1.0
"""What was fetched ahead goes back when there was no request for so long."""
AT_ONCE = 3
"""So many exchanges may follow each other without a pause; after that, one per tick."""
BURST_SHARE = 4
"""A process takes at most this part of a limit ahead."""
GROW_TOKENS = 256
"""Tokens fetched ahead for answers without a bound, before they need them; at 100 tokens per second, 2.5 seconds."""
MIN_GROW_TOKENS = 16
RENEW_S = {"concurrent_requests": 1.5}
RENEW_OTHERS_S = 20.0
SETTLE_S = 2.0
"""So long after an outage other servers have time to renew what they hold."""
ROUNDS = 3
"""A request asks so often: others may take what was fetched for it."""

_logger = logging.getLogger(__name__)


class Lease:
    """This process's part of one limit.

    `amount` is what it holds; running requests use `in_use` of that, and the rest is spare. Tokens and requests per
    minute leave `amount` when they are taken, tokens of a month when they are used.
    """

    def __init__(
        self, accounts: LeasedAccounts, holder_id: str, kind: Kind, in_use: Callable[[], int] = lambda: 0
    ) -> None:
        self.kind: Kind = kind
        self.limit: int | None = None
        self.amount = self._told = 0
        self.needs: list[int] = []
        """Of requests that wait."""
        self.returns: list[tuple[int, LeaseAnswer]] = []
        """What was taken and not used, with `seen` of then."""
        self.unmoved: deque[tuple[float, int]] = deque()
        """Used tokens of a month that the database does not have yet, with the time of their use."""
        self.is_asked = False
        """Somebody wants to know how the limit stands."""
        self.seen: LeaseAnswer | None = None
        """The last answer about this limit."""
        self._accounts = accounts
        self._holder_id = holder_id
        self._in_use = in_use
        self._seen_s = self._fresh_s = self._valid_s = self._grow_until_s = self._keep_until_s = -math.inf
        self._demand, self._demand_s = 0.0, -math.inf

    @property
    def spare(self) -> int:
        """What requests may take; below 0 if they use more than the process holds."""
        return self.amount - self._in_use()

    @property
    def _held(self) -> int:
        """What the database counts for this process."""
        return 0 if self.limit is None else max(0, self.amount) + sum(tokens for _, tokens in self.unmoved)

    def follow(self, limits: Limits) -> None:
        """Note the limit that counts now. Nothing is spent that was taken from another."""
        limit = getattr(limits, self.kind)
        if limit != self.limit:
            self.limit, self.seen, self._valid_s = limit, None, -math.inf
            self._keep_until_s = -math.inf
            self.activate()

    def activate(self) -> None:
        """Tell the database soon what changed."""
        self._accounts.activate(self)

    def has(self, amount: int, now_s: float) -> bool:
        """Whether so much may be taken now."""
        return amount <= self.spare and now_s < self._valid_s

    def is_hopeless(self, amount: int, now_s: float) -> bool:
        """Whether asking for so much is useless: it is more than the limit, or the last answer is fresh."""
        is_known = now_s < min(self._valid_s, self._fresh_s) and self.spare + self._left(now_s) < amount
        return is_known or amount > (self.limit or 0)

    def expect(self, amount: int, now_s: float) -> None:
        """Count demand."""
        self._demand, self._demand_s = self._demand_at(now_s) + amount, now_s
        self.activate()

    def grow(self, amount: int, now_s: float) -> None:
        """Answers without a bound go on: so much now, and more later."""
        self.expect(amount, now_s)
        self._grow_until_s = now_s + LEASE_S
        if self.spare < self._growth(now_s) / 2 and self._left(now_s) >= 1:
            self._accounts.hurry()

    def used(self, now_s: float) -> int:
        """What counts against the limit now, as far as it is known here."""
        return max(0, math.ceil(self._used(now_s) - self.spare - 1e-6)) if self.seen is not None else 0

    def ask(self, now_s: float) -> LeaseAsk | None:
        """What to tell and to ask the database now, if anything. What it gives back leaves `amount`."""
        while self.unmoved and self.unmoved[0][0] < self._accounts.usage.unmoved_since:
            self.unmoved.popleft()
        spare, aim, growth = self.spare, self._aim(now_s), self._growth(now_s)
        if self.limit is None:
            is_due, back = self._told > 0, spare
        else:
            is_short = spare < aim / 2 or (spare < growth / 2 and self._left(now_s) >= 1)
            renew_s = LEASE_S if self._held < self._told else RENEW_S.get(self.kind, RENEW_OTHERS_S)
            is_old = self._told > 0 and now_s >= self._seen_s + renew_s
            is_kept = spare <= 2 * max(aim, growth) or now_s < self._keep_until_s
            back = min(spare, 0) if is_kept else spare - max(aim, growth)
            is_due = bool(self.needs or self.returns or is_short or is_old or back)
        if not (is_due or self.is_asked):
            return None
        self.amount = self.amount - back if self.limit is not None else 0
        needs, returns, self.needs, self.returns, self.is_asked = self.needs, self.returns, [], [], False
        self._fresh_s = -math.inf
        return LeaseAsk(
            holder_id=self._holder_id,
            kind=self.kind,
            limit=self.limit,
            held=self._held,
            spare=self.spare,
            back=back,
            returns=returns,
            needs=needs,
            growth=growth,
            ahead=aim,
        )

    def take_answer(self, asked_s: float, ask: LeaseAsk, answer: LeaseAnswer) -> None:
        """Note what the database said."""
        self._told = ask.held + answer.granted
        if ask.limit == self.limit:
            self.amount += answer.granted
            if ask.needs:  # those who wait for it are only about to run
                self._keep_until_s = asked_s + LEASE_S
            self.seen, self._seen_s, self._fresh_s = answer, asked_s, asked_s + TICK_S
            self._valid_s = asked_s + (SLOT_US / 1e6 if self.kind == "concurrent_requests" else MAX_OUTAGE_S)

    def take_failure(self, ask: LeaseAsk, *, is_in_doubt: bool) -> None:
        """Tell it again. In doubt, what was given back is lost until the limit refills: it must not count twice."""
        self._told = max(1, self._told)
        if not is_in_doubt:
            self.amount += ask.back
            self.returns += ask.returns

    def is_empty(self, now_s: float) -> bool:
        """Whether there is nothing to do until somebody asks for something."""
        return self._held == self._told == 0 and now_s >= self._demand_s + LEASE_S

    def _used(self, now_s: float) -> float:
        """Of the limit, by all servers, with what they hold."""
        used = self.seen.used if self.seen is not None else 0.0
        drained = (self.limit or 0) / SPAN_S * (now_s - self._seen_s) if self.kind in MINUTELY and used else 0.0
        return max(0.0, used - drained)

    def _left(self, now_s: float) -> int:
        return math.floor((self.limit or 0) - self._used(now_s) + 1e-6)

    def _demand_at(self, now_s: float) -> float:
        """The demand of the last seconds: halved in each, so it is that of 1.4 seconds where it is steady."""
        return float(self._demand * 0.5 ** (now_s - self._demand_s))

    def _aim(self, now_s: float) -> int:
        """How much spare the process should have: what it needs in about a second, but only a part of what is left."""
        if self.limit is None or now_s >= min(self._valid_s, self._demand_s + LEASE_S):
            return 0
        most = max(0, self.spare + self._left(now_s)) // AHEAD_SHARE
        return min(int(self._demand_at(now_s)), self.limit // BURST_SHARE, most)

    def _growth(self, now_s: float) -> int:
        if self.limit is None or now_s >= min(self._grow_until_s, self._valid_s):
            return 0
        return min(max(GROW_TOKENS, int(self._demand_at(now_s))), max(self.limit // BURST_SHARE, MIN_GROW_TOKENS))


class LeasedWindow(Window):
    """A limit per minute that servers share; without a limit, what this process has taken in the last minute."""

    def __init__(self, lease: Lease) -> None:
        super().__init__()
        self.lease = lease

    def total(self, now_s: float) -> int:
        """What counts against the limit now, as far as it is known here."""
        return super().total(now_s) if self.lease.limit is None else self.lease.used(now_s)

    def has_room(self, now_s: float, amount: int, limit: int) -> bool:
        """Whether this process holds so much."""
        return amount <= limit and self.lease.has(amount, now_s)

    def take(self, now_s: float, amount: int) -> Mark:
        """Take from what the process holds; returns what the database said last, for `give_back`."""
        if self.lease.limit is None:
            return super().take(now_s, amount)
        self.lease.amount -= amount
        return self.lease.seen

    def give_back(self, mark: Mark, amount: int) -> None:
        """Give back what was taken and not used."""
        if not isinstance(mark, LeaseAnswer):
            super().give_back(mark, amount)
        elif amount:
            self.lease.returns.append((amount, mark))
            self.lease.activate()

    def wait_s(self, now_s: float, amount: int) -> float:
        """Seconds until the sum of now is smaller by `amount`, if nothing is added."""
        if self.lease.limit is None:
            return super().wait_s(now_s, amount)
        return max(TICK_S, amount * SPAN_S / max(self.lease.limit, 1))


class LeasedAccount(Account):
    """What one tenant or one key may use here, of limits that servers share."""

    def __init__(self, accounts: LeasedAccounts, holder_id: str) -> None:
        super().__init__()
        self._accounts = accounts
        self.requests: LeasedWindow = LeasedWindow(Lease(accounts, holder_id, "requests_per_minute"))
        self.tokens: LeasedWindow = LeasedWindow(Lease(accounts, holder_id, "tokens_per_minute"))
        self.slots = Lease(accounts, holder_id, "concurrent_requests", lambda: self.in_flight)
        self.of_month = Lease(accounts, holder_id, "tokens_per_month", lambda: self.reserved)

    def follow(self, limits: Limits) -> tuple[Lease, ...]:
        """All four leases, which now have these limits: of requests, of tokens."""
        leases = (self.requests.lease, self.slots, self.tokens.lease, self.of_month)
        for lease in leases:
            lease.follow(limits)
        return leases

    def has_slot(self, now_s: float, limit: int) -> bool:
        """Whether one more request may run here."""
        return self.in_flight < limit and self.slots.has(1, now_s)

    def has_month(self, now_s: float, tokens: int, limit: int) -> bool:
        """Whether the process holds so many tokens of the month."""
        return tokens <= limit and self.of_month.has(tokens, now_s)

    def month_parts(self) -> tuple[int, int]:
        """Tokens of the month that are used, and those that servers hold or have not recorded yet."""
        billed = self.of_month.seen.billed if self.of_month.seen is not None else 0
        return billed, max(0, self.of_month.used(0.0) - billed)

    def settled(self, _ledger_id: str, tokens: int, _at: datetime) -> None:
        """The tokens count for this process until the database has them."""
        if self.of_month.limit is not None:
            self.of_month.amount -= tokens
            self.of_month.unmoved.append((self._accounts.monotonic(), tokens))
            self.of_month.activate()

    def foresee(self, limits: Limits, now_s: float, tokens: int) -> None:
        """Fetch tokens before an answer without a bound needs them."""
        for lease in self.follow(limits)[2:]:
            if lease.limit is not None:
                lease.grow(tokens, now_s)

    def used(self, now_s: float) -> dict[str, int]:
        """What counts against each limit now, as far as it is known here."""
        shared = (lease for lease in (self.slots, self.of_month) if lease.seen is not None)
        return super().used(now_s) | {lease.kind: lease.used(now_s) for lease in shared}

    def is_idle(self, now_s: float) -> bool:
        """Whether the account can be deleted: the database knows all that counts."""
        leases = (self.requests.lease, self.slots, self.tokens.lease, self.of_month)
        return super().is_idle(now_s) and not any(self._accounts.is_active(lease) for lease in leases)


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
        self._active: dict[Lease, None] = {}
        self._is_urgent = False
        self._wake = asyncio.Event()
        self._next: asyncio.Future[None] | None = None
        """The end of the next exchange; None while nobody waits for it."""
        self._paced_s = self._looked_s = self._good_s = self._retry_s = -math.inf
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
            for lease, amount in zip(cast(LeasedAccount, share.account).follow(share.limits), amounts, strict=True)
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
        accounts = {cast(LeasedAccount, share.account): share.limits for share in shares if with_month}
        leases = [lease for account, limits in accounts.items() for lease in account.follow(limits)]
        for lease in leases:
            lease.is_asked = lease.limit is not None or lease.kind == "tokens_per_month"
        if leases:
            await self._exchanged(leases)
        return False

    def activate(self, lease: Lease) -> None:
        """Look after a lease from now on."""
        if lease not in self._active:
            self._active[lease] = None
            self._wake.set()

    def is_active(self, lease: Lease) -> bool:
        """Whether the loop looks after the lease."""
        return lease in self._active

    def hurry(self) -> None:
        """Ask the database as soon as the pace allows."""
        self._is_urgent = True
        self._wake.set()

    def next_at(self) -> float | None:
        """When `tick` should be called next; None while there is nothing to do."""
        if self._is_urgent:
            return max(self._paced_s, self._retry_s)
        return max(self._paced_s, self._looked_s + TICK_S, self._retry_s) if self._active else None

    async def tick(self) -> None:
        """Tell and ask the database what is due, if anything is."""
        now_s = self._looked_s = self.monotonic()
        self._is_urgent = False
        due = [(lease, ask) for lease in self._active if (ask := lease.ask(now_s)) is not None]
        if not due:
            self._active = {lease: None for lease in self._active if not lease.is_empty(now_s)}
            return
        self._paced_s = max(self._paced_s, now_s - (AT_ONCE - 1) * TICK_S) + TICK_S
        done, self._next = self._next, None
        try:
            answers = await self._leases.exchange([ask for _, ask in due], int(max(0.0, now_s - self._blind_s) * 1e6))
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


async def open_leased_accounts(registry: Registry, server_name: str, stack: AsyncExitStack) -> Accounts:
    """Accounts of a server beside others over one database; `stack` gives back what they hold.

    Raises:
        CapacityError: The database cannot answer; code db.unavailable.
    """
    leases = LimitLeases(registry.database, server_name)
    await leases.forget(is_billed=False)  # of this server's run before: requests that died with it are billed later
    accounts = LeasedAccounts(leases, registry.usage)
    running = asyncio.create_task(accounts.run(), name="weft-limit-leases")

    async def close() -> None:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        with contextlib.suppress(CapacityError):  # else others wait until the leases end
            await registry.usage.flush()
            await leases.forget(is_billed=True)

    stack.push_async_callback(close)
    return accounts
