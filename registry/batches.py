"""Batches: what is due, who runs it, and the results of its lines.

One server runs a batch at a time. It says every few seconds that it goes on; when it no longer does, another one takes
the batch over. Each write asks whether the writer still owns the batch, so clocks that differ do no harm. A line's
result and its usage event are one transaction under ids made of batch and line: both are there once, or neither is.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar

from sqlalchemy import ColumnElement, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.config import BatchConfig
from manylora.errors import ConflictError, ForbiddenError, InvalidRequestError, NotFoundError
from manylora.registry.cache import Transactions
from manylora.registry.db.clock import to_micros, to_seconds
from manylora.registry.db.database import insert_into
from manylora.registry.db.models import BatchResultRow, BatchRow, FileRow
from manylora.registry.names import check_text, storable
from manylora.registry.records import Page, UsageEvent
from manylora.registry.usage import write as usage

KEPT = timedelta(days=30)
"""Life of a file, and time for which a batch is listed."""
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that still need their input."""
Purpose = Literal["batch", "batch_output"]
RowT = TypeVar("RowT", FileRow, BatchRow)


class Files(Transactions):
    """The part of the registry that keeps all tenants' files."""

    async def bytes_left(self, tenant_id: str, limits: BatchConfig) -> int:
        """Bytes that the tenant's next file may have.

        Raises:
            ForbiddenError: None, or it has too many files; codes quota.files and quota.file_bytes.
        """
        async with self.database.read() as session:
            return await _bytes_left(session, tenant_id, limits, self.clock(), needed=1)

    async def add(
        self, file: FileRow, limits: BatchConfig, store: Callable[[], Awaitable[object]]
    ) -> None:
        """Keep a file. `store` makes its blob durable, last: a sweep deletes a blob that no row refers to.

        Raises:
            ForbiddenError: The tenant's files are too many or too large; codes quota.files and quota.file_bytes.
        """
        async with self.database.write() as session:
            await _bytes_left(session, file.tenant_id, limits, self.clock(), needed=file.size_bytes)
            session.add(file)
            await session.flush()
            await store()

    async def get(self, tenant_id: str, file_id: str) -> FileRow:
        """One of a tenant's files.

        Raises:
            NotFoundError: The tenant has none of this id, or it has expired.
        """
        async with self.database.read() as session:
            return await file_row(session, tenant_id, file_id, self.clock())

    async def list(
        self, tenant_id: str, purpose: str | None, after: str | None, limit: int
    ) -> Page[FileRow]:
        """A tenant's files, newest first; those older than the one with the id `after`."""
        wanted = [FileRow.expires_at > to_seconds(self.clock())]
        if purpose is not None:
            wanted.append(FileRow.purpose == check_text(purpose, "purpose", 64))
        async with self.database.read() as session:
            return await newest_first(session, FileRow, tenant_id, after, limit, *wanted)

    async def delete(self, tenant_id: str, file_id: str) -> FileRow:
        """Forget a file; the caller deletes the blob, if nothing else refers to it.

        Raises:
            NotFoundError: The tenant has none of this id.
            ConflictError: A batch that has not ended needs it; code file.in_use.
        """
        async with self.database.write() as session:
            row = await file_row(session, tenant_id, file_id, self.clock())
            needed = select(BatchRow.id).where(
                BatchRow.input_file_id == row.id, BatchRow.status.in_(OPEN)
            )
            user = await session.scalar(needed.limit(1))
            if user is not None:
                message = f"The batch {user} has not ended and needs this file: cancel it, or wait for its end."
                raise ConflictError(message, code="file.in_use")
            await session.delete(row)
            return row

    async def forget_expired(self) -> int:
        """Remove files whose time is over and that no batch needs; returns how many."""
        needed = select(BatchRow.input_file_id).where(BatchRow.status.in_(OPEN))
        old = (FileRow.expires_at <= to_seconds(self.clock()), FileRow.id.not_in(needed))
        async with self.database.write() as session:
            return len(
                (await session.scalars(delete(FileRow).where(*old).returning(FileRow.id))).all()
            )


def new_file(
    tenant_id: str, filename: str, purpose: Purpose, now: datetime, *, size_bytes: int, sha256: str
) -> FileRow:
    """A file that is not stored yet; ids are in the order in which files were made."""
    return FileRow(
        id=f"file-{to_micros(now):014x}{secrets.token_hex(6)}",
        tenant_id=tenant_id,
        filename=storable(filename, 255),
        purpose=purpose,
        size_bytes=size_bytes,
        sha256=sha256,
        created_at=to_seconds(now),
        expires_at=to_seconds(now + KEPT),
    )


async def file_row(session: AsyncSession, tenant_id: str, file_id: str, now: datetime) -> FileRow:
    """A tenant's file; raises NotFoundError."""
    row = await session.get(FileRow, check_text(file_id, "file", 512))
    if row is None or row.tenant_id != tenant_id or row.expires_at <= to_seconds(now):
        raise NotFoundError("There is no such file.")
    return row


async def newest_first(
    session: AsyncSession,
    table: type[RowT],
    tenant_id: str,
    after: str | None,
    limit: int,
    *where: ColumnElement[bool],
) -> Page[RowT]:
    """A tenant's rows whose ids begin with the time; those older than the one with the id `after`."""
    own = (
        select(table)
        .where(table.tenant_id == tenant_id, *where)
        .order_by(table.id.desc())
        .limit(limit + 1)
    )
    if after is not None:
        own = own.where(table.id < check_text(after, "after", 64))
    return Page.of((await session.scalars(own)).all(), limit, lambda row: row.id)


async def _bytes_left(
    session: AsyncSession, tenant_id: str, limits: BatchConfig, now: datetime, needed: int
) -> int:
    own = (FileRow.tenant_id == tenant_id, FileRow.expires_at > to_seconds(now))
    sums = select(func.count(), func.coalesce(func.sum(FileRow.size_bytes), 0)).where(*own)
    count, size = (await session.execute(sums)).one()
    if count >= limits.max_files:
        raise ForbiddenError(
            f"The tenant may have {limits.max_files} files; delete one first.", code="quota.files"
        )
    left = limits.max_stored_bytes - int(size)
    if left < needed:
        message = f"The tenant's files may have {limits.max_stored_bytes} bytes together; delete some first."
        raise ForbiddenError(message, code="quota.file_bytes")
    return left


WINDOW = timedelta(hours=24)
MAX_OPEN = 100
"""Batches of a tenant that have not ended."""
MAX_CLAIMED = 256
"""Most batches that one server runs at once."""
LEASE_S = 30
"""Seconds for which a server has a batch to itself."""
RENEW_S = LEASE_S // 2
"""Seconds left of that time below which it is renewed; before, a look writes nothing."""
_BEFORE = {"in_progress": ("validating",), "finalizing": ("in_progress", "finalizing")}
"""From which statuses a batch goes on to another; it may end from every open one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """Outcome of one line."""

    batch_id: str
    line: int
    is_error: bool
    text: str
    """A line of the output file or the error file."""
    event: UsageEvent | None
    """None for a line that was refused before it ran."""


@dataclass(eq=False)
class Batches(Transactions):
    """The part of the registry that keeps all tenants' batches."""

    changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set when this process made or cancelled a batch, so that the worker need not wait for its next look."""

    async def create(
        self,
        tenant_id: str,
        key_id: str | None,
        input_file_id: str,
        endpoint: str,
        labels: Mapping[str, str],
    ) -> BatchRow:
        """Ask for a batch; some server runs it.

        Raises:
            NotFoundError: The tenant has no such file.
            InvalidRequestError: The file is no input, or `labels` cannot be stored.
            ConflictError: The tenant has too many batches open; code batch.too_many_open.
        """
        now = self.clock()
        for text in (*labels, *labels.values()):
            check_text(text, "metadata", 512)
        async with self.database.write() as session:
            file = await file_row(session, tenant_id, input_file_id, now)
            if file.purpose != "batch":
                raise InvalidRequestError(
                    "The file must have been made with the purpose batch.", param="input_file_id"
                )
            is_open = (BatchRow.tenant_id == tenant_id, BatchRow.status.in_(OPEN))
            if (await session.scalar(select(func.count()).where(*is_open)) or 0) >= MAX_OPEN:
                message = f"A tenant may have {MAX_OPEN} batches open; cancel one, or wait until one ends."
                raise ConflictError(message, code="batch.too_many_open")
            row = BatchRow(
                id=f"batch_{to_micros(now):014x}{secrets.token_hex(6)}",
                tenant_id=tenant_id,
                key_id=key_id or "",
                endpoint=endpoint,
                input_file_id=file.id,
                input_sha256=file.sha256,
                labels=dict(labels) or None,
                status="validating",
                created_at=to_seconds(now),
                expires_at=to_seconds(now + WINDOW),
            )
            session.add(row)
            await session.flush()
            await session.refresh(row)
        self.changed.set()
        return row

    async def get(self, tenant_id: str, batch_id: str) -> BatchRow:
        """One of a tenant's batches; raises NotFoundError."""
        wanted = (
            BatchRow.id == check_text(batch_id, "batch", 512),
            BatchRow.tenant_id == tenant_id,
        )
        found: BatchRow | None = next(
            (row for (row,) in await self.database.rows(select(BatchRow).where(*wanted))), None
        )
        if found is None:
            raise _no_such_batch()
        return found

    async def list(self, tenant_id: str, after: str | None, limit: int) -> Page[BatchRow]:
        """A tenant's batches, newest first; those older than the one with the id `after`."""
        async with self.database.read() as session:
            return await newest_first(session, BatchRow, tenant_id, after, limit)

    async def cancel(self, tenant_id: str, batch_id: str) -> BatchRow:
        """End a batch early; cancelling it again changes nothing.

        Raises:
            NotFoundError: The tenant has none of this id.
            ConflictError: It has ended, or is about to; code batch.ended.
        """
        async with self.database.write() as session:
            row = await _row(session, tenant_id, batch_id)
            if row.status in ("validating", "in_progress"):
                _enter(row, "cancelling", self.clock())
            elif row.status not in ("cancelling", "cancelled"):
                raise ConflictError(
                    f"The batch is {row.status}: it cannot be cancelled.", code="batch.ended"
                )
        self.changed.set()
        return row

    async def claim(self, owner: str) -> Sequence[BatchRow]:
        """The batches that `owner` runs from now on: those it runs already, and those without an owner.

        Where there are too many, each tenant's oldest come first, before others that `owner` runs already: so a tenant
        that comes later has its places, too.
        """
        now = to_seconds(self.clock())
        free = (BatchRow.status.in_(OPEN), or_(BatchRow.owner == owner, BatchRow.lease_until < now))
        turn = func.row_number().over(partition_by=BatchRow.tenant_id, order_by=BatchRow.id)
        due = (
            select(BatchRow)
            .where(*free)
            .order_by(turn, BatchRow.owner != owner, BatchRow.id)
            .limit(MAX_CLAIMED)
        )
        found = [row for (row,) in await self.database.rows(due)]
        renewed_s = now + RENEW_S
        kept = [row for row in found if row.owner == owner and row.lease_until >= renewed_s]
        ids = [row.id for row in found if row.owner != owner or row.lease_until < renewed_s]
        if not ids:
            return kept
        claimed = (
            update(BatchRow)
            .where(BatchRow.id.in_(ids), *free)
            .values(owner=owner, lease_until=now + LEASE_S)
        )
        async with self.database.write() as session:
            return [*kept, *await session.scalars(claimed.returning(BatchRow))]

    async def release(self, owner: str) -> None:
        """Give up all batches of `owner`; the first server that claims them goes on."""
        async with self.database.write() as session:
            await session.execute(
                update(BatchRow).where(BatchRow.owner == owner).values(owner="", lease_until=0)
            )

    async def enter(
        self,
        batch_id: str,
        owner: str,
        status: str,
        **changes: Any,  # noqa: ANN401 - columns
    ) -> BatchRow | None:
        """Let a batch go on to `status`, and change other columns of it.

        Returns:
            The batch; None where it is not the owner's any more, or was cancelled meanwhile.
        """
        async with self.database.write() as session:
            row = await _own(session, batch_id, owner, _BEFORE.get(status, OPEN))
            if row is not None:
                _enter(row, status, self.clock(), **changes)
            return row

    async def add_results(
        self, owner: str, results: Sequence[LineResult]
    ) -> frozenset[tuple[str, int]]:
        """Write down results and their usage, those of lines that have none yet, in one transaction.

        Returns:
            Batch and line of those that count: not of batches that are ending, or that another server has taken over.
        """
        written: set[tuple[str, int]] = set()
        async with self.database.write() as session:
            new = (
                insert_into(session, BatchResultRow)
                .on_conflict_do_nothing()
                .returning(BatchResultRow.line)
            )
            for batch_id in dict.fromkeys(result.batch_id for result in results):
                row = await _own(session, batch_id, owner, ("in_progress", "cancelling"))
                if row is None:
                    continue
                of_lines = {
                    result.line: result for result in results if result.batch_id == batch_id
                }
                values = [
                    {
                        "batch_id": batch_id,
                        "line": line,
                        "is_error": result.is_error,
                        "result": result.text,
                    }
                    for line, result in of_lines.items()
                ]
                added = [of_lines[line] for line in await session.scalars(new, values)]
                row.failed += sum(result.is_error for result in added)
                row.completed += sum(not result.is_error for result in added)
                await usage.insert_events(
                    session, [usage.checked_event(each.event) for each in added if each.event]
                )
                written.update((batch_id, result.line) for result in added)
        return frozenset(written)

    async def done_lines(self, batch_id: str) -> frozenset[int]:
        """Lines that have a result."""
        done = select(BatchResultRow.line).where(BatchResultRow.batch_id == batch_id)
        return frozenset(row.line for row in await self.database.rows(done))

    async def results(self, batch_id: str, after: int, limit: int) -> Sequence[BatchResultRow]:
        """Results by line, those behind the line `after`."""
        found = select(BatchResultRow).where(
            BatchResultRow.batch_id == batch_id, BatchResultRow.line > after
        )
        return [
            row
            for (row,) in await self.database.rows(found.order_by(BatchResultRow.line).limit(limit))
        ]

    async def end(
        self,
        batch_id: str,
        owner: str,
        status: str,
        files: Mapping[str, FileRow],
        store: Callable[[], Awaitable[None]],
    ) -> None:
        """Make files of the results. Nothing changes where the batch is not the owner's any more.

        Args:
            batch_id: Which.
            owner: Who ran it.
            status: completed, cancelled, expired or failed.
            files: By the column that is to name them: output_file_id, error_file_id.
            store: Makes their blobs durable, last.
        """
        async with self.database.write() as session:
            row = await _own(session, batch_id, owner, OPEN)
            if row is None:
                return
            session.add_all(files.values())
            _enter(row, status, self.clock(), **{name: file.id for name, file in files.items()})
            await session.execute(delete(BatchResultRow).where(BatchResultRow.batch_id == batch_id))
            await session.flush()
            await store()

    async def forget_old(self) -> int:
        """Remove batches that ended long ago; returns how many."""
        old = (BatchRow.status.not_in(OPEN), BatchRow.created_at <= to_seconds(self.clock() - KEPT))
        async with self.database.write() as session:
            return len(
                (await session.scalars(delete(BatchRow).where(*old).returning(BatchRow.id))).all()
            )


def _enter(row: BatchRow, status: str, now: datetime, **changes: Any) -> None:  # noqa: ANN401 - columns
    for name, value in {"status": status, f"{status}_at": to_seconds(now), **changes}.items():
        setattr(row, name, value)


async def _row(session: AsyncSession, tenant_id: str, batch_id: str) -> BatchRow:
    row = await session.get(BatchRow, check_text(batch_id, "batch", 512))
    if row is None or row.tenant_id != tenant_id:
        raise _no_such_batch()
    return row


def _no_such_batch() -> NotFoundError:
    return NotFoundError("There is no such batch.")


async def _own(
    session: AsyncSession, batch_id: str, owner: str, statuses: Sequence[str]
) -> BatchRow | None:
    row = await session.get(BatchRow, batch_id)
    return row if row is not None and row.owner == owner and row.status in statuses else None
