"""The usage ledger: every event counts once, from the journal on disk to the database.

An event is acknowledged when the journal has it on disk. One task moves the journal to SQL in batches. At the start the
files that a crash left are replayed, and a request without a final event is billed from its last progress mark. A
gateway that streamed its answer knows better what the client got, so a replica gives it a moment to say so first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Literal

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from manylora.errors import CapacityError
from manylora.registry.db.clock import Clock, to_micros, utc_now
from manylora.registry.db.database import Database, turn
from manylora.registry.db.sqlite import LOST
from manylora.registry.records import (
    AdapterUsage,
    LatencyReport,
    Page,
    UsageEvent,
    UsageQuery,
    UsageReport,
)
from manylora.registry.usage import latency
from manylora.registry.usage import query as usage_query
from manylora.registry.usage import write as usage
from manylora.registry.usage.journal import Journal, read_lines
from manylora.registry.usage.prices import PriceTable

INTERVAL_S = 1.0
"""Seconds from an event until the journal is moved to the database; also the wait after a failed move."""
LOOK_S = 1.0
"""Seconds between two looks at whether the database's files are still there."""
BATCH_EVENTS = 500
INTERRUPTED = "interrupted"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A journal line: the end of a request (`final`), or its progress (`mark`)."""

    kind: Literal["final", "mark"]
    event: UsageEvent


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Entry)


@dataclass(eq=False)
class UsageLedger:
    """Records usage durably, and answers queries.

    Invariant: an acknowledged final event is in the database or in a journal file. A file is removed only after the
    transaction with its events has been committed, and after the marks in it of running requests were written again. So
    a crash at any moment loses nothing, and the event's id prevents that it counts twice.

    Thread: the event loop that started it.
    """

    database: Database
    journal: Journal
    _: KW_ONLY
    clock: Clock = utc_now
    monotonic: Callable[[], float] = time.monotonic
    interval_s: float = INTERVAL_S

    def __post_init__(self) -> None:
        self._open_marks: dict[str, UsageEvent] = {}
        self._unwritten: set[str] = set()
        self._has_unmoved = asyncio.Event()
        self._unsealed_since: float | None = None
        self._sealed_since: float | None = None
        self._moving = asyncio.Lock()
        self._num_flushes = 0
        self._last_good_flush = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, grace_s: float = 0.0) -> None:
        """Replay what a crash left in the journal's folder, and start the task that moves events.

        Args:
            grace_s: How long requests without an end wait until they are billed from their marks.

        Raises:
            CapacityError: The database cannot answer; the journal is closed then.
        """
        try:
            cut_off = await self._read_marks()
            if not grace_s:
                self._unwritten.update(cut_off)
            await self.flush()
        except BaseException:
            await self.journal.close()
            raise
        works = {"mover": self._move_forever(), "files": self._watch_files()}
        if cut_off and grace_s:
            works["biller"] = self._bill_later(cut_off, grace_s)
        self._tasks = [
            asyncio.create_task(work, name=f"manylora-usage-{name}") for name, work in works.items()
        ]

    def check(self) -> None:
        """Return if the end of a request can be recorded, as far as is known; ask before computing for it.

        Raises:
            CapacityError: It cannot; code storage.full, storage.unavailable or db.lost.
        """
        self.journal.check()
        self.database.check_files()

    async def close(self) -> None:
        """Move the rest of the journal if the database answers; else it is replayed at the next start."""
        for task in self._tasks:
            async with self._moving:  # not in the middle of a transaction
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        try:
            await self._flush_or_log()
        finally:
            await self.journal.close()

    def mint_id(self) -> str:
        """A new ledger id; ids sort by the time they were minted."""
        return f"use_{to_micros(self.clock()):014x}{secrets.token_hex(8)}"

    async def record(self, event: UsageEvent) -> None:
        """Record the end of a request. Its client may see the end only after this.

        An id counts once, however often it is recorded; the first event that is written counts.

        Raises:
            CapacityError: The event is not on disk; code storage.full or storage.unavailable. The request is billed
                from its last progress mark.
            InvalidRequestError: A field cannot be stored.
        """
        # The event is recorded even if the caller is cancelled while it waits.
        await asyncio.shield(self._append_final(usage.checked_event(event)))

    def progress(self, event: UsageEvent) -> None:
        """Record the progress of a request after its tokens were sent. Counts only if no `record` follows.

        Args:
            event: The event as if the request ended now, under the id of its final event.

        Raises:
            InvalidRequestError: A field cannot be stored.
        """
        event = usage.checked_event(event)
        self._open_marks[event.id] = event
        with contextlib.suppress(CapacityError):
            self.journal.append_soon(_encoder.encode(_Entry("mark", event)))

    async def flush(self) -> None:
        """Move everything acknowledged until now into the database.

        Raises:
            CapacityError: Database or journal cannot be written now; nothing is lost, try again.
        """
        asked_at = self._num_flushes
        async with turn(self._moving):
            if self._last_good_flush > asked_at:
                return  # a flush that began after this call has moved everything
            self._num_flushes = this = self._num_flushes + 1
            if self._sealed_since is None:
                self._sealed_since = self._unsealed_since
            self._unsealed_since = None
            self._has_unmoved.clear()
            try:
                # One file at a time: after a long outage all files may not fit into memory.
                for path in await self.journal.seal():
                    try:
                        entries, num_damaged = await asyncio.to_thread(
                            read_lines, path, _decoder.decode
                        )
                    except FileNotFoundError:
                        message = (
                            "usage journal: %s was deleted before it was moved; its usage is lost"
                        )
                        logger.error(message, path)  # noqa: TRY400
                        await self.journal.discard(path, is_damaged=False)
                        continue
                    await self._insert(entry.event for entry in entries if entry.kind == "final")
                    # On a full disk a file with marks stays; files without marks are removed and make room.
                    with contextlib.suppress(CapacityError):
                        await self._carry_marks(entries)
                        await self._discard(path, num_damaged)
                await self._bill_unwritten()
            except OSError as error:
                raise CapacityError(
                    "The usage journal cannot be read now.", code="storage.unavailable"
                ) from error
            self._sealed_since = None
            self._last_good_flush = this

    async def query(self, query: UsageQuery, prices: PriceTable | None = None) -> UsageReport:
        """Sums of usage in the database, with their cost. Call `flush` first to include the latest events.

        Raises:
            InvalidRequestError: The query is wrong.
        """
        async with self.database.read() as session:
            return await usage_query.query(session, query, prices)

    async def events(self, query: UsageQuery) -> Page[UsageEvent]:
        """Single events in the database, oldest first.

        Raises:
            InvalidRequestError: The query is wrong.
        """
        async with self.database.read() as session:
            return await usage_query.list_events(session, query)

    async def latency(self, query: UsageQuery) -> LatencyReport:
        """Times to the first token, and where adapters were, of the whole hours of a range.

        Raises:
            InvalidRequestError: The query is wrong, or the answer would be too long.
        """
        async with self.database.read() as session:
            return await latency.query(session, query)

    async def summary(self, adapter_ids: Iterable[str]) -> Mapping[str, AdapterUsage]:
        """All usage of these adapters by all tenants; ids without usage are absent."""
        async with self.database.read() as session:
            return await usage.summary(session, adapter_ids)

    async def month_tokens(self, holder_id: str, month: datetime, but: Collection[str] = ()) -> int:
        """Tokens of a calendar month that were billed to a tenant or a key, with the latest events.

        Args:
            holder_id: The tenant or the key.
            month: First moment of the month.
            but: Ids of events that do not count; ids may be added during the call.

        Raises:
            CapacityError: Database or journal cannot answer now.
        """
        await self.flush()
        async with self.database.read() as session:
            return await usage.month_tokens_without(session, holder_id, month, but)

    @property
    def unmoved_since(self) -> float:
        """Monotonic second of the oldest event that is not in the database; infinite if there is none."""
        return min(
            (moment for moment in (self._sealed_since, self._unsealed_since) if moment is not None),
            default=inf,
        )

    def lag_s(self) -> float:
        """Age in seconds of the oldest event that is not in the database; 0 if there is none."""
        return max(self.monotonic() - self.unmoved_since, 0.0)

    async def _append_final(self, event: UsageEvent) -> None:
        # In one go with the append: a flush in between would leave the event, and not be told of it.
        if self._unsealed_since is None:
            self._unsealed_since = self.monotonic()
        self._has_unmoved.set()
        try:
            await self.journal.append(_encoder.encode(_Entry("final", event)))
        except CapacityError:
            self._unwritten.add(event.id)
            raise
        self._open_marks.pop(event.id, None)

    async def _bill_unwritten(self) -> None:
        """Bill the requests with an end that the journal could not write, from their last marks."""
        ids = frozenset(self._unwritten)
        marks = [self._open_marks[each] for each in ids & self._open_marks.keys()]
        await self._insert(replace(mark, status=INTERRUPTED) for mark in marks)
        self._unwritten -= ids
        for each in ids:
            self._open_marks.pop(each, None)

    async def _read_marks(self) -> list[str]:
        """Find the requests in the journal that have marks and no end: they were cut off when the last process died.

        A mark may come after its end in the journal. The end is moved to the database before a mark is billed, and the
        first event of an id counts.

        Returns:
            Their ids.
        """
        num_ends = 0
        for path in self.journal.closed:
            entries, _ = await asyncio.to_thread(read_lines, path, _decoder.decode)
            for entry in sorted(entries, key=lambda entry: entry.kind == "final"):
                event = entry.event
                if entry.kind == "final":
                    num_ends += 1
                    self._open_marks.pop(event.id, None)
                    continue
                last = self._open_marks.get(event.id)
                if last is None or last.completion_tokens <= event.completion_tokens:
                    self._open_marks[event.id] = event
        if self.journal.closed:
            logger.info(
                "usage journal: replaying %d ends and %d cut-off requests",
                num_ends,
                len(self._open_marks),
            )
        return list(self._open_marks)

    async def _bill_later(self, ids: Collection[str], grace_s: float) -> None:
        """Bill requests that were cut off when the last process died, unless somebody else has billed them by then."""
        await asyncio.sleep(grace_s)
        self._unwritten.update(ids)
        self._has_unmoved.set()

    async def _carry_marks(self, entries: Iterable[_Entry]) -> None:
        """Write the marks of running requests again, before the file with them is removed."""
        marked = {entry.event.id for entry in entries if entry.kind == "mark"}
        marks = [
            _encoder.encode(_Entry("mark", self._open_marks[each]))
            for each in marked & self._open_marks.keys()
        ]
        if marks:
            await self.journal.append(*marks)

    async def _insert(self, events: Iterable[UsageEvent]) -> None:
        rest = list(events)
        while rest:
            batch, rest = rest[:BATCH_EVENTS], rest[BATCH_EVENTS:]
            async with self.database.write() as session:
                await usage.insert_events(session, batch)

    async def _discard(self, path: Path, num_damaged: int) -> None:
        if num_damaged:
            logger.error(
                "usage journal: %d damaged lines in %s, kept as .damaged", num_damaged, path.name
            )
        await self.journal.discard(path, is_damaged=num_damaged > 0)

    async def _move_forever(self) -> None:
        while True:
            await self._has_unmoved.wait()
            await asyncio.sleep(self.interval_s)
            if not await self._flush_or_log():
                await asyncio.sleep(self.interval_s)
                self._has_unmoved.set()  # not before: another caller's flush may have failed meanwhile

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.database.look_for_files()

    async def _flush_or_log(self) -> bool:
        try:
            await self.flush()
        except (CapacityError, SQLAlchemyError) as error:
            if not (isinstance(error, CapacityError) and error.code == LOST):  # which was said once
                logger.warning(
                    "usage journal: cannot be moved now, %.0f s behind: %s", self.lag_s(), error
                )
            return False
        return True
