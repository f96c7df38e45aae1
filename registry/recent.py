"""Answers read a moment ago, so that each request need not ask the database again.

Correct because whoever changes the database says so: `forget` drops everything, and an answer whose question was
asked before the change is not remembered after it. What another process changed is seen after a second. Who asks for
an answer that is nearly as old has it read again meanwhile, so that a key in use seldom waits for the database; all who
ask at the same time wait for one reading.

While the database cannot answer, or is slow to, an answer serves for a minute, so that an outage stops no one who was
there before it. Meanwhile one asker at a time finds out whether it is over; the others do not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from weft.errors import CapacityError, WeftError
from weft.registry.database import unavailable

MAX_ENTRIES = 10_000
MAX_AGE_S = 1.0
REFRESH_S = 0.6
"""From this age on an answer is read again while it still serves."""
MAX_OUTAGE_S = 60.0
PATIENCE_S = 2.0
"""How long who has an answer waits for a newer one."""

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class Recent(Generic[KeyT, ValueT]):
    """A bounded map whose entries age. Thread: one event loop."""

    def __init__(self, monotonic: Callable[[], float], max_entries: int = MAX_ENTRIES) -> None:
        self._monotonic = monotonic
        self._max_entries = max_entries
        self._entries: dict[KeyT, tuple[float, ValueT]] = {}
        self._epoch = 0
        self._readings: dict[tuple[int, KeyT], asyncio.Task[ValueT]] = {}
        """Questions under way, by the epoch in which they were asked."""
        self._retry_at = float("-inf")
        """Until when the database counts as away; in the past while it answers."""

    async def ask(self, key: KeyT, question: Callable[[], Awaitable[ValueT]]) -> ValueT:
        """The answer of a moment ago, or else that of `question`, which reads the database.

        Raises:
            WeftError: What the question raised. For a CapacityError, only without an answer of the last minute.
        """
        read_at, known = self._entries.get(key, (float("-inf"), None))
        asked_at, epoch = self._monotonic(), self._epoch
        age = asked_at - read_at
        serves = known is not None and age < MAX_OUTAGE_S
        if known is not None and serves and (age < REFRESH_S or asked_at < self._retry_at):
            return known
        reading = self._readings.get((epoch, key))
        if reading is None:
            reading = asyncio.create_task(self._read(key, question, epoch, PATIENCE_S if serves else None))
            self._readings[epoch, key] = reading
            reading.add_done_callback(lambda done: self._end((epoch, key), done))
        if known is not None and age < MAX_AGE_S:
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
