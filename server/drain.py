"""Graceful shutdown: new work is refused, running work may finish within a limit, then it is cut.

Knows no HTTP: each piece of work is registered with a function that cuts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.errors import DrainingError

Cut = Callable[[DrainingError], None]
SETTLE_S = 2.0
"""Seconds that cut requests have to send their error."""


class Drain:
    """Counts running work, and ends it in order. Thread: the event loop's."""

    def __init__(self) -> None:
        self.is_draining = False
        self.began = asyncio.Event()
        """Set with `is_draining`, for work that ends at once instead of running on."""
        self._running: dict[object, Cut] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._hurry = asyncio.Event()

    @property
    def num_running(self) -> int:
        """How many registered pieces of work are running."""
        return len(self._running)

    def check(self) -> None:
        """Return if new work may start.

        Raises:
            DrainingError: The server is shutting down.
        """
        if self.is_draining:
            raise _refusal()

    @contextmanager
    def running(self, cut: Cut) -> Iterator[None]:
        """Register a piece of work for the length of the block; `cut` must make it end soon.

        Raises:
            DrainingError: The server is shutting down.
        """
        self.check()
        token = object()
        self._running[token] = cut
        self._idle.clear()
        try:
            yield
        finally:
            del self._running[token]
            if not self._running:
                self._idle.set()

    @contextmanager
    def cancelling(self) -> Iterator[None]:
        """Register the block as work that is ended by cancelling its task.

        Raises:
            DrainingError: The server is shutting down, now or before the block's end.
        """
        task = asyncio.current_task()
        ended: list[DrainingError] = []

        def cut(error: DrainingError) -> None:
            if task is not None:
                ended.append(error)
                task.cancel()

        with self.running(cut):
            try:
                yield
            except asyncio.CancelledError:
                if not ended or task is None:
                    raise
                task.uncancel()
                raise ended[0] from None

    async def drain(self, limit_s: float) -> int:
        """Refuse new work, wait up to `limit_s` seconds for what runs, then cut it; returns how many were cut."""
        self.is_draining = True
        self.began.set()
        await first_of(limit_s, self._idle, self._hurry)
        cuts = list(self._running.values())
        for cut in cuts:
            cut(_refusal())
        if cuts:
            await first_of(SETTLE_S, self._idle)
        return len(cuts)

    def hurry(self) -> None:
        """Cut running work now instead of at the limit."""
        self._hurry.set()


async def first_of(seconds: float, *events: asyncio.Event) -> None:
    """Wait for one of the events, for at most so many seconds."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _refusal() -> DrainingError:
    return DrainingError("The server is shutting down; send the request again in a moment.", retry_after_s=5)
