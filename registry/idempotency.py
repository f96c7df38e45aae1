"""Changes that a client may send twice: what was answered is kept in the transaction that made the change.

A row stands for a change that happened; what is refused, or cut by a crash, leaves none and may be tried again. Each
function runs in the caller's transaction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import InvalidRequestError
from weft.registry.clock import to_micros
from weft.registry.db.models import IdempotencyRow

KEPT = timedelta(hours=24)
"""How long a client may send the same change again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client is told of a change."""

    status: int
    """As in HTTP."""
    body: Mapping[str, Any]
    """A JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """By what a change is known when it is sent again."""

    key: str
    """The client's own, 1 to 255 printable characters."""
    body_digest: str
    """`body_digest` of all that was asked for."""


class AnsweredBeforeError(Exception):
    """Another request with this key was faster; nothing was changed. Never leaves the server."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("the change was made before")
        self.answer = answer


def body_digest(*parts: str | bytes | bool | None) -> str:
    """SHA-256 (64 hex digits) over parts, none of which can pass for another or for two."""
    found = hashlib.sha256()
    for part in parts:
        if part is None or isinstance(part, bool):
            found.update(f"{part};".encode())
        else:
            raw = part.encode() if isinstance(part, str) else part
            found.update(b"%d:" % len(raw) + raw)
    return found.hexdigest()


async def find(session: AsyncSession, tenant_id: str, retry: Retry, now: datetime) -> Answer | None:
    """What this change was answered, if it was made in the last 24 hours.

    Raises:
        InvalidRequestError: The key was used for another change; code idempotency.key_reused.
    """
    row = await session.get(IdempotencyRow, (tenant_id, retry.key))
    if row is None or row.created_at <= to_micros(now - KEPT):
        return None
    if row.body_digest != retry.body_digest:
        raise InvalidRequestError(
            "This Idempotency-Key was used for another request; choose a new key for a new request.",
            code="idempotency.key_reused",
        )
    return Answer(status=row.status, body=row.response)


async def keep(session: AsyncSession, tenant_id: str, retry: Retry, answer: Answer, now: datetime) -> None:
    """Remember the answer.

    Raises:
        AnsweredBeforeError: There is one already.
        InvalidRequestError: The key was used for another change.
    """
    before = await find(session, tenant_id, retry, now)
    if before is not None:
        raise AnsweredBeforeError(before)
    expired = await session.get(IdempotencyRow, (tenant_id, retry.key))
    if expired is not None:
        await session.delete(expired)
        await session.flush()
    session.add(
        IdempotencyRow(
            tenant_id=tenant_id,
            key=retry.key,
            body_digest=retry.body_digest,
            status=answer.status,
            response=dict(answer.body),
            created_at=to_micros(now),
        )
    )
    await session.flush()


async def forget_old(session: AsyncSession, now: datetime) -> int:
    """Remove the answers that nobody may ask for any more; returns how many."""
    old = delete(IdempotencyRow).where(IdempotencyRow.created_at <= to_micros(now - KEPT))
    return len((await session.scalars(old.returning(IdempotencyRow.key))).all())
