"""Browser sessions, and links that begin one: random tokens. The database has only their keyed digests.

A token stands for the secret that it was made with: it stops working when that secret does. A link works once.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import delete, select

from manylora.errors import AuthenticationError
from manylora.registry.access.keys import KeyRing
from manylora.registry.cache import Transactions
from manylora.registry.db.models import SessionRow
from manylora.registry.records import Credential, Identity

SESSION_S = 12 * 3600
LINK_S = 600
MAX_PER_SECRET = 100
"""Most sessions, and most links, of one secret; the oldest is deleted for a new one."""
LINK_PREFIX = "manylora_link_"
SessionKind = Literal["session", "link"]
_LIFE_S: dict[SessionKind, int] = {"session": SESSION_S, "link": LINK_S}
_PREFIXES: dict[SessionKind, str] = {"session": "manylora_session_", "link": LINK_PREFIX}


@dataclass(eq=False)
class Sessions(Transactions):
    """The part of the registry that keeps browsers' sessions."""

    key_ring: KeyRing

    async def begin_session(
        self, credential: Credential, kind: SessionKind = "session"
    ) -> tuple[str, datetime]:
        """Begin a session, or make a link that begins one. Deletes expired ones, and the oldest of too many.

        Returns:
            The token (256 random bits), which is stored nowhere, and when it ends.
        """
        token = _PREFIXES[kind] + secrets.token_urlsafe(32)
        now = self.clock()
        ends = now + timedelta(seconds=_LIFE_S[kind])
        alike = (SessionRow.key_digest == credential.digest, SessionRow.kind == kind)
        kept = (
            select(SessionRow.digest)
            .where(*alike)
            .order_by(SessionRow.expires_at.desc())
            .limit(MAX_PER_SECRET - 1)
        )
        async with self._change() as session:
            await session.execute(delete(SessionRow).where(SessionRow.expires_at <= now))
            await session.execute(delete(SessionRow).where(*alike, SessionRow.digest.not_in(kept)))
            session.add(
                SessionRow(
                    digest=self.key_ring.digest(token),
                    kind=kind,
                    key_prefix=credential.prefix,
                    key_digest=credential.digest,
                    expires_at=ends,
                )
            )
        return token, ends

    async def follow_link(self, token: str, *, uses_up: bool = True) -> Identity:
        """The owner of the key that made this link; uses the link up unless told otherwise.

        Raises:
            AuthenticationError: There is no such link, or it has been used or expired; code session.link_used.
        """
        link = (SessionRow.digest == self.key_ring.digest(token), SessionRow.kind == "link")
        async with self.database.read() as session:
            row = await session.scalar(select(SessionRow).where(*link))
        if row is not None and uses_up:  # a guessed token makes no writer wait
            async with self._change() as session:
                row = await session.scalar(delete(SessionRow).where(*link).returning(SessionRow))
        if row is None or row.expires_at <= self.clock():
            raise AuthenticationError(
                "This link has been used, or is too old: ask for another with `manylora dashboard`, "
                "or sign in with a key.",
                code="session.link_used",
            )
        return await self.key_ring.identify(Credential(row.key_prefix, row.key_digest))

    async def end_session(self, token: str) -> None:
        """End a session at once; does nothing where it is over."""
        async with self._change(self.key_ring.sessions) as session:
            await session.execute(
                delete(SessionRow).where(SessionRow.digest == self.key_ring.digest(token))
            )
