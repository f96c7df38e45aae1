"""The engine's state as a stream of server-sent events; the engine is asked once for all listeners.

A snapshot is an event without a name, sent when something in it has changed. `engine_error` carries an error's body and
is sent while the engine or the database is away. `restart` comes before the first snapshot after the engine restarted.
While nothing changes, comments keep the connection open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from weft.errors import CapacityError
from weft.server.errors import error_body
from weft.server.http import sse

POLL_S = 0.5
KEEP_ALIVE_S = 5.0
KEEP_ALIVE = b": keep-alive\n\n"
RETRY = b"retry: 2000\n\n"
"""Milliseconds after which a browser reconnects."""
ALWAYS_NEW = frozenset({"seq", "last_step_age_s"})
"""What differs in any two snapshots of an idle engine."""

Snapshot = dict[str, Any]
Ask = Callable[[], Awaitable[Snapshot]]


class _Frame(NamedTuple):
    event: bytes
    boot_id: str | None
    """None for an error."""


class EngineFeed:
    """Asks for snapshots while there are listeners. A slow listener gets the newest only. Thread: the event loop's."""

    def __init__(self) -> None:
        self._num_listeners = 0
        self._poller: asyncio.Task[None] | None = None
        self._newest: _Frame | None = None
        self._changed = asyncio.Event()

    @property
    def is_asking(self) -> bool:
        """Whether the engine is asked for snapshots: while there are listeners."""
        return self._poller is not None

    async def events(self, ask: Ask, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Events from now on, beginning with the current snapshot.

        Args:
            ask: Gives a snapshot; it must have a `boot_id`.
            is_over: Whether the stream is to end.
        """
        shown: _Frame | None = None
        boot_id: str | None = None
        with self._listening(ask, is_over) as poller:
            yield RETRY
            while not poller.done():
                newest, changed = self._newest, self._changed
                if newest is None or newest is shown:
                    try:
                        async with asyncio.timeout(KEEP_ALIVE_S):
                            await changed.wait()
                    except TimeoutError:
                        yield KEEP_ALIVE
                    continue
                shown = newest
                is_reborn = newest.boot_id is not None and boot_id not in (None, newest.boot_id)
                boot_id = newest.boot_id or boot_id
                yield sse.event({"boot_id": boot_id}, "restart") + newest.event if is_reborn else newest.event
            poller.result()

    @contextmanager
    def _listening(self, ask: Ask, is_over: Callable[[], bool]) -> Iterator[asyncio.Task[None]]:
        """The polling task: started by the first listener, or the first after it failed; ended by the last one."""
        if self._poller is None or self._poller.done():
            self._newest = None
            self._poller = asyncio.create_task(self._poll(ask, is_over))
            self._poller.add_done_callback(lambda _: self._wake())
        self._num_listeners += 1
        try:
            yield self._poller
        finally:
            self._num_listeners -= 1
            if self._num_listeners == 0:
                self._poller.cancel()
                self._poller = None

    async def _poll(self, ask: Ask, is_over: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        last: Snapshot | None = None
        while not is_over():
            next_s = loop.time() + POLL_S
            try:
                snapshot = await ask()
            except CapacityError as error:
                told, boot_id = error_body(error), None
                event = sse.event(told, "engine_error")
            else:
                told, boot_id = {name: snapshot[name] for name in snapshot.keys() - ALWAYS_NEW}, snapshot["boot_id"]
                event = sse.event(snapshot)
            if told != last:
                last, self._newest = told, _Frame(event, boot_id)
                self._wake()
            await asyncio.sleep(max(next_s - loop.time(), 0.0))

    def _wake(self) -> None:
        """Wake all listeners; for the next change they wait on a new event."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
