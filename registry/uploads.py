"""Uploads in pieces, and the transaction in which any upload ends as a version.

An upload in pieces is announced, filled file by file, and becomes a version, is rejected, or is deleted after 24 hours.
The bytes are staged by the server. Another tenant's upload looks like one that does not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.errors import ConflictError, NotFoundError
from manylora.registry.aliases import check_not_split
from manylora.registry.cache import Transactions
from manylora.registry.db.clock import to_micros
from manylora.registry.db.models import AdapterRow, IdempotencyRow, TenantRow, UploadRow, VersionRow
from manylora.registry.idempotency import (
    KEPT,
    AnsweredBeforeError,
    KeptAnswer,
    Retry,
    find_answer,
    keep_answer,
)
from manylora.registry.limits import UPLOADING, check_storage, limits_of, stored_bytes
from manylora.registry.names import (
    MAX_DESCRIPTION,
    check_name,
    check_text,
    no_such,
)
from manylora.registry.records import WEIGHTS_FILE, Adapter, Page, Removed, VersionDraft

LIFETIME = timedelta(hours=24)
MAX_OPEN = 100
"""Most open uploads of a tenant."""


class Uploads(Transactions):
    """The part of the registry that keeps uploads in pieces, and answers to changes that are sent again."""

    async def answered(self, tenant_id: str, retry: Retry) -> KeptAnswer | None:
        """The answer to this change, if it was made in the last 24 hours.

        Raises:
            InvalidRequestError: The key was used for another change; code idempotency.key_reused.
        """
        async with self.database.read() as session:
            return await find_answer(session, tenant_id, retry, self.clock())

    async def storage_left(self, tenant_id: str, key: str | None = None) -> int | None:
        """Bytes that the tenant may still store, below 0 when there are too many; None without a limit.

        If the Idempotency-Key `key` has an answer, at least the size of the largest version: a repeated upload stores
        nothing, but must be read to be recognised.
        """
        async with self.database.read() as session:
            most = (await limits_of(session, tenant_id)).stored_bytes
            if most is None:
                return None
            left = most - await stored_bytes(session, tenant_id, self.clock())
            if key is None or await session.get(IdempotencyRow, (tenant_id, key)) is None:
                return left
            own = select(AdapterRow.id).where(AdapterRow.tenant_id == tenant_id)
            largest = select(func.max(VersionRow.size_bytes)).where(VersionRow.adapter_id.in_(own))
            return max(left, await session.scalar(largest) or 0)

    async def create(
        self,
        tenant_id: str,
        draft: VersionDraft,
        files: dict[str, dict[str, Any]],
        retry: Retry | None,
        answer: Callable[[UploadRow], KeptAnswer],
    ) -> KeptAnswer:
        """Announce an upload. It reserves its storage until it ends.

        Raises:
            NotFoundError: There is no such tenant.
            ConflictError: The tenant has 100 uploads open, or the version would end a split of `default`; codes
                upload.too_many_open, upload.ends_split.
            ForbiddenError: A limit is exceeded; codes quota.*.
            InvalidRequestError: A text cannot be stored.
            AnsweredBeforeError: The same change was made before.
        """
        check_name(draft.name, "name")
        check_text(draft.description or "", "description", MAX_DESCRIPTION)
        now = self.clock()
        async with self.database.write() as session:
            owner = await session.get(TenantRow, tenant_id)
            if owner is None:
                raise no_such("tenant", tenant_id)
            is_open = (
                UploadRow.tenant_id == tenant_id,
                UploadRow.state == UPLOADING,
                UploadRow.expires_at > now,
            )
            if (await session.scalar(select(func.count()).where(*is_open)) or 0) >= MAX_OPEN:
                message = f"A tenant may have {MAX_OPEN} uploads open; complete or delete one."
                raise ConflictError(message, code="upload.too_many_open")
            row = UploadRow(
                # Ids begin with the time: their order is that of the uploads.
                id=f"upl_{to_micros(now):014x}{secrets.token_hex(6)}",
                tenant_id=tenant_id,
                tenant=owner.name,
                name=draft.name,
                description=draft.description,
                activate=draft.activate,
                files=files,
                size_bytes=files[WEIGHTS_FILE]["size"],
                state=UPLOADING,
                result=None,
                created_at=now,
                expires_at=now + LIFETIME,
            )
            session.add(row)
            await session.flush()
            made = answer(row)
            if retry is not None:
                await keep_answer(session, tenant_id, retry, made, now)
            known = select(AdapterRow.id).where(
                AdapterRow.tenant_id == tenant_id, AdapterRow.name == draft.name
            )
            adapter_id = await session.scalar(known)
            to_come = 1 if adapter_id is None else None
            await check_storage(session, tenant_id, now, new_adapters=to_come)
            if adapter_id is not None and draft.activate:
                await check_not_split(session, adapter_id)
        return made

    async def get(self, tenant_id: str, upload_id: str) -> UploadRow:
        """One of a tenant's uploads.

        Raises:
            NotFoundError: The tenant has none of this id, or it has expired.
        """
        async with self.database.read() as session:
            return await _upload_row(session, tenant_id, upload_id, self.clock())

    async def list(self, tenant_id: str, after: str | None, limit: int) -> Page[UploadRow]:
        """A tenant's uploads, oldest first; those after the one with the id `after`."""
        own = select(UploadRow).where(
            UploadRow.tenant_id == tenant_id, UploadRow.expires_at > self.clock()
        )
        return await self._page(own, UploadRow.id, after, limit)

    async def reject(self, tenant_id: str, upload_id: str, error: Mapping[str, Any]) -> None:
        """End an upload whose adapter was refused; `error` says why. Does nothing where it has ended already."""
        async with self.database.write() as session:
            row = await session.get(UploadRow, upload_id)
            if row is not None and row.tenant_id == tenant_id and row.state == UPLOADING:
                row.state = "rejected"
                row.result = dict(error)

    async def delete(self, tenant_id: str, upload_id: str) -> None:
        """Delete an upload. The version that it became stays.

        Raises:
            NotFoundError: The tenant has none of this id.
        """
        async with self.database.write() as session:
            await session.delete(await _upload_row(session, tenant_id, upload_id, self.clock()))

    async def forget_old(self) -> tuple[int, int]:
        """Delete expired uploads and answers; returns how many of each."""
        now = self.clock()
        uploads = delete(UploadRow).where(UploadRow.expires_at <= now).returning(UploadRow.id)
        answers = (
            delete(IdempotencyRow)
            .where(IdempotencyRow.created_at <= now - KEPT)
            .returning(IdempotencyRow.key)
        )
        async with self.database.write() as session:
            return len((await session.scalars(uploads)).all()), len(
                (await session.scalars(answers)).all()
            )

    async def open_ids(self) -> frozenset[str]:
        """Ids of all tenants' uploads that still take bytes."""
        is_open = (UploadRow.state == UPLOADING, UploadRow.expires_at > self.clock())
        return frozenset(
            row.id for row in await self.database.rows(select(UploadRow.id).where(*is_open))
        )


async def _upload_row(
    session: AsyncSession, tenant_id: str, upload_id: str, now: datetime
) -> UploadRow:
    """The row of one of a tenant's uploads.

    Raises:
        NotFoundError: The tenant has none of this id, or it has expired.
    """
    own = (UploadRow.id == check_text(upload_id, "upload", 64), UploadRow.tenant_id == tenant_id)
    row = await session.scalar(select(UploadRow).where(*own, UploadRow.expires_at > now))
    if row is None:
        raise NotFoundError("There is no such upload.")
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A version in the transaction that publishes it."""

    session: AsyncSession
    now: datetime
    draft: VersionDraft
    adapter: Adapter
    """With the version as `current`."""
    is_new: bool
    """True if the adapter had no version with this digest."""
    removed: Removed
    """Content of older ephemeral versions that went, to which nothing refers any more."""

    async def keep(
        self, answer: KeptAnswer, pages: int | None = None, retry: Retry | None = None
    ) -> None:
        """Let an upload in pieces end, keep the answer, and then hold a new version against the tenant's limits.

        Args:
            answer: What the client is answered.
            pages: Device pages that the version takes; None is unknown.
            retry: The Idempotency-Key under which the answer is kept.

        Raises:
            AnsweredBeforeError: The same change was made before.
            NotFoundError: The upload is gone.
            ConflictError: The upload was rejected; code upload.ended.
            ForbiddenError: Codes quota.storage, quota.adapters, quota.adapter_memory.
        """
        tenant_id = self.adapter.tenant_id
        if isinstance(self.draft, UploadRow):
            row = await _upload_row(self.session, tenant_id, self.draft.id, self.now)
            if row.state == "ready":
                raise AnsweredBeforeError(KeptAnswer(status=200, body=row.result or {}))
            if row.state != UPLOADING:
                raise ConflictError("The upload has ended; make a new one.", code="upload.ended")
            row.state = "ready"
            row.result = dict(answer.body)
            await self.session.flush()
        if retry is not None:
            await keep_answer(self.session, tenant_id, retry, answer, self.now)
        if self.is_new:
            counted = 0 if self.adapter.current.version == 1 else None
            await check_storage(
                self.session, tenant_id, self.now, pages=pages, new_adapters=counted
            )
