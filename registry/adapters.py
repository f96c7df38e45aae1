"""Adapters and their versions: rows in, records out.

Every question names a tenant, so another tenant's adapter looks like one that does not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Select,
    SQLColumnExpression,
    and_,
    bindparam,
    delete,
    func,
    literal,
    or_,
    select,
    tuple_,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from weft.adapters.ref import LoraSpec
from weft.registry import audit, grants
from weft.registry.aliases import (
    DEFAULT_ALIAS,
    Selector,
    check_not_split,
    main_version,
    model_not_found,
    parse_selector,
    pick,
    point_aliases,
    read_aliases,
)
from weft.registry.audit import ADMIN
from weft.registry.db.clock import from_micros, to_micros
from weft.registry.db.models import AdapterRow, AliasRow, GrantRow, TenantRow, VersionRow
from weft.registry.grants import EVERY_VERSION, may_call
from weft.registry.names import MAX_DESCRIPTION, check_integer, check_name, check_text, is_name, no_such
from weft.registry.records import (
    Adapter,
    AdapterIdentity,
    AdapterVersion,
    Grant,
    Page,
    Removed,
    Resolution,
    Shares,
    VersionFacts,
)
from weft.registry.references import only_referenced_by, unreferenced_weights
from weft.registry.transactions import Transactions
from weft.registry.uploads import Publication

MAX_PAGE = 1000
_CHUNK = 500


class Adapters(Transactions):
    """The part of the registry that keeps adapters, their versions, and who may call them."""

    @asynccontextmanager
    async def publishing(
        self,
        tenant_id: str,
        name: str,
        facts: VersionFacts,
        description: str | None = None,
        activate: bool = True,
        *,
        actor: str = ADMIN,
    ) -> AsyncIterator[Publication]:
        """Make an upload the adapter's next version, and the adapter itself if it is its first, when the block ends.

        An upload with the digest of a living version of this adapter is that version. With `activate` the alias
        `default` moves to the version, whether new or not, unless it splits its requests among versions. A description
        of None leaves the old one.

        In the block, check the limits and then make the blob durable: nothing is to be refused after it.

        Raises:
            NotFoundError: There is no such tenant.
            InvalidRequestError: The name or the description cannot be stored.
            ForbiddenError: The tenant may not store as much; codes quota.*.
            ConflictError: With `activate`, and `default` is split; code upload.ends_split.
        """
        check_name(name, "name")
        now = self._clock()
        async with self._change(self._resolved) as session:
            owner = await session.get(TenantRow, tenant_id)
            if owner is None:
                raise no_such("tenant", tenant_id)
            own = select(AdapterRow).where(AdapterRow.tenant_id == tenant_id, AdapterRow.name == name)
            row = await session.scalar(own)
            if row is None:
                row = AdapterRow(
                    id=f"adp_{secrets.token_hex(12)}",
                    tenant_id=tenant_id,
                    name=name,
                    description=None,
                    pinned=False,
                    next_version=1,
                    created_at=to_micros(now),
                )
                session.add(row)
            if description is not None:
                row.description = check_text(description, "description", MAX_DESCRIPTION)
            same = select(VersionRow).where(VersionRow.adapter_id == row.id, VersionRow.digest == facts.digest)
            version = await session.scalar(same)
            is_new = version is None
            if version is None:
                version = _version_row(row, facts, now)
                row.next_version += 1
                session.add(version)
            await session.flush()
            if activate:
                await check_not_split(session, row.id)
                await point_aliases(session, row.id, {DEFAULT_ALIAS: version.version})
            (adapter,) = await _records(session, [(row, owner.name)])
            adapter = replace(adapter, current=_version(version))
            detail = {"digest": version.digest, "activate": activate}
            target = f"{name}@{version.version}"
            audit.add(session, now, actor, "adapter.publish", tenant=owner.name, target=target, **detail)
            made = Publication(session, adapter, is_new, now)
            yield made
            if not made.is_checked:
                await made.check_limits()

    async def list_adapters(self, tenant_id: str, after: str | None = None, limit: int = 100) -> Page[Adapter]:
        """A tenant's own adapters by name, those after the name `after`."""
        statement = _with_owner(AdapterRow.tenant_id == tenant_id).order_by(AdapterRow.name)
        if after is not None:
            statement = statement.where(AdapterRow.name > check_text(after, "after", 63))
        items, more = await self._first(statement, limit)
        return Page(items=items, next=items[-1].name if more else None)

    async def list_every_adapter(self, after: str | None = None, limit: int = 100) -> Page[Adapter]:
        """Every tenant's adapters by tenant and name, those after `tenant/name`; for admins only."""
        order = (TenantRow.name, AdapterRow.name)
        statement = _with_owner().order_by(*order)
        if after is not None:
            tenant, _, name = check_text(after, "after", 127).partition("/")
            statement = statement.where(tuple_(*order) > tuple_(tenant, name))
        items, more = await self._first(statement, limit)
        return Page(items=items, next=f"{items[-1].tenant}/{items[-1].name}" if more else None)

    async def list_granted(self, tenant_id: str) -> tuple[tuple[Adapter, int | None], ...]:
        """What this tenant may call of others, by owner and name: an adapter, or it at the one granted version."""
        is_granted = and_(VersionRow.adapter_id == AdapterRow.id, VersionRow.version == GrantRow.version)
        is_there = or_(GrantRow.version == EVERY_VERSION, VersionRow.version.is_not(None))
        statement = (
            select(AdapterRow, TenantRow.name, VersionRow)
            .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
            .join(GrantRow, GrantRow.adapter_id == AdapterRow.id)
            .outerjoin(VersionRow, is_granted)
            .where(GrantRow.tenant_id == tenant_id, is_there)
            .order_by(TenantRow.name, AdapterRow.name, GrantRow.version)
        )
        known: dict[str, Adapter] = {}
        async with self._database.read() as session:
            rows = (await session.execute(statement)).all()
            adapters = list({row.id: (row, owner) for row, owner, _ in rows}.values())
            # Others grant as much as they like, so the number of questions must not grow with it.
            for start in range(0, len(adapters), _CHUNK):
                known |= {adapter.id: adapter for adapter in await _records(session, adapters[start : start + _CHUNK])}
        return tuple(
            (known[row.id], None)
            if version is None
            else (replace(known[row.id], current=_version(version)), version.version)
            for row, _, version in rows
        )

    async def get_adapter(self, tenant_id: str, name: str) -> Adapter:
        """One of a tenant's own adapters.

        Raises:
            NotFoundError: The tenant has none of this name.
        """
        async with self._database.read() as session:
            return (await _records(session, [await own_row(session, tenant_id, name)]))[0]

    async def pinned_adapters(self) -> tuple[Adapter, ...]:
        """Every tenant's pinned adapters, oldest current version first; several times what `default` splits."""
        pinned = []
        async with self._database.read() as session:
            found = [(row, owner) for row, owner in await session.execute(_with_owner(AdapterRow.pinned.is_(True)))]
            for adapter in await _records(session, found):
                for version in set(adapter.aliases.get(DEFAULT_ALIAS, ())) - {adapter.current.version}:
                    row = await session.get(VersionRow, (adapter.id, version))
                    pinned += [replace(adapter, current=_version(row))] if row is not None else []
                pinned.append(adapter)
        return tuple(sorted(pinned, key=lambda adapter: (adapter.current.created_at, adapter.current.digest)))

    async def version_names(self, digests: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Every tenant's versions of these digests as `tenant/name@version`, by digest; for admins only."""
        wanted = sorted(set(digests))
        found: dict[str, list[tuple[str, str, int]]] = {}
        for start in range(0, len(wanted), _CHUNK):
            statement = (
                select(VersionRow.digest, TenantRow.name, AdapterRow.name, VersionRow.version)
                .join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
                .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
                .where(VersionRow.digest.in_(wanted[start : start + _CHUNK]))
            )
            for digest, owner, name, version in await self._database.rows(statement):
                found.setdefault(digest, []).append((owner, name, version))
        return {
            digest: tuple(f"{owner}/{name}@{version}" for owner, name, version in sorted(versions))
            for digest, versions in found.items()
        }

    async def list_versions(self, tenant_id: str, name: str) -> tuple[AdapterVersion, ...]:
        """All versions of one of a tenant's adapters, newest first.

        Raises:
            NotFoundError: The tenant has none of this name.
        """
        async with self._database.read() as session:
            adapter, _ = await own_row(session, tenant_id, name)
            versions = select(VersionRow).where(VersionRow.adapter_id == adapter.id)
            newest_first = await session.scalars(versions.order_by(VersionRow.version.desc()))
            return tuple(_version(row) for row in newest_first)

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
            InvalidRequestError: A text cannot be stored, an alias is no name, or means a version that does not exist.
        """
        async with self._change(self._resolved) as session:
            row, owner = await own_row(session, tenant_id, name)
            if description is not None:
                row.description = check_text(description, "description", MAX_DESCRIPTION)
            if pinned is not None:
                row.pinned = pinned
            await point_aliases(session, row.id, aliases or {})
            await session.flush()
            detail = {"pinned": pinned, "aliases": _readable(aliases) if aliases else None}
            audit.add(session, self._clock(), actor, "adapter.update", tenant=owner, target=name, **detail)
            return (await _records(session, [(row, owner)]))[0]

    async def delete_adapter(
        self, tenant_id: str, name: str, version: int | None = None, *, actor: str = ADMIN
    ) -> Removed:
        """Delete one version, or the adapter with all its versions. The last version takes the adapter with it.

        Aliases of a deleted version go with it, `default` too: the plain name then means nothing until it is set.
        The name may be used again; a living adapter never gives a version number twice.

        Returns:
            What nobody refers to any more.

        Raises:
            NotFoundError: The tenant has none of this name, or no such version.
        """
        async with self._change(self._resolved) as session:
            row, owner = await own_row(session, tenant_id, name)
            versions = set(await session.scalars(select(VersionRow.version).where(VersionRow.adapter_id == row.id)))
            if version is not None and version not in versions:
                raise no_such("version", f"{name}@{version}")
            is_whole = version is None or versions == {version}

            def is_doomed(other: type[VersionRow]) -> ColumnElement[bool]:
                own = other.adapter_id == row.id
                return own if is_whole else and_(own, other.version == version)

            removed = await only_referenced_by(session, is_doomed)
            if is_whole:
                await session.execute(delete(AdapterRow).where(AdapterRow.id == row.id))
            else:
                of_version = (GrantRow.adapter_id == row.id, GrantRow.version == version)
                await session.execute(delete(GrantRow).where(*of_version))
                await session.execute(delete(VersionRow).where(is_doomed(VersionRow)))
            target = name if version is None else f"{name}@{version}"
            audit.add(session, self._clock(), actor, "adapter.delete", tenant=owner, target=target)
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
            return await grants.list_grants(session, (await own_row(session, tenant_id, name))[0])

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
            adapter, owner = await own_row(session, tenant_id, name)
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
            adapter, owner = await own_row(session, tenant_id, name)
            await grants.remove_grant(session, adapter, grantee, version)
            detail = {"grantee": grantee, "version": version}
            audit.add(session, self._clock(), actor, "adapter.withdraw", tenant=owner, target=name, **detail)

    async def resolve(self, tenant_id: str, selector: str, sticky: str = "") -> tuple[AdapterIdentity, AdapterVersion]:
        """The adapter version that a caller of this tenant means.

        Args:
            tenant_id: The caller's tenant.
            selector: `name`, `name@3`, `name@prod`, `name@sha256:...`, or the same with `tenant/` in front.
            sticky: Decides where an alias splits its requests among versions; the same text, the same version.

        Raises:
            NotFoundError: Unknown, malformed or not granted, without saying which; code model_not_found.
        """
        parsed = parse_selector(selector)
        meant = await self._resolved.ask((tenant_id, selector), lambda: self._resolve(tenant_id, selector, parsed))
        return meant.adapter, pick(meant.choices, sticky)

    async def _resolve(self, tenant_id: str, text: str, selector: Selector) -> Resolution:
        by = next(kind for kind in ("version", "digest", "alias") if getattr(selector, kind) is not None)
        statement = _meant_by(by, is_own=selector.tenant is None)
        values = {"name": selector.name, "caller": tenant_id, "owner": selector.tenant, "by": getattr(selector, by)}
        found = await self._database.rows(statement, values)
        if not found:
            raise model_not_found(text)
        adapter, owner, _, _ = found[0]
        return Resolution(
            adapter=AdapterIdentity(**_identity(adapter, owner)),
            choices=tuple((_version(version), weight) for _, _, version, weight in found),
        )

    async def _first(self, statement: Select[AdapterRow, str], limit: int) -> tuple[tuple[Adapter, ...], bool]:
        """The first adapters of a listing, and whether there are more."""
        one_more = statement.limit(check_integer(limit, "limit", low=1, high=MAX_PAGE) + 1)
        async with self._database.read() as session:
            rows = [(row, owner) for row, owner in await session.execute(one_more)]
            return await _records(session, rows[:limit]), len(rows) > limit


async def own_row(session: AsyncSession, tenant_id: str, name: str) -> tuple[AdapterRow, str]:
    """The row of one of a tenant's own adapters, and the owner's name.

    Raises:
        NotFoundError: The tenant has none of this name.
    """
    own = _with_owner(AdapterRow.tenant_id == tenant_id, AdapterRow.name == name)
    found = (await session.execute(own)).one_or_none() if is_name(name) else None
    if found is None:
        raise no_such("adapter", name)
    adapter, owner = found
    return adapter, owner


def _with_owner(*conditions: ColumnElement[bool]) -> Select[AdapterRow, str]:
    return select(AdapterRow, TenantRow.name).join(TenantRow, TenantRow.id == AdapterRow.tenant_id).where(*conditions)


@cache
def _meant_by(by: str, *, is_own: bool) -> Select[AdapterRow, str, VersionRow, int]:
    """The statement for a selector, made once: making it takes as long as running it.

    Bind `name`, `caller`, `by` (the version, digest or alias) and, unless `is_own`, `owner`.
    """
    caller: BindParameter[str] = bindparam("caller")
    weight: SQLColumnExpression[int] = literal(1) if by != "alias" else AliasRow.weight
    shares = and_(AliasRow.adapter_id == VersionRow.adapter_id, AliasRow.version == VersionRow.version)
    chosen = {
        "version": VersionRow.version == bindparam("by"),
        "digest": VersionRow.digest == bindparam("by"),
        "alias": and_(shares, AliasRow.alias == bindparam("by")),
    }[by]
    owner = AdapterRow.tenant_id == caller if is_own else TenantRow.name == bindparam("owner")
    return (
        select(AdapterRow, TenantRow.name, VersionRow, weight)
        .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
        .join(VersionRow, VersionRow.adapter_id == AdapterRow.id)
        .where(AdapterRow.name == bindparam("name"), owner, may_call(caller), chosen)
        .order_by(VersionRow.version)
    )


def _identity(adapter: AdapterRow, owner: str) -> dict[str, Any]:
    """The fields of an `AdapterIdentity`."""
    return {
        "id": adapter.id,
        "tenant_id": adapter.tenant_id,
        "tenant": owner,
        "name": adapter.name,
        "created_at": from_micros(adapter.created_at),
    }


async def _records(session: AsyncSession, adapters: Sequence[tuple[AdapterRow, str]]) -> tuple[Adapter, ...]:
    """Records of adapters with their owners' names."""
    ids = [adapter.id for adapter, _ in adapters]
    aliases = await read_aliases(session, ids)
    current = {row.adapter_id: row for row in await session.scalars(_current_versions(ids))}
    return tuple(
        Adapter(
            **_identity(adapter, owner),
            description=adapter.description,
            pinned=adapter.pinned,
            aliases=aliases[adapter.id],
            current=_version(current[adapter.id]),
        )
        for adapter, owner in adapters
    )


def _current_versions(adapter_ids: Sequence[str] | Select[str]) -> Select[VersionRow]:
    other = aliased(VersionRow)
    latest = (
        select(func.max(other.version))
        .where(other.adapter_id == VersionRow.adapter_id)
        .correlate(VersionRow)
        .scalar_subquery()
    )
    plain_name = func.coalesce(main_version(DEFAULT_ALIAS), latest)
    return select(VersionRow).where(VersionRow.adapter_id.in_(adapter_ids), VersionRow.version == plain_name)


def _version_row(adapter: AdapterRow, facts: VersionFacts, now: datetime) -> VersionRow:
    values = {field.name: getattr(facts, field.name) for field in fields(VersionFacts)}
    values |= {"spec": facts.spec.canonical(), "target_modules": list(facts.target_modules)}
    values |= {"report": dict(facts.report), "created_at": to_micros(now)}
    return VersionRow(adapter_id=adapter.id, version=adapter.next_version, **values)


def _version(row: VersionRow) -> AdapterVersion:
    values = {field.name: getattr(row, field.name) for field in fields(AdapterVersion)}
    values |= {"spec": LoraSpec.from_canonical(row.spec), "target_modules": tuple(row.target_modules)}
    return AdapterVersion(**{**values, "created_at": from_micros(row.created_at)})


def _readable(aliases: Mapping[str, Shares | int | None]) -> dict[str, object]:
    """For the audit log, whose JSON knows texts as keys only."""
    return {
        alias: {str(version): weight for version, weight in meaning.items()}
        if isinstance(meaning, Mapping)
        else meaning
        for alias, meaning in aliases.items()
    }
