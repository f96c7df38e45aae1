"""Order of requests that arrive at the same time: tenants in turns, a few requests per round of the event loop.

Checking and planning a request takes the event loop half a millisecond. When the streams of a busy tenant end together,
hundreds of its next requests arrive at once, and another tenant's request would wait behind all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque

REQUESTS_A_ROUND = 4
"""Requests per round of the event loop."""


class Arrivals:
    """Lets requests in. Thread: one event loop."""

    def __init__(self) -> None:
        self._room = REQUESTS_A_ROUND
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting requests by tenant; the first tenant is the next one."""
        self._is_counting = False

    async def turn(self, tenant: str) -> None:
        """Wait for the turn of this request; returns at once unless others arrived in the same round."""
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._begin_round, loop)
        if self._room and not self._lines:
            self._room -= 1
            return
        waiter: asyncio.Future[None] = loop.create_future()
        self._lines.setdefault(tenant, deque()).append(waiter)
        await waiter

    def _begin_round(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the next requests in. There are rounds as long as requests arrive or wait."""
        self._is_counting = self._room < REQUESTS_A_ROUND or bool(self._lines)
        self._room = REQUESTS_A_ROUND
        while self._room and self._lines:
            tenant, line = next(iter(self._lines.items()))
            del self._lines[tenant]
            waiter = line.popleft()
            if line:
                self._lines[tenant] = line
            if not waiter.done():  # its client is still there
                waiter.set_result(None)
                self._room -= 1
        if self._is_counting:
            loop.call_soon(self._begin_round, loop)
