"""Answers read a moment ago, so that each request need not ask the database again.

An answer counts for a second after it was read. Where answers follow from what the audit log records, they also count
for a second after it was seen that nothing has changed since (`Changes`): one small question in place of one for each
key and adapter, and requests do not wait for it. Who changes something in this process says so: `forget` drops
everything, and an answer whose question was asked before the change is not remembered after it. What another process
changed is seen after a second. All who ask at the same time wait for one reading.

While the database cannot answer, or is slow to, an answer serves for a minute, so that an outage stops no one who was
there before it. Meanwhile one asker at a time finds out whether it is over; the others do not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from weft.errors import CapacityError, WeftError
from weft.registry.db.database import unavailable

MAX_ENTRIES = 10_000
MAX_AGE_S = 1.0
LOOK_S = 0.25
"""While answers are asked for, changes are looked for this often."""
MAX_CONFIRMED_S = 300.0
"""From this age on an answer is read again, also where the log of changes has nothing: somebody may have edited the
database by hand."""
MAX_OUTAGE_S = 60.0
PATIENCE_S = 2.0
"""How long who has an answer waits for a newer one."""

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class Changes:
    """Looks whether anything has changed that answers depend on, and has them forgotten if so.

    Thread: one event loop.

    Args:
        last_change: Reads the number of the last change.
        monotonic: Seconds that never jump.
    """

    def __init__(self, last_change: Callable[[], Awaitable[int]], monotonic: Callable[[], float]) -> None:
        self.unchanged_at = float("-inf")
        """When it was last asked whether there was a change, and there was none."""
        self._last_change = last_change
        self._monotonic = monotonic
        self._forget: list[Callable[[], None]] = []
        self._number: int | None = None
        self._next_look_s = float("-inf")
        self._look: asyncio.Task[None] | None = None

    def follow(self, forget: Callable[[], None]) -> None:
        """Call `forget` after each change."""
        self._forget.append(forget)

    def look(self) -> None:
        """Look for changes, if the last time was a moment ago; returns at once."""
        now_s = self._monotonic()
        if self._look is None and now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._look = asyncio.create_task(self._read(now_s))

    async def _read(self, asked_at: float) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                number = await self._last_change()
        except (CapacityError, TimeoutError):
            return  # answers get old, and whoever asks for one finds out what is wrong
        finally:
            self._look = None
        if number != self._number:
            self._number = number
            for forget in self._forget:
                forget()
        self.unchanged_at = asked_at


class ReadThroughCache(Generic[KeyT, ValueT]):
    """A bounded map whose entries age. Thread: one event loop.

    Args:
        monotonic: Seconds that never jump.
        changes: Tells since when nothing has changed; None for answers that may change without a trace.
        max_entries: Beyond, all are dropped.
    """

    def __init__(
        self, monotonic: Callable[[], float], changes: Changes | None = None, max_entries: int = MAX_ENTRIES
    ) -> None:
        self._monotonic = monotonic
        self._changes = changes
        if changes is not None:
            changes.follow(self.forget)
        self._max_entries = max_entries
        self._entries: dict[KeyT, tuple[float, ValueT]] = {}
        self._epoch = 0
        self._readings: dict[tuple[int, KeyT], asyncio.Task[ValueT]] = {}
        """Questions under way, by the epoch in which they were asked."""
        self._retry_at = float("-inf")
        """Until when the database counts as away; in the past while it answers."""

    async def ask(self, key: KeyT, question: Callable[[], Awaitable[ValueT]]) -> ValueT:
        """The answer of a moment ago, or else that of `question`, which reads the database and then may refuse.

        Raises:
            WeftError: What the question raised. For a CapacityError, only without an answer of the last minute.
        """
        read_at, known = self._entries.get(key, (float("-inf"), None))
        asked_at, epoch = self._monotonic(), self._epoch
        right_at = read_at
        """When it was last known to be the database's answer."""
        if self._changes is not None and known is not None:
            self._changes.look()
            right_at = max(read_at, self._changes.unchanged_at)
        is_fresh = asked_at - right_at < MAX_AGE_S
        is_due = asked_at - read_at >= MAX_CONFIRMED_S
        serves = known is not None and asked_at - right_at < MAX_OUTAGE_S
        if known is not None and ((is_fresh and not is_due) or (serves and asked_at < self._retry_at)):
            return known
        reading = self._readings.get((epoch, key))
        if reading is None:
            reading = asyncio.create_task(self._read(key, question, epoch, PATIENCE_S if serves else None))
            self._readings[epoch, key] = reading
            reading.add_done_callback(lambda done: self._end((epoch, key), done))
        if known is not None and is_fresh:
            return known
        try:
            return await asyncio.shield(reading)
        except CapacityError:
            if known is not None and serves and epoch == self._epoch:
                return known
            raise

    async def _read(
        self, key: KeyT, question: Callable[[], Awaitable[ValueT]], epoch: int, patience_s: float | None
    ) -> ValueT:
        asked_at = self._monotonic()
        if self._retry_at > float("-inf"):
            self._retry_at = asked_at + PATIENCE_S
        try:
            async with asyncio.timeout(patience_s):
                answer = await question()
        except (CapacityError, TimeoutError) as error:
            self._retry_at = self._monotonic() + MAX_AGE_S
            raise unavailable() from error
        except WeftError:
            self._retry_at = float("-inf")  # a refusal is an answer of the database as well
            if epoch == self._epoch:
                self._entries.pop(key, None)
            raise
        self._retry_at = float("-inf")
        if epoch == self._epoch:
            if len(self._entries) >= self._max_entries:
                self._entries.clear()
            self._entries[key] = (asked_at, answer)
        return answer

    def _end(self, question: tuple[int, KeyT], reading: asyncio.Task[ValueT]) -> None:
        del self._readings[question]
        if not reading.cancelled():
            reading.exception()  # known to those who waited; of one that nobody waited for, there is nothing to tell

    def forget(self) -> None:
        """Something changed: no earlier answer counts any more."""
        self._epoch += 1
        self._entries.clear()
