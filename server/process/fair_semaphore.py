"""A semaphore whose places tenants get in turns by their weight, not in order of arrival.

Served is counted in seconds that a tenant held a place, over its weight; the waiting tenant that was served least is
next, and each tenant's own requests stay in order. Goyal, Vin and Cheng, "Start-time Fair Queueing" (1996).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

MAX_IDLE = 1024
"""From this number of tenants on, those that neither hold a place nor wait are forgotten."""
MEAN_MEMORY = 16
"""Holds that the mean length of a hold goes by."""
LEAST_S = 1e-6
"""A hold counts for at least this, so that those too short for the clock take turns too."""


@dataclass(slots=True, eq=False)
class _Served:
    """A tenant's time in places, and its waiting requests."""

    weight: float
    counter: float
    """Seconds over weight, those of the holds under way as predicted."""
    held: int = 0
    waiting: deque[asyncio.Future[float]] = field(default_factory=deque)
    """Each is told for how many seconds its hold was counted in advance."""

    @property
    def is_active(self) -> bool:
        """True while the tenant holds a place or waits for one."""
        return bool(self.held or self.waiting)


class FairSemaphore:
    """Lets a bounded number of holders in. Thread: one event loop.

    Args:
        places: Most holders at the same time.
        clock: Monotonic seconds.
        spare: Places beyond these, for tenants that hold less than their share while others hold more than theirs:
            a newcomer need not wait until a long hold ends. Those who hold more get none until there are fewer again.
    """

    def __init__(
        self, places: int, clock: Callable[[], float] = time.monotonic, *, spare: int = 0
    ) -> None:
        self._clock = clock
        self._places = places
        self._spare = spare
        self._free = places
        """Below 0 while spare places are held."""
        self._tenants: dict[str, _Served] = {}
        self._virtual = 0.0
        """Counter of the tenant that was let in last: where one that was idle begins."""
        self._mean_s = 1.0
        """Length of a hold."""

    def num_waiting(self, tenant: str) -> int:
        """Requests of a tenant that wait for a place."""
        served = self._tenants.get(tenant)
        return len(served.waiting) if served else 0

    @asynccontextmanager
    async def place(self, tenant: str, weight: float = 1.0) -> AsyncIterator[None]:
        """Hold a place; waits for the tenant's turn while there is none free."""
        give_back = await self.take(tenant, weight)
        try:
            yield
        finally:
            give_back()

    async def take(self, tenant: str, weight: float = 1.0) -> Callable[[], None]:
        """Take a place in the tenant's turn; returns what gives it back, to be called once."""
        served = self._enter(tenant, weight)
        waiter: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        served.waiting.append(waiter)
        self._let_in()
        try:
            counted_s = await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # it had its place already
                self._leave(served, waiter.result(), LEAST_S)
            elif waiter in served.waiting:
                served.waiting.remove(waiter)
            raise
        began_s = self._clock()
        return lambda: self._leave(served, counted_s, max(self._clock() - began_s, LEAST_S))

    def _enter(self, tenant: str, weight: float) -> _Served:
        if tenant not in self._tenants and len(self._tenants) >= MAX_IDLE:
            self._tenants = {name: each for name, each in self._tenants.items() if each.is_active}
        served = self._tenants.setdefault(tenant, _Served(weight, self._virtual))
        if not served.is_active:
            served.counter = max(served.counter, self._virtual)
        served.weight = weight
        return served

    def _next(self) -> list[_Served]:
        """The waiting tenants that may have a place now."""
        waiting = [served for served in self._tenants.values() if served.waiting]
        if self._free > 0:
            return waiting
        if not waiting or self._free <= -self._spare:
            return []
        weights = sum(served.weight for served in self._tenants.values() if served.is_active)
        return [
            served
            for served in waiting
            if served.held < max(1, self._places * served.weight / weights)
        ]

    def _let_in(self) -> None:
        while waiting := self._next():
            served = min(waiting, key=lambda each: each.counter)
            waiter = served.waiting.popleft()
            if waiter.cancelled():
                continue
            self._free -= 1
            self._virtual = max(self._virtual, served.counter)
            served.held += 1
            served.counter += self._mean_s / served.weight
            waiter.set_result(self._mean_s)

    def _leave(self, served: _Served, counted_s: float, held_s: float) -> None:
        self._mean_s += (held_s - self._mean_s) / MEAN_MEMORY
        served.counter += (held_s - counted_s) / served.weight
        served.held -= 1
        self._free += 1
        self._let_in()
