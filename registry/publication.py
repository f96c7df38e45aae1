"""The transaction that publishes a version: with it end an upload, and the change that a client may repeat."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from manylora.errors import ConflictError
from manylora.registry.idempotency import AnsweredBeforeError, KeptAnswer, Retry, keep_answer
from manylora.registry.limits import UPLOADING, check_adapters, check_pages, check_storage
from manylora.registry.records import Adapter, Removed
from manylora.registry.uploads import upload_row


class Publication:
    """A version in the transaction that publishes it."""

    def __init__(
        self, session: AsyncSession, adapter: Adapter, is_new: bool, now: datetime, removed: Removed
    ) -> None:
        self._session = session
        self._now = now
        self.adapter = adapter
        """With the version as `current`."""
        self.is_new = is_new
        """True if the adapter had no version with this digest."""
        self.removed = removed
        """Content of older ephemeral versions that went, to which nothing refers any more."""
        self.is_checked = False
        """True once the limits were checked."""

    async def end_upload(self, upload_id: str, answer: KeptAnswer) -> None:
        """Let an upload in pieces end with this version, and keep the answer to its client.

        Raises:
            AnsweredBeforeError: It was completed before.
            NotFoundError: The upload is gone.
            ConflictError: The upload was rejected; code upload.ended.
        """
        row = await upload_row(self._session, self.adapter.tenant_id, upload_id, self._now)
        if row.state == "ready":
            raise AnsweredBeforeError(KeptAnswer(status=200, body=row.result or {}))
        if row.state != UPLOADING:
            raise ConflictError("The upload has ended; make a new one.", code="upload.ended")
        row.state = "ready"
        row.result = dict(answer.body)
        await self._session.flush()

    async def keep_answer(self, retry: Retry, answer: KeptAnswer) -> None:
        """Keep what is answered under an Idempotency-Key; raises like the function `keep_answer`."""
        await keep_answer(self._session, self.adapter.tenant_id, retry, answer, self._now)

    async def check_limits(self, pages: int | None = None) -> None:
        """Hold a new version against the tenant's limits, once the upload that it ends no longer counts.

        Args:
            pages: Device pages that the version takes; None is unknown.

        Raises:
            ForbiddenError: Codes quota.storage, quota.adapters, quota.adapter_memory.
        """
        self.is_checked = True
        if not self.is_new:
            return
        tenant_id = self.adapter.tenant_id
        if pages is not None:
            await check_pages(self._session, tenant_id, pages)
        await check_storage(self._session, tenant_id, self._now)
        if self.adapter.current.version == 1:
            await check_adapters(self._session, tenant_id)
