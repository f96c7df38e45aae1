"""Browser sessions, and links that begin one: random tokens, kept only as keyed digests, each standing for a secret.

A token has the rights of the key that it was made with, and stops working when that key does. A link works once.
"""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import AuthenticationError
from weft.registry.db.clock import to_micros
from weft.registry.db.models import SessionRow
from weft.registry.records import Credential, Identity
from weft.registry.transactions import Transactions

SESSION_S = 12 * 3600
LINK_S = 600
MAX_PER_SECRET = 100
"""Sessions, and as many links, that one secret may have; the oldest makes room."""
LINK_PREFIX = "weft_link_"
Kind = Literal["session", "link"]
_LIFE_S: dict[Kind, int] = {"session": SESSION_S, "link": LINK_S}
_PREFIXES: dict[Kind, str] = {"session": "weft_session_", "link": LINK_PREFIX}


class Sessions(Transactions):
    """The part of the registry that keeps browsers' sessions."""

    async def authenticate_session(self, token: str) -> Identity:
        """Who began the session of this token.

        Raises:
            AuthenticationError: Nobody, or it is over; code session.ended.
        """
        return await self._key_ring.identify_session(self._database, token)

    async def begin_session(self, credential: Credential, kind: Kind = "session") -> tuple[str, datetime]:
        """Begin a session, or make a link to begin one with.

        Those that have ended are forgotten, and of this secret those that are too many.

        Returns:
            The token, of 256 random bits, which is kept nowhere, and when it ends.
        """
        token, now = _PREFIXES[kind] + secrets.token_urlsafe(32), self._clock()
        ends = now + timedelta(seconds=_LIFE_S[kind])
        alike = (SessionRow.key_digest == credential.digest, SessionRow.kind == kind)
        kept = select(SessionRow.digest).where(*alike).order_by(SessionRow.expires_at.desc()).limit(MAX_PER_SECRET - 1)
        async with self._change() as session:
            await session.execute(delete(SessionRow).where(SessionRow.expires_at <= to_micros(now)))
            await session.execute(delete(SessionRow).where(*alike, SessionRow.digest.not_in(kept)))
            session.add(
                SessionRow(
                    digest=self._key_ring.digest(token),
                    kind=kind,
                    key_prefix=credential.prefix,
                    key_digest=credential.digest,
                    expires_at=to_micros(ends),
                )
            )
        return token, ends

    async def follow_link(self, token: str) -> Identity:
        """Who made this link, which works no more from now on.

        Raises:
            AuthenticationError: Nobody, it has been used, or is too old; code session.link_used.
        """
        link = (SessionRow.digest == self._key_ring.digest(token), SessionRow.kind == "link")
        async with self._database.read() as session:
            row = await session.scalar(select(SessionRow).where(*link))
        if row is not None:  # who only guesses keeps no writer waiting
            async with self._change() as session:
                row = await session.scalar(delete(SessionRow).where(*link).returning(SessionRow))
        if row is None or row.expires_at <= to_micros(self._clock()):
            raise AuthenticationError(
                "This link has been used, or is too old: ask for another with `weft dashboard`, or sign in with a key.",
                code="session.link_used",
            )
        return await self._key_ring.identify(self._database, Credential(row.key_prefix, row.key_digest))

    async def end_session(self, token: str) -> None:
        """End a session, at once; one that is over already stays so."""
        async with self._change(self._key_ring.sessions) as session:
            await session.execute(delete(SessionRow).where(SessionRow.digest == self._key_ring.digest(token)))


async def find_session(session: AsyncSession, digest: str) -> tuple[Credential, int] | None:
    """What a session stands for, and its end in microseconds; None if there is none."""
    row = await session.scalar(select(SessionRow).where(SessionRow.digest == digest, SessionRow.kind == "session"))
    return (Credential(row.key_prefix, row.key_digest), row.expires_at) if row else None
