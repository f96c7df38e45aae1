"""The engine's state as a stream of server-sent events; listeners share the answers of the engine.

A snapshot is an event without a name, sent when something in it has changed. `engine_error` carries an error's body and
is sent while the engine or the database is away. `restart` comes before the first snapshot after the engine restarted.
While nothing changes, comments keep the connection open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

from manylora.errors import CapacityError
from manylora.server.errors import error_body
from manylora.server.http import sse

POLL_S = 0.5
KEEP_ALIVE_S = 5.0
KEEP_ALIVE = b": keep-alive\n\n"
RETRY = b"retry: 2000\n\n"
"""Milliseconds after which a browser reconnects."""
ALWAYS_NEW = frozenset({"last_step_age_s"})
"""Fields that differ in any two snapshots of an idle engine."""

Snapshot = Mapping[str, Any]
ReadSnapshot = Callable[[], Coroutine[Any, Any, Snapshot]]


class EngineFeed:
    """Asks for snapshots while there are listeners, at most once in `POLL_S` seconds. Thread: the event loop's."""

    def __init__(self) -> None:
        self._asked_s = float("-inf")
        self._answer: asyncio.Task[Snapshot] | None = None

    async def events(
        self, read: ReadSnapshot, is_over: Callable[[], bool]
    ) -> AsyncGenerator[bytes, None]:
        """Events from now on, beginning with the current snapshot. A slow listener gets the newest only.

        Args:
            read: Gives a snapshot; it must have a `boot_id`.
            is_over: Gives true once the stream is to end.
        """
        last: Snapshot | None = None
        boot_id: object = None
        loop = asyncio.get_running_loop()
        sent_s = 0.0
        yield RETRY
        while not is_over():
            content: Snapshot
            try:
                content = await self._newest(read)
                name = ""
            except CapacityError as error:
                content = error_body(error)
                name = "engine_error"
            lasting = {key: content[key] for key in content.keys() - ALWAYS_NEW}
            if lasting != last:
                last = lasting
                sent_s = loop.time()
                before, boot_id = boot_id, content.get("boot_id", boot_id)
                if before not in (None, boot_id):
                    yield sse.event({"boot_id": boot_id}, "restart")
                yield sse.event(content, name)
            elif loop.time() - sent_s >= KEEP_ALIVE_S:
                sent_s = loop.time()
                yield KEEP_ALIVE
            await asyncio.sleep(POLL_S)

    async def _newest(self, read: ReadSnapshot) -> Snapshot:
        """The answer that is being given, or was asked for less than `POLL_S` seconds ago; else a new one."""
        now_s = asyncio.get_running_loop().time()
        if self._answer is None or (self._answer.done() and now_s - self._asked_s >= POLL_S):
            self._asked_s = now_s
            self._answer = asyncio.create_task(read())
        return await asyncio.shield(self._answer)  # others may wait for it
