"""Several servers' accounts over one database, in virtual time: every request, and when it took and used what."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, cast

from sqlalchemy.ext.asyncio import AsyncSession

from manylora.errors import CapacityError, RateLimitError
from manylora.registry.access.limit_allocations import AllocationRequest, LimitAllocations
from manylora.registry.db.clock import from_micros, to_micros
from manylora.registry.db.database import Database
from manylora.registry.limits import Limits
from manylora.registry.records import UsageEvent
from manylora.registry.usage.ledger import UsageLedger
from manylora.registry.usage.write import insert_events
from manylora.server.limits.accounts import LimitedAccount
from manylora.server.limits.reservation import LimitReservation
from manylora.server.limits.shared_accounts import SharedAccounts

SKEW = (0.7, 0.2, 0.08, 0.02)
STEP_S = 0.01
HOLDER = "ten_acme"
START_US = to_micros(datetime(2026, 5, 4, 12, tzinfo=UTC))


class FakeLedger:
    """Events that come into the database a second after they are recorded."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._events: list[tuple[float, UsageEvent]] = []

    @property
    def unmoved_since(self) -> float:
        return min((at for at, _ in self._events), default=inf)

    def record(self, event: UsageEvent) -> None:
        self._events.append((self._world.now_s, event))

    async def move(self) -> None:
        old = [entry for entry in self._events if entry[0] <= self._world.now_s - 1]
        if old:
            async with self._world.database.write() as session:
                await insert_events(session, [event for _, event in old])
            self._events = [entry for entry in self._events if entry not in old]


class CountedAllocations(LimitAllocations):
    """Counts transactions, and fails while the database is away."""

    is_away = False
    num_exchanges = 0

    async def exchange(self, requests: Sequence[AllocationRequest], grace_us: int = 0) -> list[Any]:
        if self.is_away:
            self.is_in_doubt = False
            raise CapacityError("The database cannot answer now; try again.", code="db.unavailable")
        self.num_exchanges += 1
        return await super().exchange(requests, grace_us)


@dataclass(eq=False)
class Server:
    """One process."""

    accounts: SharedAccounts
    allocations: CountedAllocations
    ledger: FakeLedger
    is_dead: bool = False
    running: list[tuple[float, Request]] = field(default_factory=list)
    """With the time of the end."""
    refusals: list[RateLimitError | CapacityError] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    """One admitted request."""

    server: Server
    at_s: float
    reserved: int
    used: int
    reservation: LimitReservation
    end_s: float = inf


class World:
    """The servers and their clocks."""

    def __init__(self, database: Database, num_servers: int) -> None:
        self.database = database
        self.now_s = 0.0
        self.put_back_s = 0.0
        """By so much the clock of the database was put back."""
        self.servers = [self._server(index) for index in range(num_servers)]
        self.requests: list[Request] = []
        self._waiting: set[asyncio.Task[Request | None]] = set()

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str | None, folder: Path, num_servers: int) -> AsyncIterator[World]:
        database = await Database.open(url, folder)
        try:
            yield cls(database, num_servers)
        finally:
            await database.close()

    async def _clock(self, _session: AsyncSession) -> int:
        return START_US + round((self.now_s - self.put_back_s) * 1e6)

    def _server(self, index: int) -> Server:
        ledger = FakeLedger(self)
        allocations = CountedAllocations(self.database, f"srv_{index}", self._clock)
        # No two processes have the same monotonic clock.
        accounts = SharedAccounts(allocations, cast(UsageLedger, ledger), lambda: self.now_s)
        return Server(accounts, allocations, ledger)

    def shares(self, server: Server, limits: Limits) -> list[LimitedAccount]:
        return [LimitedAccount("tenant", HOLDER, server.accounts.of(HOLDER, self.now_s), limits)]

    async def request(
        self, server: Server, limits: Limits, tokens: int = 0, used: int = 0, run_s: float = 1.0
    ) -> Request | None:
        """One request, up to its start; None if it was refused."""
        reservation = LimitReservation()
        shares = self.shares(server, limits)
        try:
            await server.accounts.secure(shares, requests=1, tokens=min(tokens, 1))
            reservation.admit(shares, lambda: self.now_s, lambda _: None, min(tokens, 1))
            if tokens:
                await server.accounts.secure(shares, tokens=tokens)
                reservation.reserve(tokens, is_open=False)
        except (RateLimitError, CapacityError) as error:
            reservation.end()
            server.refusals.append(error)
            return None
        made = Request(server, self.now_s, tokens, used, reservation)
        self.requests.append(made)
        server.running.append((self.now_s + run_s, made))
        return made

    def start(self, request: Coroutine[Any, Any, Request | None]) -> asyncio.Task[Request | None]:
        task = asyncio.create_task(request)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return task

    async def settle_down(self) -> None:
        """Let everything happen that needs no time."""
        while True:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            due = [each for each in self.servers if not each.is_dead and self._is_due(each)]
            if not due:
                return
            for server in due:
                await server.accounts.tick()

    def _is_due(self, server: Server) -> bool:
        at_s = server.accounts.next_at()
        return at_s is not None and at_s <= self.now_s

    async def step(self, seconds: float = STEP_S) -> None:
        """Time passes: requests end, servers tell the database."""
        end_s = self.now_s + seconds
        while self.now_s < end_s - STEP_S / 2:
            self.now_s += STEP_S
            for server in self.servers:
                if not server.is_dead:
                    for _, request in [entry for entry in server.running if entry[0] <= self.now_s]:
                        self.end(request)
                    await server.ledger.move()
            await self.settle_down()

    def end(self, request: Request) -> None:
        server = request.server
        server.running = [entry for entry in server.running if entry[1] is not request]
        request.end_s = self.now_s
        if request.reserved:
            number = self.requests.index(request)
            at = from_micros(START_US + round(self.now_s * 1e6))
            server.ledger.record(_event(f"use_{number}", at, request.used))
            request.reservation.settle(f"use_{number}", request.used, at)
        request.reservation.end()

    def kill(self, server: Server) -> None:
        server.is_dead = True
        for _, request in server.running:
            request.end_s = self.now_s
        server.running = []

    async def load(
        self,
        limits: Limits,
        seconds: float,
        per_s: float,
        rng: random.Random,
        *,
        tokens: tuple[int, int] = (0, 0),
        used_share: float = 1.0,
        run_s: tuple[float, float] = (0.2, 1.0),
        skew: Sequence[float] = SKEW,
    ) -> None:
        """Demand of so many requests per second, on the servers by `skew`."""
        end_s = self.now_s + seconds
        next_s = self.now_s
        weights = list(accumulate(skew[: len(self.servers)]))
        while self.now_s < end_s:
            while next_s <= self.now_s:
                server = rng.choices(self.servers, cum_weights=weights)[0]
                size = rng.randint(*tokens)
                if not server.is_dead:
                    ran_s = rng.uniform(*run_s)
                    used = round(size * rng.uniform(used_share, 1.0)) if used_share < 1 else size
                    self.start(self.request(server, limits, size, used, ran_s))
                next_s += rng.expovariate(per_s)
            await self.settle_down()
            await self.step()

    def excess(self, amounts: Sequence[tuple[float, float]], burst: float, per_s: float) -> float:
        """By how much the amounts of any window are more than a bucket allows; at most 0 if they never are."""
        worst, lowest, total = -inf, inf, 0.0
        for at_s, amount in sorted(amounts):
            lowest = min(lowest, total - per_s * at_s)
            total += amount
            worst = max(worst, total - per_s * at_s - lowest - burst)
        return worst

    def most_at_once(self) -> int:
        changes = sorted(
            change
            for each in self.requests
            for change in ((each.at_s, 1), (each.end_s, -1))
            if change[0] < inf
        )
        changes.sort(key=lambda change: change)  # an end at a moment counts before a start at it
        return max(accumulate(step for _, step in changes), default=0)


def _event(event_id: str, at: datetime, tokens: int) -> UsageEvent:
    return UsageEvent(
        id=event_id,
        at=at,
        tenant_id=HOLDER,
        tenant="acme",
        key_id=None,
        adapter_id=None,
        adapter=None,
        adapter_version=None,
        adapter_digest=None,
        request_id="r",
        endpoint="/v1/completions",
        status="stop",
        prompt_tokens=tokens,
        cached_tokens=0,
        completion_tokens=0,
        queue_s=None,
        ttft_s=None,
        duration_s=None,
        adapter_state=None,
    )
