"""Browser sessions, and links that begin one: random tokens, kept only as keyed digests, each standing for a secret.

A token is worth what the key is worth that it was made with: it stops when that key does. A link works once.
"""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from weft.registry.clock import to_micros
from weft.registry.models import SessionRow
from weft.registry.records import Credential

SESSION_S = 12 * 3600
LINK_S = 600
MAX_PER_SECRET = 100
"""Sessions, and as many links, that one secret may have; the oldest makes room."""
LINK_PREFIX = "weft_link_"
Kind = Literal["session", "link"]
_LIFE_S: dict[Kind, int] = {"session": SESSION_S, "link": LINK_S}
_PREFIXES: dict[Kind, str] = {"session": "weft_session_", "link": LINK_PREFIX}


def new_token(kind: Kind) -> str:
    """A token of 256 random bits."""
    return _PREFIXES[kind] + secrets.token_urlsafe(32)


async def add_session(
    session: AsyncSession, kind: Kind, digest: str, credential: Credential, now: datetime
) -> datetime:
    """Keep a token's digest, and forget all that have ended, and those of this secret that are too many.

    Returns:
        When it ends.
    """
    ends = now + timedelta(seconds=_LIFE_S[kind])
    await session.execute(delete(SessionRow).where(SessionRow.expires_at <= to_micros(now)))
    alike = (SessionRow.key_digest == credential.digest, SessionRow.kind == kind)
    kept = select(SessionRow.digest).where(*alike).order_by(SessionRow.expires_at.desc()).limit(MAX_PER_SECRET - 1)
    await session.execute(delete(SessionRow).where(*alike, SessionRow.digest.not_in(kept)))
    session.add(
        SessionRow(
            digest=digest,
            kind=kind,
            key_prefix=credential.prefix,
            key_digest=credential.digest,
            expires_at=to_micros(ends),
        )
    )
    return ends


async def find_session(session: AsyncSession, digest: str) -> tuple[Credential, int] | None:
    """What a session stands for, and its end in microseconds; None if there is none."""
    row = await session.scalar(select(SessionRow).where(SessionRow.digest == digest, SessionRow.kind == "session"))
    return (Credential(row.key_prefix, row.key_digest), row.expires_at) if row else None


async def is_link(session: AsyncSession, digest: str) -> bool:
    """Whether there is such a link, be it too old."""
    row = await session.get(SessionRow, digest)
    return row is not None and row.kind == "link"


async def take_link(session: AsyncSession, digest: str, now: datetime) -> Credential | None:
    """What a link stands for, which works no more from now on; None if it never did, or does no more."""
    taken = delete(SessionRow).where(SessionRow.digest == digest, SessionRow.kind == "link").returning(SessionRow)
    row = await session.scalar(taken)
    return Credential(row.key_prefix, row.key_digest) if row and row.expires_at > to_micros(now) else None


async def end_session(session: AsyncSession, digest: str) -> None:
    """Forget a session."""
    await session.execute(delete(SessionRow).where(SessionRow.digest == digest))
