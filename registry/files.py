"""Files of tenants: requests of batches, and their results. Rows here, bytes with whoever keeps the blobs.

Another tenant's file looks like one that does not exist, and so does one that has expired.
"""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import ConflictError, ForbiddenError, NotFoundError
from weft.registry.clock import Clock, to_micros
from weft.registry.database import Database
from weft.registry.models import BatchRow, FileRow
from weft.registry.names import check_text, storable
from weft.registry.records import Page

Purpose = Literal["batch", "batch_output"]
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that still need their input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file. Times are microseconds since 1970."""

    id: str
    tenant_id: str
    filename: str
    purpose: str
    size_bytes: int
    sha256: str
    created_at: int
    expires_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileQuota:
    """What a tenant's files may be together."""

    files: int
    size_bytes: int


class Files:
    """All tenants' files. Thread: the event loop's.

    Each method is one transaction and raises `CapacityError` when the database cannot answer.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def bytes_left(self, tenant_id: str, quota: FileQuota) -> int:
        """Bytes that the tenant's next file may have.

        Raises:
            ForbiddenError: None, or it has too many files; codes quota.files and quota.file_bytes.
        """
        async with self._database.read() as session:
            return await _bytes_left(session, tenant_id, quota, self._clock())

    async def add(self, file: StoredFile, quota: FileQuota, store: Callable[[], Awaitable[None]]) -> None:
        """Keep a file; `store` makes its blob durable, last, so that nothing sweeps it before there is a row.

        Raises:
            ForbiddenError: The tenant's files are too many or too large; codes quota.files and quota.file_bytes.
        """
        async with self._database.write() as session:
            if await _bytes_left(session, file.tenant_id, quota, self._clock()) < file.size_bytes:
                raise _too_large(quota)
            add_file(session, file)
            await session.flush()
            await store()

    async def get(self, tenant_id: str, file_id: str, *, has_begun: bool = False) -> StoredFile:
        """One of a tenant's files.

        Args:
            tenant_id: Whose.
            file_id: Which.
            has_begun: A batch runs from it, so it counts also when its time is over.

        Raises:
            NotFoundError: The tenant has none of this id, or it has expired.
        """
        async with self._database.read() as session:
            return _file(await file_row(session, tenant_id, file_id, None if has_begun else self._clock()))

    async def list(
        self, tenant_id: str, purpose: str | None, after: str | None, limit: int, *, is_oldest_first: bool
    ) -> Page[StoredFile]:
        """A tenant's files by time, those behind the id `after`."""
        wanted: builtins.list[ColumnElement[bool]] = [FileRow.tenant_id == tenant_id]
        wanted.append(FileRow.expires_at > to_micros(self._clock()))
        if purpose is not None:
            wanted.append(FileRow.purpose == check_text(purpose, "purpose", 64))
        if after is not None:
            check_text(after, "after", 64)
            wanted.append(FileRow.id > after if is_oldest_first else FileRow.id < after)
        order = FileRow.id.asc() if is_oldest_first else FileRow.id.desc()
        async with self._database.read() as session:
            rows = (await session.scalars(select(FileRow).where(*wanted).order_by(order).limit(limit + 1))).all()
        items = tuple(map(_file, rows[:limit]))
        return Page(items=items, next=items[-1].id if len(rows) > limit else None)

    async def delete(self, tenant_id: str, file_id: str) -> StoredFile:
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
            return _file(row)

    async def forget_expired(self) -> int:
        """Remove files whose time is over and that no batch needs; returns how many."""
        needed = select(BatchRow.input_file_id).where(BatchRow.status.in_(OPEN))
        old = (FileRow.expires_at <= to_micros(self._clock()), FileRow.id.not_in(needed))
        async with self._database.write() as session:
            return len((await session.scalars(delete(FileRow).where(*old).returning(FileRow.id))).all())


def new_file(tenant_id: str, filename: str, purpose: Purpose, now: datetime, expires_at: datetime) -> dict[str, Any]:
    """The fields of a `StoredFile` but for size and digest; ids are in the order in which files were made."""
    return {
        "id": f"file-{to_micros(now):014x}{secrets.token_hex(6)}",
        "tenant_id": tenant_id,
        "filename": storable(filename, 255),
        "purpose": purpose,
        "created_at": to_micros(now),
        "expires_at": to_micros(expires_at),
    }


def add_file(session: AsyncSession, file: StoredFile) -> None:
    """Add the row; what its tenant may have is not asked."""
    session.add(FileRow(**{field.name: getattr(file, field.name) for field in fields(StoredFile)}))


async def file_row(session: AsyncSession, tenant_id: str, file_id: str, now: datetime | None) -> FileRow:
    """The row of a tenant's file, where it has not expired, or with `now` as None anyway; raises NotFoundError."""
    own = (FileRow.id == check_text(file_id, "file", 512), FileRow.tenant_id == tenant_id)
    row = await session.scalar(select(FileRow).where(*own))
    if row is None or (now is not None and row.expires_at <= to_micros(now)):
        raise NotFoundError("There is no such file.")
    return row


async def _bytes_left(session: AsyncSession, tenant_id: str, quota: FileQuota, now: datetime) -> int:
    own = (FileRow.tenant_id == tenant_id, FileRow.expires_at > to_micros(now))
    sums = select(func.count(), func.coalesce(func.sum(FileRow.size_bytes), 0)).where(*own)
    count, size = (await session.execute(sums)).one()
    if count >= quota.files:
        raise ForbiddenError(
            f"The tenant has {count} files and may have {quota.files}; delete one first.", code="quota.files"
        )
    left = quota.size_bytes - int(size)
    if left <= 0:
        raise _too_large(quota)
    return left


def _too_large(quota: FileQuota) -> ForbiddenError:
    return ForbiddenError(
        f"The tenant's files may have {quota.size_bytes} bytes together; delete some first.", code="quota.file_bytes"
    )


def _file(row: FileRow) -> StoredFile:
    return StoredFile(**{field.name: getattr(row, field.name) for field in fields(StoredFile)})
