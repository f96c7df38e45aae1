"""The loop of all loads: a fixed number of clients takes items in turn and acts on each when it is due.

Closed loop: an item is due as soon as a client is free. Open loop: items are due at given times, however slow the
server is. The loop knows nothing of requests and of servers.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
_TICK_S = 0.005


async def play(
    items: Iterable[T],
    act: Callable[[T, float], Awaitable[object]],
    *,
    at_once: int,
    arrivals_s: Iterable[float] | None = None,
    until_s: float = math.inf,
) -> None:
    """Act on all items, and wait for the last.

    Args:
        items: They may have no end.
        act: Gets an item and the time at which it was due.
        at_once: Most items that are acted on at a time.
        arrivals_s: Seconds from now at which each item is due; None makes it a closed loop.
        until_s: No item is begun from this time of `time.perf_counter` on.
    """
    start_s = time.perf_counter()
    times: Iterable[float | None] = itertools.repeat(None) if arrivals_s is None else arrivals_s
    shared = zip(items, times, strict=False)

    async def client() -> None:
        for item, arrival_s in shared:
            due_s = time.perf_counter() if arrival_s is None else start_s + arrival_s
            if due_s >= until_s:
                return
            await sleep_until(due_s)
            await act(item, due_s)

    await asyncio.gather(*(client() for _ in range(at_once)))


async def sleep_until(time_s: float) -> None:
    """Sleep until a time of `time.perf_counter`; one that is over does not wait."""
    if (seconds := time_s - time.perf_counter()) > 0:
        await asyncio.sleep(seconds)


async def watch_delay(delays_s: list[float]) -> None:
    """Every few milliseconds, note how late this event loop runs its timers. Never returns."""
    while True:
        due_s = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        delays_s.append(max(0.0, time.perf_counter() - due_s))
