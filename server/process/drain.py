"""Graceful shutdown: new work is refused, running work may finish within a limit, then it is cut.

Knows no HTTP: each piece of work is registered with a function that cuts it. Gateways cut their exchanges with replicas
in the same way when a client or a replica is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from manylora.errors import DrainingError, ReplicaLostError

Cut = Callable[[DrainingError], None]
SETTLE_S = 2.0
"""Seconds that cut requests have to send their error."""


class Exchange:
    """Work that can be ended from outside: on a request, or with one replica after the other."""

    def __init__(self) -> None:
        self._cut_by: BaseException | None = None
        self._is_lost = False
        self._task: asyncio.Task[object] | None = None

    def cut(self, error: BaseException) -> None:
        """End the work with this error, with any replica; the first error counts."""
        if self._cut_by is None:
            self._cut_by = error
            self._interrupt()

    def lose(self) -> None:
        """End the work with the present replica by ReplicaLostError."""
        self._is_lost = True
        self._interrupt()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block that `cut` and `lose` end."""
        if self._cut_by is not None:
            raise self._cut_by
        self._task = asyncio.current_task()
        self._is_lost = False
        try:
            yield
        except asyncio.CancelledError:
            if self._task is None or not (self._is_lost or self._cut_by):
                raise
            self._task.uncancel()
            raise (self._cut_by or ReplicaLostError()) from None
        finally:
            self._task = None

    def _interrupt(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Drain:
    """Counts running work, and ends it in order. Thread: the event loop's."""

    def __init__(self) -> None:
        self.is_near = False
        """Load balancers are to choose others: /ready says no, but work is still taken."""
        self.is_draining = False
        self.began = asyncio.Event()
        """Set with `is_draining`, for work that ends at once instead of running on."""
        self._running: dict[object, Cut] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._hurry = asyncio.Event()

    @property
    def num_running(self) -> int:
        """Number of registered pieces of work that run."""
        return len(self._running)

    def check(self, *, or_near: bool = False) -> None:
        """Return if new work may start; with `or_near`, only if it may go on to.

        Raises:
            DrainingError: The server is shutting down.
        """
        if self.is_draining or (or_near and self.is_near):
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
        exchange = Exchange()
        with self.running(exchange.cut), exchange.running():
            yield

    async def drain(self, limit_s: float, notice_s: float = 0.0) -> int:
        """Refuse new work, wait up to `limit_s` seconds for what runs, then cut it; returns how many were cut.

        Before that, go on for `notice_s` seconds, unless somebody hurries.
        """
        self.is_near = True
        await first_of(notice_s, self._hurry)
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
    """Wait for one of the events, at most `seconds`."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _refusal() -> DrainingError:
    return DrainingError(
        "The server is shutting down; send the request again in a moment.", retry_after_s=5
    )
