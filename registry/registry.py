"""The registry: what exists, who may use it, and who did.

One object, opened once by the server. Each method is one transaction; the usage ledger hangs on it as `usage`.
Knows blobs by digest only: the caller deletes the files that a delete leaves without a reference.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import AuthenticationError
from weft.registry import adapters, audit, grants, keys, quotas, sessions, tenants
from weft.registry.aliases import pick
from weft.registry.audit import ADMIN
from weft.registry.batches import Batches
from weft.registry.clock import Clock, iso, utc_now
from weft.registry.database import Database
from weft.registry.files import Files
from weft.registry.keys import KeyRing, read_pepper
from weft.registry.ledger import UsageLedger
from weft.registry.limits import Limits
from weft.registry.recent import Changes, Recent
from weft.registry.records import (
    SCOPES,
    Adapter,
    AdapterVersion,
    AuditEntry,
    Credential,
    Grant,
    Identity,
    Key,
    Page,
    Removed,
    Resolution,
    Shares,
    Tenant,
    VersionFacts,
)
from weft.registry.references import unreferenced_weights
from weft.registry.uploads import Terms, Uploads, settle


class Forgetful(Protocol):
    """Keeps answers of the database."""

    def forget(self) -> None:
        """Something changed: no earlier answer counts any more."""


class Registry:
    """Tenants, keys, adapters and usage over one database.

    Thread: the event loop that opened it. All methods raise `CapacityError` (code db.unavailable or
    storage.full) when the database cannot answer; names and texts that cannot be stored raise
    `InvalidRequestError`. `actor` is who did it, for the audit log: a key id, or `admin`.
    """

    def __init__(
        self,
        database: Database,
        ledger: UsageLedger,
        key_ring: KeyRing,
        resolved: Recent[tuple[str, str], Resolution],
        tenant_limits: Recent[str, Limits],
        answers: Recent[str, bool],
        clock: Clock,
    ) -> None:
        self.usage = ledger
        """The usage ledger: `record`, `progress`, `flush`, `query`, `summary`."""
        self.uploads = Uploads(database, clock)
        """Uploads in pieces, and the answers to changes that are sent again."""
        self.files = Files(database, clock)
        self.batches = Batches(database, clock)
        self._database = database
        self._key_ring = key_ring
        self._resolved = resolved
        self._tenant_limits = tenant_limits
        self._answers = answers
        self._clock = clock

    @classmethod
    async def open(
        cls,
        database_url: str | None,
        data_dir: Path,
        admin_key: str | None = None,
        *,
        pepper: str | None = None,
        clock: Clock = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Registry:
        """Open the database, bring its schema up to date, and replay the usage journal.

        Args:
            database_url: SQLAlchemy URL; None takes SQLite in `data_dir`.
            data_dir: Folder of database, pepper and journal; made (mode 0700) when missing. One process at a time.
            admin_key: The secret that makes an admin; None means that nobody can be one by key.
            pepper: Secret that key digests are made with; None takes `data_dir`/pepper, made at first use.
            clock: Gives the present moment.
            monotonic: Seconds that never jump, for the ages of cached keys and of unmoved usage.

        Raises:
            ConfigError: The URL is not understood, another process has the folder, or a newer Weft wrote the database.
        """
        secret = await asyncio.to_thread(_prepare, data_dir, pepper)
        database = await Database.open(database_url, data_dir)

        async def last_change() -> int:
            async with database.read() as session:
                return await audit.last_entry(session)

        try:
            ledger = await UsageLedger.open(database, data_dir / "usage", clock=clock, monotonic=monotonic)
        except BaseException:
            await database.close()
            raise
        changes = Changes(last_change, monotonic)
        key_ring = KeyRing(secret, admin_key, clock, monotonic, changes)
        answers: Recent[str, bool] = Recent(monotonic)
        return cls(database, ledger, key_ring, Recent(monotonic, changes), Recent(monotonic, changes), answers, clock)

    async def close(self) -> None:
        """Move the journal to the database as far as it goes, and close everything."""
        try:
            await self.usage.close()
        finally:
            await self._database.close()

    async def check(self) -> None:
        """Return if the database answers, or did within the last minute: so long, known keys are served without it."""

        async def ask() -> bool:
            await self._database.check()
            return True

        await self._answers.ask("answers", ask)

    async def authenticate(self, secret: str) -> Identity:
        """Who holds this secret.

        Raises:
            AuthenticationError: Nobody, or the key has expired or was revoked.
        """
        return await self._key_ring.authenticate(self._database, secret)

    async def identify_key(self, key_id: str) -> Identity:
        """Who holds the key of this id; raises AuthenticationError where it works no more."""
        async with self._database.read() as session:
            return await keys.identify_key(session, key_id, self._clock())

    async def authenticate_session(self, token: str) -> Identity:
        """Who began the session of this token.

        Raises:
            AuthenticationError: Nobody, or it is over; code session.ended.
        """
        return await self._key_ring.identify_session(self._database, token)

    async def begin_session(self, credential: Credential, kind: sessions.Kind = "session") -> tuple[str, datetime]:
        """Begin a session, or make a link to begin one with.

        Returns:
            The token, which is kept nowhere, and when it ends.
        """
        token = sessions.new_token(kind)
        async with self._change() as session:
            digest = self._key_ring.digest(token)
            return token, await sessions.add_session(session, kind, digest, credential, self._clock())

    async def follow_link(self, token: str) -> Identity:
        """Who made this link, which works no more from now on.

        Raises:
            AuthenticationError: Nobody, it has been used, or is too old; code session.link_used.
        """
        digest, credential = self._key_ring.digest(token), None
        async with self._database.read() as session:
            is_link = await sessions.is_link(session, digest)
        if is_link:  # who only guesses keeps no writer waiting
            async with self._change() as session:
                credential = await sessions.take_link(session, digest, self._clock())
        if credential is None:
            raise AuthenticationError(
                "This link has been used, or is too old: ask for another with `weft dashboard`, or sign in with a key.",
                code="session.link_used",
            )
        return await self._key_ring.identify(self._database, credential)

    async def end_session(self, token: str) -> None:
        """End a session, at once; one that is over already stays so."""
        async with self._change(self._key_ring.sessions) as session:
            await sessions.end_session(session, self._key_ring.digest(token))

    async def create_tenant(self, name: str, limits: Mapping[str, object] | None = None, weight: float = 1.0) -> Tenant:
        """Make a tenant.

        Raises:
            ConflictError: The name is taken.
        """
        async with self._change() as session:
            tenant = await tenants.create_tenant(session, name, limits or {}, weight, self._clock())
            given = {"limits": dict(tenant.limits) or None, "weight": None if weight == 1 else weight}
            audit.add(session, self._clock(), ADMIN, "tenant.create", tenant=name, target=name, **given)
        return tenant

    async def list_tenants(self, after: str | None = None, limit: int = 100) -> Page[Tenant]:
        """Tenants by name."""
        async with self._database.read() as session:
            return await tenants.list_tenants(session, after, limit)

    async def get_tenant(self, name: str) -> Tenant:
        """One tenant.

        Raises:
            NotFoundError: There is none of this name.
        """
        async with self._database.read() as session:
            return await tenants.get_tenant(session, name)

    async def tenant_limits(self, tenant_id: str) -> Limits:
        """What this tenant may have; nothing limits one that is gone. Not read anew for each call."""

        async def read() -> Limits:
            async with self._database.read() as session:
                return await tenants.limits_of(session, tenant_id)

        return await self._tenant_limits.ask(tenant_id, read)

    async def stored(self, tenant_id: str) -> dict[str, int]:
        """What counts against the limits `adapters` and `stored_bytes` of this tenant."""
        async with self._database.read() as session:
            return {
                "adapters": await quotas.count_adapters(session, tenant_id),
                "stored_bytes": await quotas.stored_bytes(session, tenant_id, self._clock()),
            }

    async def update_tenant(
        self, name: str, limits: Mapping[str, object] | None = None, weight: float | None = None
    ) -> Tenant:
        """Replace a tenant's limits, its weight, or both; None leaves what there is.

        Raises:
            NotFoundError: There is none of this name.
        """
        async with self._change(self._key_ring, self._tenant_limits) as session:
            tenant = await tenants.update_tenant(session, name, limits, weight)
            given = {"limits": None if limits is None else dict(limits), "weight": weight}
            audit.add(session, self._clock(), ADMIN, "tenant.update", tenant=name, target=name, **given)
        return tenant

    async def delete_tenant(self, name: str) -> Removed:
        """Delete a tenant with its keys and adapters; its usage stays. Its keys stop working at once.

        Raises:
            NotFoundError: There is none of this name.
        """
        async with self._change(self._key_ring, self._tenant_limits, self._resolved) as session:
            removed = await tenants.delete_tenant(session, name)
            audit.add(session, self._clock(), ADMIN, "tenant.delete", tenant=name, target=name)
        return removed

    async def create_key(
        self,
        tenant: str,
        name: str | None = None,
        scopes: Sequence[str] = SCOPES,
        expires_at: datetime | None = None,
        limits: Mapping[str, object] | None = None,
    ) -> tuple[Key, str]:
        """Make a key for the tenant of this name; the second value is its secret, which is kept nowhere.

        Raises:
            NotFoundError: There is no such tenant.
            InvalidRequestError: A scope or a limit is unknown, there is no scope, or `expires_at` has passed.
        """
        async with self._change() as session:
            key, secret = await keys.create_key(
                session, self._key_ring, tenant, name, scopes, expires_at, now=self._clock()
            )
            key = await keys.update_key(session, key.id, limits=limits, now=self._clock())
            audit.add(
                session,
                self._clock(),
                ADMIN,
                "key.create",
                tenant=tenant,
                target=key.id,
                scopes=list(key.scopes),
                limits=dict(key.limits) or None,
                expires_at=iso(key.expires_at) if key.expires_at else None,
            )
        return key, secret

    async def update_key(
        self,
        key_id: str,
        *,
        name: str | None = None,
        limits: Mapping[str, object] | None = None,
        scopes: Sequence[str] | None = None,
        expires_at: datetime | None = None,
    ) -> Key:
        """Change what is not None, in force at once; `limits` replaces all of the key's.

        Raises:
            NotFoundError: There is no such key, or it was revoked.
            InvalidRequestError: A value is none that a key could be made with.
        """
        async with self._change(self._key_ring) as session:
            key = await keys.update_key(
                session, key_id, name=name, limits=limits, scopes=scopes, expires_at=expires_at, now=self._clock()
            )
            audit.add(
                session,
                self._clock(),
                ADMIN,
                "key.update",
                tenant=key.tenant,
                target=key_id,
                name=name,
                limits=limits if limits is None else dict(key.limits),
                scopes=scopes if scopes is None else list(key.scopes),
                expires_at=expires_at if expires_at is None else iso(expires_at),
            )
        return key

    async def get_key(self, key_id: str) -> Key:
        """One key.

        Raises:
            NotFoundError: There is no such key, or it was revoked.
        """
        async with self._database.read() as session:
            return await keys.get_key(session, key_id)

    async def list_keys(self, tenant: str, *, with_revoked: bool = False) -> tuple[Key, ...]:
        """The keys of the tenant of this name, oldest first; those that were revoked only when asked for.

        Raises:
            NotFoundError: There is no such tenant.
        """
        async with self._database.read() as session:
            return await keys.list_keys(session, tenant, with_revoked=with_revoked)

    async def revoke_key(self, key_id: str) -> None:
        """Make a key useless, at once.

        Raises:
            NotFoundError: There is no such key, or it was revoked before.
        """
        async with self._change(self._key_ring) as session:
            key = await keys.revoke_key(session, key_id, self._clock())
            audit.add(session, self._clock(), ADMIN, "key.revoke", tenant=key.tenant, target=key_id)

    async def rotate_key(self, key_id: str, grace_s: float = 0.0) -> tuple[Key, str]:
        """Give a key another secret; the one before stops working after `grace_s` seconds, at once for 0.

        Returns:
            The key, and its new secret, which is kept nowhere.

        Raises:
            NotFoundError: There is no such key, or it was revoked before.
        """
        async with self._change(self._key_ring) as session:
            key, secret = await keys.rotate_key(session, self._key_ring, key_id, grace_s, self._clock())
            audit.add(session, self._clock(), ADMIN, "key.rotate", tenant=key.tenant, target=key_id, grace_s=grace_s)
        return key, secret

    async def publish_version(
        self,
        tenant_id: str,
        name: str,
        facts: VersionFacts,
        description: str | None = None,
        activate: bool = True,
        *,
        actor: str = ADMIN,
        terms: Terms | None = None,
    ) -> tuple[Adapter, AdapterVersion, bool]:
        """Make an upload the adapter's next version, and the adapter itself if it is its first.

        An upload with the digest of a living version of this adapter is that version. With `activate` the alias
        `default` moves to the version, whether new or not. A description of None leaves the old one.

        Returns:
            The adapter with `current` as the published version, that version, and whether it is new.

        Raises:
            NotFoundError: There is no such tenant, or the upload of the `terms` is gone.
            ForbiddenError: The tenant may not store as much; codes quota.*.
            AnsweredBeforeError: By the `terms`, the same change was made before.
        """
        async with self._change(self._resolved) as session:
            adapter, created = await adapters.publish_version(
                session, tenant_id, name, facts, description=description, activate=activate, now=self._clock()
            )
            version = adapter.current
            target = f"{name}@{version.version}"
            audit.add(
                session,
                self._clock(),
                actor,
                "adapter.publish",
                tenant=adapter.tenant,
                target=target,
                digest=version.digest,
                activate=activate,
            )
            if terms is not None:
                await settle(session, tenant_id, adapter, created, terms, self._clock())
            if created:
                await quotas.check_storage(session, tenant_id, self._clock())
                if version.version == 1:
                    await quotas.check_adapters(session, tenant_id)
            if terms is not None and terms.store is not None:
                await terms.store()
        return adapter, version, created

    async def list_adapters(self, tenant_id: str, after: str | None = None, limit: int = 100) -> Page[Adapter]:
        """A tenant's own adapters by name."""
        async with self._database.read() as session:
            return await adapters.list_adapters(session, tenant_id, after, limit)

    async def list_every_adapter(self, after: str | None = None, limit: int = 100) -> Page[Adapter]:
        """Every tenant's adapters by tenant and name, those after `tenant/name`; for admins only."""
        async with self._database.read() as session:
            return await adapters.list_every_adapter(session, after, limit)

    async def list_granted(self, tenant_id: str) -> tuple[tuple[Adapter, int | None], ...]:
        """What this tenant may call of others, as `tenant/name`, or at the one version that is granted."""
        async with self._database.read() as session:
            return await adapters.list_granted(session, tenant_id)

    async def get_adapter(self, tenant_id: str, name: str) -> Adapter:
        """One of a tenant's own adapters.

        Raises:
            NotFoundError: The tenant has none of this name.
        """
        async with self._database.read() as session:
            return await adapters.get_adapter(session, tenant_id, name)

    async def pinned_adapters(self) -> tuple[Adapter, ...]:
        """Every tenant's pinned adapters, those whose current version is oldest first."""
        async with self._database.read() as session:
            return await adapters.pinned_adapters(session)

    async def version_names(self, digests: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Every tenant's versions of these digests as `tenant/name@version`; for admins only."""
        async with self._database.read() as session:
            return await adapters.version_names(session, digests)

    async def tenant_names(self, ids: Iterable[str]) -> dict[str, str]:
        """Names of the tenants with these ids; ids that no tenant has are absent."""
        async with self._database.read() as session:
            return await tenants.tenant_names(session, ids)

    async def list_versions(self, tenant_id: str, name: str) -> tuple[AdapterVersion, ...]:
        """All versions of one of a tenant's adapters, newest first.

        Raises:
            NotFoundError: The tenant has none of this name.
        """
        async with self._database.read() as session:
            return await adapters.list_versions(session, tenant_id, name)

    async def update_adapter(
        self,
        tenant_id: str,
        name: str,
        *,
        description: str | None = None,
        pinned: bool | None = None,
        aliases: Mapping[str, Shares | int | None] | None = None,
        actor: str = ADMIN,
    ) -> Adapter:
        """Change what is not None. `aliases` merges: versions by weight or one version move an alias, None removes it.

        Raises:
            NotFoundError: The tenant has none of this name.
            InvalidRequestError: An alias is no name, or means a version that does not exist.
        """
        async with self._change(self._resolved) as session:
            adapter = await adapters.update_adapter(
                session, tenant_id, name, description=description, pinned=pinned, aliases=aliases
            )
            audit.add(
                session,
                self._clock(),
                actor,
                "adapter.update",
                tenant=adapter.tenant,
                target=name,
                pinned=pinned,
                aliases=_readable(aliases) if aliases else None,
            )
        return adapter

    async def delete_adapter(
        self, tenant_id: str, name: str, version: int | None = None, *, actor: str = ADMIN
    ) -> Removed:
        """Delete one version, or the adapter with all its versions. The last version takes the adapter with it.

        Aliases of a deleted version go with it, `default` too: the plain name then means nothing until it is set.
        The name may be used again; a living adapter never gives a version number twice.

        Raises:
            NotFoundError: The tenant has none of this name, or no such version.
        """
        async with self._change(self._resolved) as session:
            adapter, removed = await adapters.delete_adapter(session, tenant_id, name, version)
            target = name if version is None else f"{name}@{version}"
            audit.add(session, self._clock(), actor, "adapter.delete", tenant=adapter.tenant, target=target)
        return removed

    async def unreferenced(self, weights: Iterable[str]) -> frozenset[str]:
        """Which of these blobs (64 hex digits) no version refers to now."""
        async with self._database.read() as session:
            return await unreferenced_weights(session, weights)

    @asynccontextmanager
    async def holding_unreferenced(self, weights: Iterable[str]) -> AsyncIterator[frozenset[str]]:
        """Those of the blobs (64 hex digits) that no version refers to, and that none will refer to in the block.

        Publishing waits meanwhile, on every server over this database: delete the blobs in the block.
        """
        async with self._database.write() as session:
            yield await unreferenced_weights(session, weights)

    async def list_grants(self, tenant_id: str, name: str) -> tuple[Grant, ...]:
        """Who else may call one of a tenant's adapters.

        Raises:
            NotFoundError: The tenant has none of this name.
        """
        async with self._database.read() as session:
            return await grants.list_grants(session, (await adapters.own_row(session, tenant_id, name))[0])

    async def grant_adapter(
        self, tenant_id: str, name: str, grantee: str, version: int | None = None, *, actor: str = ADMIN
    ) -> tuple[Grant, bool]:
        """Let the tenant with the id `grantee` call an adapter as `tenant/name`, or one version of it.

        Returns:
            The grant, and whether it is new.

        Raises:
            NotFoundError: No such adapter, version or grantee.
            InvalidRequestError: The grantee is the owner, or there are too many grants.
        """
        async with self._change(self._resolved) as session:
            adapter, owner = await adapters.own_row(session, tenant_id, name)
            grant, is_new = await grants.add_grant(session, adapter, grantee, version, self._clock())
            detail = {"grantee": grant.tenant, "version": version}
            audit.add(session, self._clock(), actor, "adapter.grant", tenant=owner, target=name, **detail)
        return grant, is_new

    async def withdraw_grant(
        self, tenant_id: str, name: str, grantee: str, version: int | None = None, *, actor: str = ADMIN
    ) -> None:
        """Take a grant back.

        Raises:
            NotFoundError: No such adapter or grant.
        """
        async with self._change(self._resolved) as session:
            adapter, owner = await adapters.own_row(session, tenant_id, name)
            await grants.remove_grant(session, adapter, grantee, version)
            detail = {"grantee": grantee, "version": version}
            audit.add(session, self._clock(), actor, "adapter.withdraw", tenant=owner, target=name, **detail)

    async def resolve(self, tenant_id: str, selector: str, sticky: str = "") -> tuple[Adapter, AdapterVersion]:
        """The adapter version that a caller of this tenant means.

        Args:
            tenant_id: The caller's tenant.
            selector: `name`, `name@3`, `name@prod`, `name@sha256:...`, or the same with `tenant/` in front.
            sticky: Decides where an alias splits its requests among versions; the same text, the same version.

        Raises:
            NotFoundError: Unknown, malformed or not granted, without saying which; code model_not_found.
        """

        async def read() -> Resolution:
            async with self._database.read() as session:
                return await adapters.resolve(session, tenant_id, selector)

        meant = await self._resolved.ask((tenant_id, selector), read)
        version = pick(meant.choices, sticky)
        return replace(meant.adapter, current=version), version

    async def list_audit(
        self, before: int | None = None, limit: int = 100, tenant: str | None = None
    ) -> tuple[AuditEntry, ...]:
        """Changes, newest first, of all tenants or one; `before` is the id of the last one seen."""
        async with self._database.read() as session:
            return await audit.list_entries(session, before, limit, tenant)

    @asynccontextmanager
    async def _change(self, *touched: Forgetful) -> AsyncIterator[AsyncSession]:
        """A transaction that writes, after which the answers that it touches count no more.

        Others stay, so that an outage of the database right after a change stops nobody whom it did not concern.
        """
        has_begun = False
        try:
            async with self._database.write() as session:
                has_begun = True
                yield session
        finally:
            # Also when the caller is cancelled: the change may have been committed.
            for answers in touched if has_begun else ():
                answers.forget()


def _readable(aliases: Mapping[str, Shares | int | None]) -> dict[str, object]:
    """For the audit log, whose JSON knows texts as keys only."""
    return {
        alias: {str(version): weight for version, weight in meaning.items()}
        if isinstance(meaning, Mapping)
        else meaning
        for alias, meaning in aliases.items()
    }


def _prepare(data_dir: Path, pepper: str | None) -> bytes:
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return read_pepper(data_dir, pepper)
