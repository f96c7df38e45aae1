"""Answers of the database that serve for a moment, and the transactions that make them invalid.

An answer counts for a second after it was read. Where it depends only on what the audit log records, it counts on as
long as `Changes` sees no new entry there: one small query for all answers, and no request waits for it. A change in
this process calls `forget`, which drops all answers; one that was being read meanwhile is not kept. A change by another
process is seen after a second. Concurrent lookups of one key share a query.

While the database is away or slow, an answer serves for a minute: callers known before an outage go on. One
caller at a time finds out whether the outage is over; the others do not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sqlalchemy import Select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from manylora.errors import CapacityError, ManyloraError
from manylora.registry.db.clock import Clock
from manylora.registry.db.database import Database, unavailable
from manylora.registry.names import check_text
from manylora.registry.records import Page

MAX_ENTRIES = 10_000
"""Answers of one map; when there would be more, all are dropped."""
MAX_AGE_S = 1.0
LOOK_S = 0.25
"""Least seconds between two queries for changes; there is none while nobody asks."""
MAX_CONFIRMED_S = 300.0
"""An answer of this age is read again even if the audit log has nothing new: somebody may have edited the database."""
MAX_OUTAGE_S = 60.0
PATIENCE_S = 2.0
"""Longest wait for a newer answer while an older one may serve."""

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
RowT = TypeVar("RowT")


class Changes:
    """Looks for changes in the audit log, and drops the answers that depend on it when there is one.

    Thread: one event loop.

    Args:
        last_change: Reads the number of the last change.
        monotonic: Seconds that never jump.
    """

    def __init__(
        self, last_change: Callable[[], Awaitable[int]], monotonic: Callable[[], float]
    ) -> None:
        self.unchanged_at = float("-inf")
        """Time of the last query that found no change."""
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
        """Start a query for changes unless the last one is recent; returns at once."""
        now_s = self._monotonic()
        if self._look is None and now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._look = asyncio.create_task(self._read(now_s))

    async def _read(self, asked_at: float) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                number = await self._last_change()
        except (CapacityError, TimeoutError):
            return  # answers get old, and the next caller gets the error
        finally:
            self._look = None
        if number != self._number:
            self._number = number
            for forget in self._forget:
                forget()
        self.unchanged_at = asked_at


class ReadThroughCache(Generic[KeyT, ValueT]):
    """A bounded map of answers that age. Thread: one event loop.

    Args:
        monotonic: Seconds that never jump.
        changes: Tells since when nothing has changed; None for answers whose changes are not in the audit log.
    """

    def __init__(self, monotonic: Callable[[], float], changes: Changes | None = None) -> None:
        self._monotonic = monotonic
        self._changes = changes
        if changes is not None:
            changes.follow(self.forget)
        self._entries: dict[KeyT, tuple[float, ValueT]] = {}
        self._epoch = 0
        self._readings: dict[tuple[int, KeyT], asyncio.Task[ValueT]] = {}
        """Queries under way, by the epoch in which they began and their key."""
        self._retry_at = float("-inf")
        """The database counts as away until then."""

    async def ask(self, key: KeyT, question: Callable[[], Awaitable[ValueT]]) -> ValueT:
        """The answer that is kept for `key`, or else that of `question`, which reads the database.

        Raises:
            ManyloraError: What `question` raised. A CapacityError only where no answer of the last minute is kept.
        """
        read_at, known = self._entries.get(key, (float("-inf"), None))
        asked_at = self._monotonic()
        epoch = self._epoch
        right_at = read_at  # the last moment at which it was the database's answer
        if self._changes is not None and known is not None:
            self._changes.look()
            right_at = max(read_at, self._changes.unchanged_at)
        is_fresh = asked_at - right_at < MAX_AGE_S
        is_due = asked_at - read_at >= MAX_CONFIRMED_S
        serves = known is not None and asked_at - right_at < MAX_OUTAGE_S
        if known is not None and (
            (is_fresh and not is_due) or (serves and asked_at < self._retry_at)
        ):
            return known
        reading = self._readings.get((epoch, key))
        if reading is None:
            reading = asyncio.create_task(
                self._read(key, question, epoch, PATIENCE_S if serves else None)
            )
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
        self,
        key: KeyT,
        question: Callable[[], Awaitable[ValueT]],
        epoch: int,
        patience_s: float | None,
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
        except ManyloraError:
            self._retry_at = float("-inf")  # a refusal is an answer of the database as well
            if epoch == self._epoch:
                self._entries.pop(key, None)
            raise
        self._retry_at = float("-inf")
        if epoch == self._epoch:
            if len(self._entries) >= MAX_ENTRIES:
                self._entries.clear()
            self._entries[key] = (asked_at, answer)
        return answer

    def _end(self, question: tuple[int, KeyT], reading: asyncio.Task[ValueT]) -> None:
        del self._readings[question]
        if not reading.cancelled():
            reading.exception()  # else asyncio logs an error that nobody waited for

    def forget(self) -> None:
        """Drop all answers, and do not keep those being read now."""
        self._epoch += 1
        self._entries.clear()


class Forgets(Protocol):
    """Answers that a change makes invalid."""

    def forget(self) -> None:
        """Drop the answers, and do not keep those being read now."""


@dataclass(eq=False)
class Transactions:
    """Base of the parts of the registry. Each public method of a part is one transaction."""

    database: Database
    clock: Clock

    @asynccontextmanager
    async def _change(self, *touched: Forgets) -> AsyncIterator[AsyncSession]:
        """A transaction that writes, and then drops the answers that it touches.

        It drops no others: these may have to serve in an outage right after the change.
        """
        has_begun = False
        try:
            async with self.database.write() as session:
                has_begun = True
                yield session
        finally:
            # Also when the caller is cancelled: the change may have been committed.
            for answers in touched if has_begun else ():
                answers.forget()

    async def _page(
        self,
        own: Select[RowT],
        key: InstrumentedAttribute[str],
        after: str | None,
        limit: int,
        *,
        newest_first: bool = False,
    ) -> Page[RowT]:
        """Rows in the order of `key`; those behind the one whose key is `after`."""
        if after is not None:
            last = check_text(after, "after", 64)
            own = own.where(key < last if newest_first else key > last)
        in_order = own.order_by(key.desc() if newest_first else key).limit(limit + 1)
        rows = [row for (row,) in await self.database.rows(in_order)]
        return Page.of(rows, limit, lambda row: str(getattr(row, key.key)))
