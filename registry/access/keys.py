"""Keys: random secrets, stored as keyed digests only and found by their public prefix.

A secret is `manylora_<prefix>_<256 random bits>`. The database has its HMAC-SHA256 under a pepper that is not in the
database: a stolen database alone, or a stolen data folder alone, gives nobody a way to test secrets.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import cast

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.errors import AuthenticationError, InvalidRequestError
from manylora.registry import audit
from manylora.registry.access.tenants import tenant_row
from manylora.registry.audit import ADMIN
from manylora.registry.cache import Changes, ReadThroughCache, Transactions
from manylora.registry.db.clock import Clock, iso
from manylora.registry.db.database import Database
from manylora.registry.db.models import KeyRow, SessionRow, TenantRow
from manylora.registry.limits import KEY_LIMITS, Limits, checked_limits
from manylora.registry.names import check_text, no_such
from manylora.registry.records import SCOPES, Credential, Identity, Scope

MAX_SECRET = 512

_PREFIX_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SECRET = re.compile(r"(manylora_[0-9a-z]{12})_[A-Za-z0-9_-]{43}")
_NO_DIGEST = "0" * 64
_WITH_TENANT = select(KeyRow, TenantRow).join(TenantRow, TenantRow.id == KeyRow.tenant_id)


class KeyRing:
    """Finds the owner of a secret, and keeps the answer for a moment by the digest of the whole secret.

    Thread: one event loop.
    """

    def __init__(
        self,
        database: Database,
        pepper: bytes,
        admin_key: str | None,
        clock: Clock,
        monotonic: Callable[[], float],
        changes: Changes,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._clock = clock
        self._admin_digest = None if admin_key is None else self.digest(admin_key)
        self._recent: ReadThroughCache[str, tuple[Identity, datetime | None]] = ReadThroughCache(
            monotonic, changes
        )
        """By the digest of a secret: its owner, and when it expires."""
        self.sessions: ReadThroughCache[str, tuple[Credential, datetime]] = ReadThroughCache(
            monotonic
        )
        """By the digest of a session's token: the secret that the session stands for, and when it ends."""

    def digest(self, secret: str) -> str:
        """Digest by which the database knows a secret: 64 hex digits."""
        return keyed_digest(self._pepper, secret)

    async def authenticate(self, secret: str) -> Identity:
        """The owner of this secret.

        Raises:
            AuthenticationError: There is no such key, or it has expired or was revoked.
        """
        if len(secret) > MAX_SECRET:
            raise _refusal()
        matched = _SECRET.fullmatch(secret)
        return await self.identify(Credential(matched[1] if matched else "", self.digest(secret)))

    async def identify(self, credential: Credential) -> Identity:
        """The owner of the secret with this digest; raises like `authenticate`."""
        if self._admin_digest is not None and hmac.compare_digest(
            credential.digest, self._admin_digest
        ):
            return Identity(role="admin", credential=Credential("", credential.digest))
        identity, ends = await self._recent.ask(
            credential.digest, lambda: _read_known(self._database, credential)
        )
        if ends is not None and ends <= self._clock():
            raise _refusal()
        return identity

    async def identify_session(self, token: str) -> Identity:
        """The owner of the key that began the session of this token.

        Raises:
            AuthenticationError: There is no such session, or it or its key has ended; code session.ended.
        """
        digest = self.digest(token)

        async def read() -> tuple[Credential, datetime]:
            columns = (SessionRow.key_prefix, SessionRow.key_digest, SessionRow.expires_at)
            of_token = select(*columns).where(
                SessionRow.digest == digest, SessionRow.kind == "session"
            )
            for prefix, key_digest, ends in await self._database.rows(of_token):
                return Credential(prefix, key_digest), ends
            raise session_ended()

        credential, ends = await self.sessions.ask(digest, read)
        if ends <= self._clock():
            raise session_ended()
        try:
            return await self.identify(credential)
        except AuthenticationError as error:
            raise session_ended() from error

    def forget(self) -> None:
        """Ask the database again: a key or a tenant changed."""
        self._recent.forget()
        self.sessions.forget()


def keyed_digest(pepper: bytes, secret: str) -> str:
    """HMAC-SHA256 of a secret under the pepper: 64 hex digits."""
    return hmac.new(pepper, secret.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


@dataclass(eq=False)
class Keys(Transactions):
    """The part of the registry that keeps keys."""

    key_ring: KeyRing

    async def identify_key(self, key_id: str) -> Identity:
        """The owner of the key with this id, whatever its secret is by now.

        Raises:
            AuthenticationError: The key was revoked or has expired, or its tenant is gone.
        """
        of_key = _WITH_TENANT.where(KeyRow.id == key_id, KeyRow.revoked_at.is_(None))
        found = next(iter(await self.database.rows(of_key)), None)
        if found is None or (
            found[0].expires_at is not None and found[0].expires_at <= self.clock()
        ):
            raise AuthenticationError(
                "The API key was revoked or has expired; make the request with another one."
            )
        return _identity(found[0], found[1], None)

    async def create_key(
        self,
        tenant: str,
        name: str | None = None,
        scopes: Sequence[str] | None = None,
        expires_at: datetime | None = None,
        limits: Mapping[str, object] | None = None,
    ) -> tuple[KeyRow, str]:
        """Make a key for the tenant of this name; without scopes it has all.

        Returns:
            The key, and its secret, which is stored nowhere.

        Raises:
            NotFoundError: There is no such tenant.
            InvalidRequestError: The name cannot be stored, a limit is unknown, or `expires_at` has passed.
        """
        async with self._change() as session:
            owner = await tenant_row(session, tenant)
            row = KeyRow(
                id=f"key_{secrets.token_hex(12)}",
                tenant_id=owner.id,
                tenant=tenant,
                name=name and check_text(name, "name", 255),
                limits={},
                created_at=self.clock(),
            )
            detail = _set(row, self.clock(), scopes or SCOPES, expires_at, limits or None)
            secret = _new_secret(self.key_ring, row)
            session.add(row)
            await session.flush()
            audit.add(
                session, self.clock(), ADMIN, "key.create", tenant=tenant, target=row.id, **detail
            )
            return row, secret

    async def update_key(
        self,
        key_id: str,
        *,
        name: str | None = None,
        limits: Mapping[str, object] | None = None,
        scopes: Sequence[str] | None = None,
        expires_at: datetime | None = None,
    ) -> KeyRow:
        """Change what is not None, at once; `limits` replaces all limits of the key.

        Raises:
            NotFoundError: There is no such key, or it was revoked.
            InvalidRequestError: As for `create_key`.
        """
        async with self._changing(key_id, "key.update") as (row, detail):
            row.name = row.name if name is None else check_text(name, "name", 255)
            detail |= {"name": name, **_set(row, self.clock(), scopes, expires_at, limits)}
            return row

    async def get_key(self, key_id: str) -> KeyRow:
        """One key.

        Raises:
            NotFoundError: There is no such key, or it was revoked.
        """
        async with self.database.read() as session:
            return await _living(session, key_id)

    async def list_keys(self, tenant: str, *, with_revoked: bool = False) -> tuple[KeyRow, ...]:
        """The keys of the tenant of this name, oldest first.

        Raises:
            NotFoundError: There is no such tenant.
        """
        wanted = select(KeyRow).order_by(KeyRow.created_at, KeyRow.id)
        if not with_revoked:
            wanted = wanted.where(KeyRow.revoked_at.is_(None))
        async with self.database.read() as session:
            owner = await tenant_row(session, tenant)
            rows = await session.scalars(wanted.where(KeyRow.tenant_id == owner.id))
            return tuple(rows)

    async def revoke_key(self, key_id: str) -> None:
        """Revoke a key, at once.

        Raises:
            NotFoundError: There is no such key, or it was revoked.
        """
        async with self._changing(key_id, "key.revoke") as (row, _):
            row.revoked_at = self.clock()

    async def rotate_key(self, key_id: str, grace_s: float = 0.0) -> tuple[KeyRow, str]:
        """Give a key a new secret. The last one works for `grace_s` seconds more, earlier ones stop at once.

        Returns:
            The key, with the same id, limits and usage, and its new secret, which is stored nowhere.

        Raises:
            NotFoundError: There is no such key, or it was revoked.
        """
        async with self._changing(key_id, "key.rotate") as (row, detail):
            row.previous_prefix = row.previous_digest = row.previous_until = None
            if grace_s > 0:
                row.previous_prefix = row.prefix
                row.previous_digest = row.digest
                row.previous_until = self.clock() + timedelta(seconds=grace_s)
            detail["grace_s"] = grace_s
            return row, _new_secret(self.key_ring, row)

    @asynccontextmanager
    async def _changing(
        self, key_id: str, action: str
    ) -> AsyncIterator[tuple[KeyRow, dict[str, object]]]:
        """A transaction that changes a key, and writes the details that it is given into the audit log."""
        async with self._change(self.key_ring) as session:
            row = await _living(session, key_id)
            detail: dict[str, object] = {}
            yield row, detail
            audit.add(
                session, self.clock(), ADMIN, action, tenant=row.tenant, target=row.id, **detail
            )


async def _living(session: AsyncSession, key_id: str) -> KeyRow:
    """The row of a key that was not revoked."""
    row = await session.get(KeyRow, check_text(key_id, "id", 512))
    if row is None or row.revoked_at is not None:
        raise no_such("key", key_id)
    return row


def _new_secret(ring: KeyRing, row: KeyRow) -> str:
    row.prefix = "manylora_" + "".join(secrets.choice(_PREFIX_CHARACTERS) for _ in range(12))
    secret = f"{row.prefix}_{secrets.token_urlsafe(32)}"
    row.digest = ring.digest(secret)
    return secret


def _set(
    row: KeyRow,
    now: datetime,
    scopes: Sequence[str] | None,
    expires_at: datetime | None,
    limits: Mapping[str, object] | None,
) -> dict[str, object]:
    """Change what is not None; returns that for the audit log."""
    detail: dict[str, object] = {}
    if scopes is not None:
        if not set(scopes) <= set(SCOPES):
            raise InvalidRequestError(f"scopes must be among {', '.join(SCOPES)}.", param="scopes")
        detail["scopes"] = row.scopes = [scope for scope in SCOPES if scope in scopes]
    if limits is not None:
        detail["limits"] = row.limits = checked_limits(limits, KEY_LIMITS)
    if expires_at is not None:
        if expires_at <= now:
            raise InvalidRequestError("expires_at must be in the future.", param="expires_at")
        row.expires_at = expires_at.astimezone(UTC)
        detail["expires_at"] = iso(expires_at)
    return detail


async def _read_known(
    database: Database, credential: Credential
) -> tuple[Identity, datetime | None]:
    prefix = credential.prefix
    either = or_(KeyRow.prefix == prefix, KeyRow.previous_prefix == prefix)
    found = next(iter(await database.rows(_WITH_TENANT.where(either))), None)
    row, owner = found or (None, None)
    # An unknown prefix is compared, too: it takes as long as a known one.
    stored = _NO_DIGEST
    ends: list[datetime] = []
    if row is not None:
        is_previous = prefix != row.prefix
        stored = (row.previous_digest or _NO_DIGEST) if is_previous else row.digest
        ends = [
            end
            for end in (row.expires_at, row.previous_until if is_previous else None)
            if end is not None
        ]
    if (
        not hmac.compare_digest(credential.digest, stored)
        or row is None
        or owner is None
        or row.revoked_at is not None
    ):
        raise _refusal()
    return _identity(row, owner, credential), min(ends, default=None)


def _identity(row: KeyRow, owner: TenantRow, credential: Credential | None) -> Identity:
    return Identity(
        role="tenant",
        tenant_id=row.tenant_id,
        tenant=owner.name,
        key_id=row.id,
        scopes=cast("tuple[Scope, ...]", tuple(row.scopes)),
        tenant_limits=Limits(**owner.limits),
        tenant_weight=owner.weight,
        key_limits=Limits(**row.limits),
        credential=credential,
    )


def session_ended() -> AuthenticationError:
    """The error for a session that is over."""
    return AuthenticationError("The session has ended: sign in again.", code="session.ended")


def _refusal() -> AuthenticationError:
    return AuthenticationError("The API key is missing, wrong, expired or revoked.")
