"""Batches: what is due, who runs it, and the results of its lines.

One server runs a batch at a time. It says every few seconds that it goes on; when it no longer does, another one takes
the batch over. Each write asks whether the writer still owns the batch, so clocks that differ do no harm. A line's
result and its usage event are one transaction under ids made of batch and line: both are there once, or neither is.
"""

from __future__ import annotations

import builtins
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import ConflictError, InvalidRequestError, NotFoundError
from weft.registry import usage
from weft.registry.clock import Clock, to_micros
from weft.registry.database import Database
from weft.registry.files import OPEN, StoredFile, add_file, file_row
from weft.registry.models import BatchResultRow, BatchRow
from weft.registry.names import check_text
from weft.registry.records import Page, UsageEvent

WINDOW = timedelta(hours=24)
MAX_OPEN = 100
"""Batches of a tenant that have not ended."""
MAX_HELD = 256
"""Batches that one server runs at once."""
LEASE_S = 30.0
KEPT = timedelta(days=30)
"""How long a batch that ended is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch. Times are microseconds since 1970."""

    id: str
    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    status: str
    output_file_id: str
    error_file_id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)
    errors: Sequence[Mapping[str, Any]] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    created_at: int
    expires_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """What became of one line."""

    batch_id: str
    line: int
    is_error: bool
    text: str
    """A line of the output file or the error file."""
    event: UsageEvent | None
    """None for a line that was refused before it ran."""


class Batches:
    """All tenants' batches. Thread: the event loop's.

    Each method is one transaction and raises `CapacityError` when the database cannot answer.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def create(
        self, tenant_id: str, key_id: str | None, input_file_id: str, endpoint: str, labels: Mapping[str, str]
    ) -> Batch:
        """Ask for a batch; some server runs it.

        Raises:
            NotFoundError: The tenant has no such file.
            InvalidRequestError: The file is no input, or `labels` cannot be stored.
            ConflictError: The tenant has too many batches open; code batch.too_many_open.
        """
        now = self._clock()
        for text in (*labels, *labels.values()):
            check_text(text, "metadata", 512)
        async with self._database.write() as session:
            file = await file_row(session, tenant_id, input_file_id, now)
            if file.purpose != "batch":
                raise InvalidRequestError("The file must have been made with the purpose batch.", param="input_file_id")
            is_open = (BatchRow.tenant_id == tenant_id, BatchRow.status.in_(OPEN))
            if (await session.scalar(select(func.count()).where(*is_open)) or 0) >= MAX_OPEN:
                raise ConflictError(
                    f"A tenant may have {MAX_OPEN} batches open; cancel one, or wait for an end.",
                    code="batch.too_many_open",
                )
            row = BatchRow(
                id=f"batch_{to_micros(now):014x}{secrets.token_hex(6)}",
                tenant_id=tenant_id,
                key_id=key_id or "",
                endpoint=endpoint,
                input_file_id=file.id,
                status="validating",
                created_at=to_micros(now),
                expires_at=to_micros(now + WINDOW),
                labels=dict(labels),
                **dict.fromkeys(("output_file_id", "error_file_id", "owner"), ""),
                **dict.fromkeys(("total", "completed", "failed", "lease_until"), 0),
                times={},
                errors=[],
            )
            session.add(row)
            return _batch(row)

    async def get(self, tenant_id: str, batch_id: str) -> Batch:
        """One of a tenant's batches; raises NotFoundError."""
        async with self._database.read() as session:
            return _batch(await _row(session, tenant_id, batch_id))

    async def list(self, tenant_id: str, after: str | None, limit: int) -> Page[Batch]:
        """A tenant's batches, newest first; those older than the one with the id `after`."""
        own = select(BatchRow).where(BatchRow.tenant_id == tenant_id).order_by(BatchRow.id.desc()).limit(limit + 1)
        if after is not None:
            own = own.where(BatchRow.id < check_text(after, "after", 64))
        async with self._database.read() as session:
            items = [_batch(row) for row in await session.scalars(own)]
        return Page(items=tuple(items[:limit]), next=items[limit - 1].id if len(items) > limit else None)

    async def cancel(self, tenant_id: str, batch_id: str) -> Batch:
        """End a batch early; cancelling it again changes nothing.

        Raises:
            NotFoundError: The tenant has none of this id.
            ConflictError: It has ended, or is about to; code batch.ended.
        """
        async with self._database.write() as session:
            row = await _row(session, tenant_id, batch_id)
            if row.status in ("validating", "in_progress"):
                _enter(row, "cancelling", self._clock())
            elif row.status not in ("cancelling", "cancelled"):
                raise ConflictError(f"The batch is {row.status}: it cannot be cancelled.", code="batch.ended")
            return _batch(row)

    async def claim(self, owner: str) -> tuple[Batch, ...]:
        """The batches that `owner` runs from now on: those it runs already, and those that nobody does.

        Where there are too many, each tenant's oldest come first, so that one tenant does not take all places.
        """
        now = to_micros(self._clock())
        free = or_(BatchRow.owner == owner, BatchRow.lease_until < now)
        due = select(BatchRow).where(BatchRow.status.in_(OPEN), free).order_by(BatchRow.id)
        async with self._database.read() as session:
            if not (await session.scalars(due.limit(1))).all():
                return ()
        async with self._database.write() as session:
            rows = list(await session.scalars(due))
            places: Counter[str] = Counter()
            ranks = {}
            for row in rows:
                ranks[row.id] = (row.owner != owner, places[row.tenant_id])
                places[row.tenant_id] += 1
            held = sorted(rows, key=lambda row: ranks[row.id])[:MAX_HELD]
            for row in held:
                row.owner, row.lease_until = owner, now + int(LEASE_S * 1e6)
            return tuple(map(_batch, held))

    async def release(self, owner: str) -> None:
        """Leave all batches of `owner` to whoever comes first."""
        async with self._database.write() as session:
            for row in await session.scalars(select(BatchRow).where(BatchRow.owner == owner)):
                row.owner, row.lease_until = "", 0

    async def begin(self, batch_id: str, owner: str, total: int) -> Batch | None:
        """Its input is sound: so many lines may run. None where the batch is not the owner's any more."""
        async with self._database.write() as session:
            row = await _own(session, batch_id, owner, "validating", "cancelling")
            if row is not None:
                row.total = total
                if row.status == "validating":
                    _enter(row, "in_progress", self._clock())
            return None if row is None else _batch(row)

    async def fail(self, batch_id: str, owner: str, errors: Sequence[Mapping[str, Any]]) -> None:
        """Its input is not sound."""
        async with self._database.write() as session:
            row = await _own(session, batch_id, owner, *OPEN)
            if row is not None:
                row.errors = [dict(error) for error in errors]
                _enter(row, "failed", self._clock())

    async def add_results(self, owner: str, results: Sequence[LineResult]) -> frozenset[tuple[str, int]]:
        """Write down results and their usage, those of lines that have none yet, in one transaction.

        Returns:
            Batch and line of those that count: not those of batches that are the owner's no more, or are ending.
        """
        written: set[tuple[str, int]] = set()
        async with self._database.write() as session:
            insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
            new = insert(BatchResultRow).on_conflict_do_nothing().returning(BatchResultRow.line)
            for batch_id in dict.fromkeys(result.batch_id for result in results):
                row = await _own(session, batch_id, owner, "in_progress", "cancelling")
                if row is None or "finalizing_at" in row.times:
                    continue
                of_lines = {result.line: result for result in results if result.batch_id == batch_id}
                values = [
                    {"batch_id": batch_id, "line": line, "is_error": result.is_error, "result": result.text}
                    for line, result in of_lines.items()
                ]
                added = [of_lines[line] for line in await session.scalars(new, values)]
                row.failed += sum(result.is_error for result in added)
                row.completed += sum(not result.is_error for result in added)
                await usage.insert_events(session, [usage.checked_event(each.event) for each in added if each.event])
                written.update((batch_id, result.line) for result in added)
        return frozenset(written)

    async def done_lines(self, batch_id: str) -> frozenset[int]:
        """Lines that have a result."""
        async with self._database.read() as session:
            done = select(BatchResultRow.line).where(BatchResultRow.batch_id == batch_id)
            return frozenset(await session.scalars(done))

    async def results(self, batch_id: str, after: int, limit: int) -> builtins.list[tuple[int, bool, str]]:
        """Line, whether it failed, and text of results, by line, those behind the line `after`."""
        table = BatchResultRow.__table__.c
        found = select(table.line, table.is_error, table.result).where(table.batch_id == batch_id, table.line > after)
        async with self._database.read() as session:
            rows = await session.execute(found.order_by(table.line).limit(limit))
            return [(row.line, row.is_error, row.result) for row in rows]

    async def stop(self, batch_id: str, owner: str) -> Batch | None:
        """Take no more results; what there is becomes files. None where the batch is not the owner's any more."""
        async with self._database.write() as session:
            row = await _own(session, batch_id, owner, *OPEN)
            if row is None:
                return None
            if "finalizing_at" not in row.times:
                _enter(row, "cancelling" if row.status == "cancelling" else "finalizing", self._clock())
                row.times = {**row.times, "finalizing_at": to_micros(self._clock())}
            return _batch(row)

    async def end(
        self,
        batch: Batch,
        owner: str,
        status: str,
        files: Mapping[str, StoredFile],
        failed: int,
        store: Callable[[], Awaitable[None]],
    ) -> None:
        """Make files of the results. `store` makes their blobs durable, last.

        Args:
            batch: Which.
            owner: Who ran it; nothing changes where it is another's by now.
            status: completed, cancelled, expired or failed.
            files: By the column that is to name them: output_file_id, error_file_id.
            failed: Lines in the error file.
            store: Called where the batch is still the owner's.
        """
        async with self._database.write() as session:
            row = await _own(session, batch.id, owner, *OPEN)
            if row is None:
                return
            for name, file in files.items():
                add_file(session, file)
                setattr(row, name, file.id)
            row.failed = failed
            _enter(row, status, self._clock())
            await session.execute(delete(BatchResultRow).where(BatchResultRow.batch_id == batch.id))
            await session.flush()
            await store()

    async def forget_old(self) -> int:
        """Remove batches that ended long ago; returns how many."""
        old = (BatchRow.status.not_in(OPEN), BatchRow.created_at <= to_micros(self._clock() - KEPT))
        async with self._database.write() as session:
            return len((await session.scalars(delete(BatchRow).where(*old).returning(BatchRow.id))).all())


def _enter(row: BatchRow, status: str, now: datetime) -> None:
    row.status = status
    row.times = {**row.times, f"{status}_at": row.times.get(f"{status}_at", to_micros(now))}


async def _row(session: AsyncSession, tenant_id: str, batch_id: str) -> BatchRow:
    row = await session.get(BatchRow, check_text(batch_id, "batch", 512))
    if row is None or row.tenant_id != tenant_id:
        raise NotFoundError("There is no such batch.")
    return row


async def _own(session: AsyncSession, batch_id: str, owner: str, *statuses: Collection[str]) -> BatchRow | None:
    row = await session.get(BatchRow, batch_id)
    return row if row is not None and row.owner == owner and row.status in statuses else None


def _batch(row: BatchRow) -> Batch:
    return Batch(**{each.name: getattr(row, each.name) for each in fields(Batch)})
