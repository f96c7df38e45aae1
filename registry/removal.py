"""Removing versions, and what goes with them: content that nothing refers to any more is told to the caller.

Ephemeral versions go by themselves: one server has their weights in memory, and they go with it, with their time, or
with newer ones. Such a version is then like one that was deleted: its number is not given again, its aliases are gone,
and requests that run with it finish. An alias never falls back to other weights by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Delete, and_, delete, exists, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from manylora.registry import audit
from manylora.registry.cache import Forgets, Transactions
from manylora.registry.db.models import AdapterRow, AliasRow, FileRow, GrantRow, VersionRow
from manylora.registry.names import no_such
from manylora.registry.records import Ephemeral, Removed

CHUNK = 500
SERVER = "server"
"""Actor in the audit log where time or a restart withdraws versions."""
_BLOBS = (VersionRow.weights_sha256, FileRow.sha256)
"""Columns that refer to a blob."""


async def remove(session: AsyncSession, doomed: ColumnElement[bool], *deletions: Delete) -> Removed:
    """Run the deletions, with which the doomed versions go.

    Returns:
        Content that only these versions referred to; tenants may share content.
    """
    contents = (
        await session.execute(select(VersionRow.digest, VersionRow.weights_sha256).where(doomed))
    ).all()
    for deletion in deletions:
        await session.execute(deletion)
    digests = await _unreferenced(session, (digest for digest, _ in contents), VersionRow.digest)
    weights = await unreferenced_blobs(session, (weights for _, weights in contents))
    return Removed(digests=tuple(sorted(digests)), weights=tuple(sorted(weights)))


async def remove_versions(session: AsyncSession, doomed: ColumnElement[bool]) -> Removed:
    """Delete versions of any adapters, with their aliases and grants; an adapter without versions goes, too."""
    adapters = set(await session.scalars(select(VersionRow.adapter_id).where(doomed)))
    same = and_(
        VersionRow.adapter_id == GrantRow.adapter_id, VersionRow.version == GrantRow.version
    )
    has_versions = exists().where(VersionRow.adapter_id == AdapterRow.id)
    return await remove(
        session,
        doomed,
        delete(GrantRow).where(exists().where(same, doomed)),
        delete(VersionRow).where(doomed),
        delete(AdapterRow).where(AdapterRow.id.in_(adapters), ~has_versions),
    )


async def unreferenced_blobs(session: AsyncSession, weights: Iterable[str]) -> frozenset[str]:
    """Blobs among these (64 hex digits) that nothing refers to now."""
    return await _unreferenced(session, weights, *_BLOBS)


async def _unreferenced(
    session: AsyncSession, contents: Iterable[str], *columns: InstrumentedAttribute[str]
) -> frozenset[str]:
    """Digests among these that no row has in these columns."""
    rest = set(contents)
    candidates = sorted(rest)
    for start in range(0, len(candidates), CHUNK):
        chunk = candidates[start : start + CHUNK]
        for column in columns:
            rest -= set(await session.scalars(select(column).where(column.in_(chunk))))
    return frozenset(rest)


async def mark(
    session: AsyncSession, version: VersionRow, life: Ephemeral | None, *, is_new: bool
) -> Removed:
    """Note how long a version lives that is being published, and remove older ones that it supersedes.

    A version whose weights are in the blob store stays what it is; an ephemeral one that comes again as a usual upload
    becomes one of these.
    """
    if life is None:
        version.held_by = version.expires_at = None
        return Removed()
    if is_new or version.held_by is not None:
        version.held_by = life.server
        version.expires_at = life.expires_at
    await session.flush()
    if life.keep is None:
        return Removed()
    is_meant = exists().where(
        AliasRow.adapter_id == VersionRow.adapter_id, AliasRow.version == VersionRow.version
    )
    others = and_(
        VersionRow.adapter_id == version.adapter_id,
        VersionRow.held_by.is_not(None),
        VersionRow.version != version.version,
        ~is_meant,
    )
    newest_first = select(VersionRow.version).where(others).order_by(VersionRow.version.desc())
    old = list(await session.scalars(newest_first.offset(life.keep - 1)))
    if not old:
        return Removed()
    return await remove_versions(
        session, and_(VersionRow.adapter_id == version.adapter_id, VersionRow.version.in_(old))
    )


@dataclass(eq=False)
class EphemeralVersions(Transactions):
    """The part of the registry that withdraws ephemeral versions."""

    resolved: Forgets

    async def expire(self) -> Removed:
        """Withdraw the versions of all servers whose time is over."""
        return await self._withdraw("adapter.expire", VersionRow.expires_at <= self.clock())

    async def lose(self, server: str) -> Removed:
        """Withdraw the versions of a server that has just started, so that its memory is empty."""
        return await self._withdraw("adapter.lose", VersionRow.held_by == server)

    async def unload(self, tenant_id: str, name: str, actor: str) -> Removed:
        """Withdraw all ephemeral versions of a tenant's adapter.

        Raises:
            NotFoundError: The tenant has no adapter of this name with such versions.
        """
        own = select(AdapterRow.id).where(
            AdapterRow.tenant_id == tenant_id, AdapterRow.name == name
        )
        doomed = and_(VersionRow.adapter_id.in_(own), VersionRow.held_by.is_not(None))
        if not await self.database.rows(select(VersionRow.version).where(doomed).limit(1)):
            raise no_such("adapter", name)
        return await self._withdraw("adapter.unload", doomed, actor)

    async def weights(self, server: str) -> frozenset[str]:
        """Blobs (64 hex digits) of the versions that this server has in memory."""
        rows = await self.database.rows(
            select(VersionRow.weights_sha256).where(VersionRow.held_by == server)
        )
        return frozenset(weights for (weights,) in rows)

    async def _withdraw(
        self, action: str, doomed: ColumnElement[bool], actor: str = SERVER
    ) -> Removed:
        statement = (
            select(AdapterRow.tenant, AdapterRow.name, VersionRow.version)
            .join(VersionRow, VersionRow.adapter_id == AdapterRow.id)
            .where(doomed)
            .order_by(VersionRow.version)
        )
        if not await self.database.rows(statement.limit(1)):  # the usual case takes no lock
            return Removed()
        async with self._change(self.resolved) as session:
            gone: dict[tuple[str, str], list[int]] = {}
            for tenant, name, version in await session.execute(statement):
                gone.setdefault((tenant, name), []).append(version)
            for (tenant, name), versions in gone.items():
                audit.add(
                    session,
                    self.clock(),
                    actor,
                    action,
                    tenant=tenant,
                    target=name,
                    versions=versions,
                )
            return await remove_versions(session, doomed)
