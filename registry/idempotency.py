"""Answers to changes, kept for a client that sends a change again under the same Idempotency-Key."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.errors import InvalidRequestError
from manylora.registry.db.models import IdempotencyRow

KEPT = timedelta(hours=24)
"""Time for which the answer to a change is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswer:
    """KeptAnswer to a change, which a repeated request gets again."""

    status: int
    """HTTP status."""
    body: Mapping[str, Any]
    """A JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Recognises a change that is sent again."""

    key: str
    """The client's Idempotency-Key, 1 to 255 printable characters."""
    body_digest: str
    """`body_digest` of the whole request."""


class AnsweredBeforeError(Exception):
    """The change was made before; nothing was changed now. Never leaves the server."""

    def __init__(self, answer: KeptAnswer) -> None:
        super().__init__("the change was made before")
        self.answer = answer


def body_digest(*parts: str | bytes | bool | None) -> str:
    """SHA-256 (64 hex digits) over parts; other parts, or other borders between them, give another digest."""
    return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()


async def find_answer(
    session: AsyncSession, tenant_id: str, retry: Retry, now: datetime
) -> KeptAnswer | None:
    """The answer to this change, if it was made in the last 24 hours.

    Raises:
        InvalidRequestError: The key was used for another change; code idempotency.key_reused.
    """
    row = await session.get(IdempotencyRow, (tenant_id, retry.key))
    if row is None or row.created_at <= now - KEPT:
        return None
    if row.body_digest != retry.body_digest:
        message = (
            "This Idempotency-Key was used for another request; choose a new key for a new request."
        )
        raise InvalidRequestError(message, code="idempotency.key_reused")
    return KeptAnswer(status=row.status, body=row.response)


async def keep_answer(
    session: AsyncSession, tenant_id: str, retry: Retry, answer: KeptAnswer, now: datetime
) -> None:
    """Keep the answer.

    Raises:
        AnsweredBeforeError: The change has an answer already.
        InvalidRequestError: The key was used for another change.
    """
    before = await find_answer(session, tenant_id, retry, now)
    if before is not None:
        raise AnsweredBeforeError(before)
    row = IdempotencyRow(
        tenant_id=tenant_id,
        key=retry.key,
        body_digest=retry.body_digest,
        status=answer.status,
        response=dict(answer.body),
        created_at=now,
    )
    await session.merge(row)  # an expired answer is replaced
    await session.flush()
