"""Files of tenants: requests of batches, and their results. Rows here, bytes with whoever keeps the blobs.

Another tenant's file looks like one that does not exist, and so does one that has expired.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Literal, TypeVar

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from weft.config import BatchConfig
from weft.errors import ConflictError, ForbiddenError, NotFoundError
from weft.registry.clock import Clock, to_micros, to_seconds
from weft.registry.db.database import Database
from weft.registry.db.models import BatchRow, FileRow
from weft.registry.names import check_text, storable
from weft.registry.records import Page

KEPT = timedelta(days=30)
"""How long a file lives, and how long a batch is listed."""
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that still need their input."""
RowT = TypeVar("RowT", FileRow, BatchRow)


class Files:
    """All tenants' files. Thread: the event loop's.

    Each method is one transaction and raises `CapacityError` when the database cannot answer.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def bytes_left(self, tenant_id: str, limits: BatchConfig) -> int:
        """Bytes that the tenant's next file may have.

        Raises:
            ForbiddenError: None, or it has too many files; codes quota.files and quota.file_bytes.
        """
        async with self._database.read() as session:
            return await _bytes_left(session, tenant_id, limits, self._clock(), needed=1)

    async def add(self, file: FileRow, limits: BatchConfig, store: Callable[[], Awaitable[object]]) -> None:
        """Keep a file; `store` makes its blob durable, last, so that nothing sweeps it before there is a row.

        Raises:
            ForbiddenError: The tenant's files are too many or too large; codes quota.files and quota.file_bytes.
        """
        async with self._database.write() as session:
            await _bytes_left(session, file.tenant_id, limits, self._clock(), needed=file.size_bytes)
            session.add(file)
            await session.flush()
            await store()

    async def get(self, tenant_id: str, file_id: str) -> FileRow:
        """One of a tenant's files.

        Raises:
            NotFoundError: The tenant has none of this id, or it has expired.
        """
        async with self._database.read() as session:
            return await file_row(session, tenant_id, file_id, self._clock())

    async def list(self, tenant_id: str, purpose: str | None, after: str | None, limit: int) -> Page[FileRow]:
        """A tenant's files, newest first; those older than the one with the id `after`."""
        wanted = [FileRow.expires_at > to_seconds(self._clock())]
        if purpose is not None:
            wanted.append(FileRow.purpose == check_text(purpose, "purpose", 64))
        async with self._database.read() as session:
            return await newest_first(session, FileRow, tenant_id, after, limit, *wanted)

    async def delete(self, tenant_id: str, file_id: str) -> FileRow:
        """Forget a file; the caller deletes the blob, if nothing else refers to it.

        Raises:
            NotFoundError: The tenant has none of this id.
            ConflictError: A batch that has not ended needs it; code file.in_use.
        """
        async with self._database.write() as session:
            row = await file_row(session, tenant_id, file_id, self._clock())
            needed = select(BatchRow.id).where(BatchRow.input_file_id == row.id, BatchRow.status.in_(OPEN))
            user = await session.scalar(needed.limit(1))
            if user is not None:
                raise ConflictError(
                    f"The batch {user} has not ended and needs this file: cancel it, or wait for its end.",
                    code="file.in_use",
                )
            await session.delete(row)
            return row

    async def forget_expired(self) -> int:
        """Remove files whose time is over and that no batch needs; returns how many."""
        needed = select(BatchRow.input_file_id).where(BatchRow.status.in_(OPEN))
        old = (FileRow.expires_at <= to_seconds(self._clock()), FileRow.id.not_in(needed))
        async with self._database.write() as session:
            return len((await session.scalars(delete(FileRow).where(*old).returning(FileRow.id))).all())


def new_file(
    tenant_id: str,
    filename: str,
    purpose: Literal["batch", "batch_output"],
    now: datetime,
    *,
    size_bytes: int,
    sha256: str,
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
    *wanted: ColumnElement[bool],
) -> Page[RowT]:
    """A tenant's rows whose ids begin with the time; those older than the one with the id `after`."""
    own = select(table).where(table.tenant_id == tenant_id, *wanted).order_by(table.id.desc()).limit(limit + 1)
    if after is not None:
        own = own.where(table.id < check_text(after, "after", 64))
    rows = tuple(await session.scalars(own))
    return Page(items=rows[:limit], next=rows[limit - 1].id if len(rows) > limit else None)


async def _bytes_left(session: AsyncSession, tenant_id: str, limits: BatchConfig, now: datetime, needed: int) -> int:
    own = (FileRow.tenant_id == tenant_id, FileRow.expires_at > to_seconds(now))
    sums = select(func.count(), func.coalesce(func.sum(FileRow.size_bytes), 0)).where(*own)
    count, size = (await session.execute(sums)).one()
    if count >= limits.max_files:
        raise ForbiddenError(f"The tenant may have {limits.max_files} files; delete one first.", code="quota.files")
    left = limits.max_stored_bytes - int(size)
    if left < needed:
        raise ForbiddenError(
            f"The tenant's files may have {limits.max_stored_bytes} bytes together; delete some first.",
            code="quota.file_bytes",
        )
    return left
