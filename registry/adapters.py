"""Adapters and their versions: published, listed, changed, deleted, and found by the name that a request gives.

Every method takes the id of a tenant and finds only its adapters: another tenant's look like ones that do not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace

from sqlalchemy import and_, func, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from manylora.adapters.ref import LoraSpec
from manylora.registry import audit, names
from manylora.registry.aliases import (
    check_not_split,
    main_version,
    meant_by,
    pick,
    point_aliases,
    read_aliases,
)
from manylora.registry.audit import ADMIN
from manylora.registry.cache import ReadThroughCache, Transactions
from manylora.registry.db.models import AdapterRow, GrantRow, TenantRow, VersionRow
from manylora.registry.records import (
    Adapter,
    AdapterIdentity,
    AdapterVersion,
    Ephemeral,
    Page,
    Removed,
    Resolution,
    VersionDraft,
    VersionFacts,
    VersionWeights,
    to_record,
)
from manylora.registry.removal import CHUNK, mark, remove_versions, unreferenced_blobs
from manylora.registry.uploads import Publication


@dataclass(eq=False)
class Adapters(Transactions):
    """The part of the registry that keeps adapters and their versions."""

    resolved: ReadThroughCache[tuple[str, str], Resolution]
    """Versions by tenant and selector."""

    @asynccontextmanager
    async def publishing(
        self,
        tenant_id: str,
        draft: VersionDraft,
        facts: VersionFacts,
        *,
        life: Ephemeral | None = None,
        actor: str = ADMIN,
    ) -> AsyncIterator[Publication]:
        """Make an upload the adapter's next version, and the adapter itself if it is its first, when the block ends.

        An upload with the digest of a living version of this adapter is that version. With `draft.activate` the alias
        `default` moves to the version, whether new or not, unless it splits its requests among versions. A description
        of None leaves the old one. An upload in pieces ends with its version. With `life` the version is ephemeral, and
        may supersede older ones.

        In the block, `keep` the answer and then make the blob durable: nothing is to be refused after it.

        Raises:
            NotFoundError: There is no such tenant.
            InvalidRequestError: The name or the description cannot be stored.
            ForbiddenError: The tenant may not store as much; codes quota.*.
            ConflictError: With `activate`, and `default` is split; code upload.ends_split.
        """
        name = draft.name
        names.check_name(name, "name")
        now = self.clock()
        async with self._change(self.resolved) as session:
            owner = await session.get(TenantRow, tenant_id)
            if owner is None:
                raise names.no_such("tenant", tenant_id)
            own = select(AdapterRow).where(
                AdapterRow.tenant_id == tenant_id, AdapterRow.name == name
            )
            row = await session.scalar(own)
            if row is None:
                row = AdapterRow(
                    id=f"adp_{secrets.token_hex(12)}",
                    tenant_id=tenant_id,
                    tenant=owner.name,
                    name=name,
                    description=None,
                    pinned_copies=0,
                    next_version=1,
                    created_at=now,
                )
                session.add(row)
            if draft.description is not None:
                row.description = names.check_text(
                    draft.description, "description", names.MAX_DESCRIPTION
                )
            same = select(VersionRow).where(
                VersionRow.adapter_id == row.id, VersionRow.digest == facts.digest
            )
            version = await session.scalar(same)
            is_new = version is None
            if version is None:
                values = {field.name: getattr(facts, field.name) for field in fields(VersionFacts)}
                values |= {
                    "spec": facts.spec.canonical(),
                    "target_modules": list(facts.target_modules),
                }
                version = VersionRow(
                    adapter_id=row.id, version=row.next_version, created_at=now, **values
                )
                row.next_version += 1
                session.add(version)
            await session.flush()
            if draft.activate:
                await check_not_split(session, row.id)
                await point_aliases(session, row.id, {names.DEFAULT_ALIAS: version.version})
            removed = await mark(session, version, life, is_new=is_new)
            (adapter,) = await _records(session, [row])
            adapter = replace(adapter, current=_version(version))
            audit.add(
                session,
                now,
                actor,
                "adapter.publish",
                tenant=owner.name,
                target=f"{name}@{version.version}",
                digest=version.digest,
                activate=draft.activate,
            )
            yield Publication(
                session=session,
                now=now,
                draft=draft,
                adapter=adapter,
                is_new=is_new,
                removed=removed,
            )

    async def list_adapters(
        self, tenant_id: str | None, after: str | None = None, limit: int = 100
    ) -> Page[Adapter]:
        """A tenant's own adapters by name, or with None all tenants' by tenant and name; for admins only.

        Args:
            tenant_id: The tenant.
            after: Lists those after this name, or for all tenants after `tenant/name`.
            limit: Largest number of adapters.
        """
        order = (TenantRow.name, AdapterRow.name)
        found = select(AdapterRow).join(TenantRow).order_by(*order).limit(limit + 1)
        if tenant_id is not None:
            found = found.where(AdapterRow.tenant_id == tenant_id)
        if after is not None:
            tenant, _, name = names.check_text(after, "after", 127).partition("/")
            found = found.where(
                tuple_(*order) > tuple_(tenant, name)
                if tenant_id is None
                else AdapterRow.name > after
            )
        async with self.database.read() as session:
            listed = await _records(session, (await session.scalars(found)).all())
        return Page.of(
            listed,
            limit,
            lambda last: f"{last.tenant}/{last.name}" if tenant_id is None else last.name,
        )

    async def list_granted(self, tenant_id: str) -> tuple[tuple[Adapter, int | None], ...]:
        """Adapters that others let this tenant call, by owner and name, with the version if one alone is granted."""
        is_granted = and_(
            VersionRow.adapter_id == AdapterRow.id, VersionRow.version == GrantRow.version
        )
        is_there = or_(GrantRow.version == names.EVERY_VERSION, VersionRow.version.is_not(None))
        statement = (
            select(AdapterRow, VersionRow)
            .join(GrantRow, GrantRow.adapter_id == AdapterRow.id)
            .outerjoin(VersionRow, is_granted)
            .where(GrantRow.tenant_id == tenant_id, is_there)
            .order_by(AdapterRow.tenant, AdapterRow.name, GrantRow.version)
        )
        known: dict[str, Adapter] = {}
        async with self.database.read() as session:
            rows = (await session.execute(statement)).all()
            adapters = list(dict.fromkeys(row for row, _ in rows))
            # Others decide how much they grant: the number of queries must not grow with it.
            for start in range(0, len(adapters), CHUNK):
                known |= {
                    adapter.id: adapter
                    for adapter in await _records(session, adapters[start : start + CHUNK])
                }
        return tuple(
            (known[row.id], None)
            if version is None
            else (replace(known[row.id], current=_version(version)), version.version)
            for row, version in rows
        )

    async def get_adapter(self, tenant_id: str, name: str) -> Adapter:
        """One of a tenant's own adapters.

        Raises:
            NotFoundError: The tenant has none of this name.
        """
        async with self.database.read() as session:
            return (await _records(session, [await own_row(session, tenant_id, name)]))[0]

    async def pinned_adapters(self) -> tuple[Adapter, ...]:
        """All tenants' pinned adapters, oldest version first: each once for every version that `default` means."""
        pinned = []
        async with self.database.read() as session:
            found = await session.scalars(select(AdapterRow).where(AdapterRow.pinned_copies > 0))
            for adapter in await _records(session, found.all()):
                for version in adapter.aliases.get(names.DEFAULT_ALIAS, [adapter.current.version]):
                    row = await session.get_one(VersionRow, (adapter.id, version))
                    pinned.append(replace(adapter, current=_version(row)))
        return tuple(
            sorted(pinned, key=lambda adapter: (adapter.current.created_at, adapter.current.digest))
        )

    async def version_names(self, digests: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """All tenants' versions with these digests as `tenant/name@version`, by digest. For admins only."""
        wanted = sorted(set(digests))
        found: dict[str, list[str]] = {}
        for start in range(0, len(wanted), CHUNK):
            statement = (
                select(VersionRow.digest, AdapterRow.tenant, AdapterRow.name, VersionRow.version)
                .join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
                .where(VersionRow.digest.in_(wanted[start : start + CHUNK]))
                .order_by(AdapterRow.tenant, AdapterRow.name, VersionRow.version)
            )
            for digest, owner, name, version in await self.database.rows(statement):
                found.setdefault(digest, []).append(f"{owner}/{name}@{version}")
        return {digest: tuple(versions) for digest, versions in found.items()}

    async def list_versions(self, tenant_id: str, name: str) -> tuple[AdapterVersion, ...]:
        """All versions of one of a tenant's adapters, newest first.

        Raises:
            NotFoundError: The tenant has none of this name.
        """
        async with self.database.read() as session:
            adapter = await own_row(session, tenant_id, name)
            versions = select(VersionRow).where(VersionRow.adapter_id == adapter.id)
            newest_first = await session.scalars(versions.order_by(VersionRow.version.desc()))
            return tuple(_version(row) for row in newest_first)

    async def update_adapter(
        self,
        tenant_id: str,
        name: str,
        *,
        description: str | None = None,
        pinned_copies: int | None = None,
        aliases: Mapping[str, VersionWeights | int | None] | None = None,
        actor: str = ADMIN,
    ) -> Adapter:
        """Change what is not None. `aliases` sets each alias to one version, or versions by weight; None removes it.

        Raises:
            NotFoundError: The tenant has none of this name.
            InvalidRequestError: A text cannot be stored, an alias is no name, or a version does not exist.
        """
        async with self._change(self.resolved) as session:
            row = await own_row(session, tenant_id, name)
            if description is not None:
                row.description = names.check_text(
                    description, "description", names.MAX_DESCRIPTION
                )
            if pinned_copies is not None:
                row.pinned_copies = pinned_copies
            await point_aliases(session, row.id, aliases or {})
            await session.flush()
            audit.add(
                session,
                self.clock(),
                actor,
                "adapter.update",
                tenant=row.tenant,
                target=name,
                pinned_copies=pinned_copies,
                aliases=dict(aliases) if aliases else None,
            )
            return (await _records(session, [row]))[0]

    async def delete_adapter(
        self, tenant_id: str, name: str, version: int | None = None, *, actor: str = ADMIN
    ) -> Removed:
        """Delete one version, or the adapter with all its versions. Deleting the last version deletes the adapter.

        Aliases of a deleted version are deleted, `default` too; the plain name then means nothing until it is set.
        The name may be used again. An adapter never uses a version number twice.

        Returns:
            Content that nothing refers to any more.

        Raises:
            NotFoundError: The tenant has none of this name, or no such version.
        """
        async with self._change(self.resolved) as session:
            row = await own_row(session, tenant_id, name)
            if version and await session.get(VersionRow, (row.id, version)) is None:
                raise names.no_such("version", f"{name}@{version}")
            target = name if version is None else f"{name}@{version}"
            audit.add(
                session, self.clock(), actor, "adapter.delete", tenant=row.tenant, target=target
            )
            own = VersionRow.adapter_id == row.id
            return await remove_versions(
                session, own if version is None else and_(own, VersionRow.version == version)
            )

    async def unreferenced(self, weights: Iterable[str]) -> frozenset[str]:
        """Blobs among these (64 hex digits) that nothing refers to now."""
        async with self.database.read() as session:
            return await unreferenced_blobs(session, weights)

    @asynccontextmanager
    async def locking_unreferenced(self, weights: Iterable[str]) -> AsyncIterator[frozenset[str]]:
        """Blobs among these (64 hex digits) that nothing refers to, for as long as the block runs.

        Publishing waits meanwhile, on every server over this database: delete the blobs inside the block.
        """
        async with self.database.write() as session:
            yield await unreferenced_blobs(session, weights)

    async def resolve(
        self, tenant_id: str, selector: str, sticky: str = ""
    ) -> tuple[AdapterIdentity, AdapterVersion]:
        """The adapter version that a caller of this tenant means.

        Args:
            tenant_id: The caller's tenant.
            selector: `name`, `name@3`, `name@prod`, `name@sha256:...`, or the same with `tenant/` in front.
            sticky: Where an alias splits its requests: the same text always gets the same version.

        Raises:
            NotFoundError: Unknown, malformed or not granted, without saying which; code model_not_found.
        """
        parsed = names.parse_selector(selector)
        meant = self.resolved.ask(
            (tenant_id, selector), lambda: self._resolve(tenant_id, selector, parsed)
        )
        adapter, choices = await meant
        return adapter, pick(choices, sticky)

    async def _resolve(self, tenant_id: str, text: str, selector: names.Selector) -> Resolution:
        statement = meant_by(selector.by, is_own=selector.tenant is None)
        values = {
            "name": selector.name,
            "caller": tenant_id,
            "owner": selector.tenant,
            "by": selector.value,
        }
        found = await self.database.rows(statement, values)
        if not found:
            raise names.model_not_found(text)
        return to_record(AdapterIdentity, found[0][0]), [
            (_version(version), weight) for _, version, weight in found
        ]


async def own_row(session: AsyncSession, tenant_id: str, name: str) -> AdapterRow:
    """The row of one of a tenant's own adapters.

    Raises:
        NotFoundError: The tenant has none of this name.
    """
    own = select(AdapterRow).where(AdapterRow.tenant_id == tenant_id, AdapterRow.name == name)
    row = await session.scalar(own) if names.is_name(name) else None
    if row is None:
        raise names.no_such("adapter", name)
    return row


async def _records(session: AsyncSession, adapters: Sequence[AdapterRow]) -> tuple[Adapter, ...]:
    ids = [adapter.id for adapter in adapters]
    aliases = await read_aliases(session, ids)
    other = aliased(VersionRow)
    latest = (
        select(func.max(other.version))
        .where(other.adapter_id == VersionRow.adapter_id)
        .correlate(VersionRow)
    )
    plain_name = func.coalesce(main_version(names.DEFAULT_ALIAS), latest.scalar_subquery())
    meant = select(VersionRow).where(
        VersionRow.adapter_id.in_(ids), VersionRow.version == plain_name
    )
    current = {row.adapter_id: row for row in await session.scalars(meant)}
    return tuple(
        to_record(
            Adapter, adapter, aliases=aliases[adapter.id], current=_version(current[adapter.id])
        )
        for adapter in adapters
    )


def _version(row: VersionRow) -> AdapterVersion:
    return to_record(
        AdapterVersion,
        row,
        spec=LoraSpec.from_canonical(row.spec),
        target_modules=tuple(row.target_modules),
    )
