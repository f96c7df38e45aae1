"""Adapters and their versions: rows in, records out. Each function runs in the caller's transaction.

Every question names a tenant, so another tenant's adapter looks like one that does not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from sqlalchemy import ColumnElement, Select, and_, delete, func, literal, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from weft.adapters.ref import LoraSpec
from weft.errors import NotFoundError
from weft.registry.aliases import main_version, point_aliases, read_aliases
from weft.registry.clock import from_micros, to_micros
from weft.registry.grants import EVERY_VERSION, may_call
from weft.registry.models import AdapterRow, AliasRow, GrantRow, TenantRow, VersionRow
from weft.registry.names import MAX_DESCRIPTION, check_integer, check_name, check_text, is_name
from weft.registry.records import Adapter, AdapterVersion, Page, Removed, Resolution, Shares, VersionFacts
from weft.registry.references import only_referenced_by
from weft.registry.selectors import DEFAULT_ALIAS, Selector, model_not_found, parse_selector

MAX_PAGE = 1000
_CHUNK = 500


async def publish_version(
    session: AsyncSession,
    tenant_id: str,
    name: str,
    facts: VersionFacts,
    *,
    description: str | None,
    activate: bool,
    now: datetime,
) -> tuple[Adapter, bool]:
    """Make an upload the adapter's next version, unless a version with its digest lives already.

    Returns:
        The adapter with the version as `current`, and whether the version is new.

    Raises:
        NotFoundError: There is no such tenant.
        InvalidRequestError: The name or the description cannot be stored.
    """
    check_name(name, "name")
    owner = await session.get(TenantRow, tenant_id)
    if owner is None:
        raise NotFoundError("There is no such tenant.")
    own = select(AdapterRow).where(AdapterRow.tenant_id == tenant_id, AdapterRow.name == name)
    adapter = await session.scalar(own)
    if adapter is None:
        adapter = AdapterRow(
            id=f"adp_{secrets.token_hex(12)}",
            tenant_id=tenant_id,
            name=name,
            description=None,
            pinned=False,
            next_version=1,
            created_at=to_micros(now),
        )
        session.add(adapter)
    if description is not None:
        adapter.description = check_text(description, "description", MAX_DESCRIPTION)
    same = select(VersionRow).where(VersionRow.adapter_id == adapter.id, VersionRow.digest == facts.digest)
    version = await session.scalar(same)
    created = version is None
    if version is None:
        version = _version_row(adapter, facts, now)
        adapter.next_version += 1
        session.add(version)
    await session.flush()
    if activate:
        await point_aliases(session, adapter.id, {DEFAULT_ALIAS: version.version})
    return (await _records(session, [(adapter, owner.name)], {adapter.id: version}))[0], created


async def list_adapters(session: AsyncSession, tenant_id: str, after: str | None, limit: int) -> Page[Adapter]:
    """A tenant's own adapters by name, those after the name `after`."""
    statement = _with_owner(AdapterRow.tenant_id == tenant_id).order_by(AdapterRow.name)
    if after is not None:
        statement = statement.where(AdapterRow.name > check_text(after, "after", 63))
    items, more = await _first(session, statement, limit)
    return Page(items=items, next=items[-1].name if more else None)


async def list_every_adapter(session: AsyncSession, after: str | None, limit: int) -> Page[Adapter]:
    """Every tenant's adapters by tenant and name, those after `tenant/name`."""
    order = (TenantRow.name, AdapterRow.name)
    statement = _with_owner().order_by(*order)
    if after is not None:
        tenant, _, name = check_text(after, "after", 127).partition("/")
        statement = statement.where(tuple_(*order) > tuple_(tenant, name))
    items, more = await _first(session, statement, limit)
    return Page(items=items, next=f"{items[-1].tenant}/{items[-1].name}" if more else None)


async def _first(
    session: AsyncSession, statement: Select[AdapterRow, str], limit: int
) -> tuple[tuple[Adapter, ...], bool]:
    """The first adapters of a listing, and whether there are more."""
    found = await session.execute(statement.limit(check_integer(limit, "limit", low=1, high=MAX_PAGE) + 1))
    rows = [(row, owner) for row, owner in found]
    return await _records(session, rows[:limit]), len(rows) > limit


async def list_granted(session: AsyncSession, tenant_id: str) -> tuple[tuple[Adapter, int | None], ...]:
    """What this tenant may call of others, by owner and name: an adapter, or it at the one version that is granted."""
    is_granted = and_(VersionRow.adapter_id == AdapterRow.id, VersionRow.version == GrantRow.version)
    statement = (
        select(AdapterRow, TenantRow.name, VersionRow)
        .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
        .join(GrantRow, GrantRow.adapter_id == AdapterRow.id)
        .outerjoin(VersionRow, is_granted)
        .where(GrantRow.tenant_id == tenant_id, or_(GrantRow.version == EVERY_VERSION, VersionRow.version.is_not(None)))
        .order_by(TenantRow.name, AdapterRow.name, GrantRow.version)
    )
    rows = (await session.execute(statement)).all()
    adapters = list({row.id: (row, owner) for row, owner, _ in rows}.values())
    known: dict[str, Adapter] = {}
    # Others grant as much as they like, so the number of questions must not grow with it.
    for start in range(0, len(adapters), _CHUNK):
        known |= {adapter.id: adapter for adapter in await _records(session, adapters[start : start + _CHUNK])}
    return tuple(
        (known[row.id], None)
        if version is None
        else (replace(known[row.id], current=_version(version)), version.version)
        for row, _, version in rows
    )


async def get_adapter(session: AsyncSession, tenant_id: str, name: str) -> Adapter:
    """One of a tenant's own adapters.

    Raises:
        NotFoundError: The tenant has none of this name.
    """
    return (await _records(session, [await own_row(session, tenant_id, name)]))[0]


async def pinned_adapters(session: AsyncSession) -> tuple[Adapter, ...]:
    """Every tenant's pinned adapters, oldest current version first; several times what `default` splits by weight."""
    found = [(row, owner) for row, owner in await session.execute(_with_owner(AdapterRow.pinned.is_(True)))]
    pinned = []
    for adapter in await _records(session, found):
        for version in set(adapter.aliases.get(DEFAULT_ALIAS, ())) - {adapter.current.version}:
            row = await session.get(VersionRow, (adapter.id, version))
            pinned += [replace(adapter, current=_version(row))] if row is not None else []
        pinned.append(adapter)
    return tuple(sorted(pinned, key=lambda adapter: (adapter.current.created_at, adapter.current.digest)))


async def version_names(session: AsyncSession, digests: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """All versions of these digests as `tenant/name@version`, by digest; digests that no version has are absent."""
    wanted = sorted(set(digests))
    found: dict[str, list[tuple[str, str, int]]] = {}
    for start in range(0, len(wanted), _CHUNK):
        statement = (
            select(VersionRow.digest, TenantRow.name, AdapterRow.name, VersionRow.version)
            .join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
            .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
            .where(VersionRow.digest.in_(wanted[start : start + _CHUNK]))
        )
        for digest, owner, name, version in await session.execute(statement):
            found.setdefault(digest, []).append((owner, name, version))
    return {
        digest: tuple(f"{owner}/{name}@{version}" for owner, name, version in sorted(versions))
        for digest, versions in found.items()
    }


async def list_versions(session: AsyncSession, tenant_id: str, name: str) -> tuple[AdapterVersion, ...]:
    """All versions of one of a tenant's adapters, newest first.

    Raises:
        NotFoundError: The tenant has none of this name.
    """
    adapter, _ = await own_row(session, tenant_id, name)
    newest_first = select(VersionRow).where(VersionRow.adapter_id == adapter.id).order_by(VersionRow.version.desc())
    return tuple(_version(row) for row in await session.scalars(newest_first))


async def update_adapter(
    session: AsyncSession,
    tenant_id: str,
    name: str,
    *,
    description: str | None,
    pinned: bool | None,
    aliases: Mapping[str, Shares | int | None] | None,
) -> Adapter:
    """Change what is not None; `aliases` merges, and None as its version removes one.

    Raises:
        NotFoundError: The tenant has none of this name.
        InvalidRequestError: A text cannot be stored, or an alias means a version that does not exist.
    """
    adapter, owner = await own_row(session, tenant_id, name)
    if description is not None:
        adapter.description = check_text(description, "description", MAX_DESCRIPTION)
    if pinned is not None:
        adapter.pinned = pinned
    await point_aliases(session, adapter.id, aliases or {})
    await session.flush()
    return (await _records(session, [(adapter, owner)]))[0]


async def delete_adapter(
    session: AsyncSession, tenant_id: str, name: str, version: int | None
) -> tuple[Adapter, Removed]:
    """Delete one version, or the adapter; its last version takes the adapter with it.

    Returns:
        The adapter as it was, and what nobody refers to any more.

    Raises:
        NotFoundError: The tenant has none of this name, or no such version.
    """
    row, owner = await own_row(session, tenant_id, name)
    adapter = (await _records(session, [(row, owner)]))[0]
    versions = set(await session.scalars(select(VersionRow.version).where(VersionRow.adapter_id == row.id)))
    if version is not None and version not in versions:
        raise NotFoundError("There is no such version.")
    if version is None or versions == {version}:
        removed = await only_referenced_by(session, lambda other: other.adapter_id == row.id)
        await session.execute(delete(AdapterRow).where(AdapterRow.id == row.id))
        return adapter, removed

    def is_doomed(other: type[VersionRow]) -> ColumnElement[bool]:
        return and_(other.adapter_id == row.id, other.version == version)

    removed = await only_referenced_by(session, is_doomed)
    await session.execute(delete(GrantRow).where(GrantRow.adapter_id == row.id, GrantRow.version == version))
    await session.execute(delete(VersionRow).where(is_doomed(VersionRow)))
    return adapter, removed


async def resolve(session: AsyncSession, tenant_id: str, text: str) -> Resolution:
    """What a caller of this tenant means.

    Raises:
        NotFoundError: Unknown, malformed or not granted, without saying which; code model_not_found.
    """
    selector = parse_selector(text)
    weight = literal(1) if selector.alias is None else AliasRow.weight
    statement = (
        select(AdapterRow, TenantRow.name, VersionRow, weight)
        .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
        .join(VersionRow, VersionRow.adapter_id == AdapterRow.id)
        .where(AdapterRow.name == selector.name, *_is_meant(tenant_id, selector))
        .order_by(VersionRow.version)
    )
    found = (await session.execute(statement)).all()
    if not found:
        raise model_not_found(text)
    adapter, owner, version, _ = found[0]
    return Resolution(
        adapter=(await _records(session, [(adapter, owner)], {adapter.id: version}))[0],
        choices=tuple((_version(version), weight) for _, _, version, weight in found),
    )


async def own_row(session: AsyncSession, tenant_id: str, name: str) -> tuple[AdapterRow, str]:
    """The row of one of a tenant's own adapters, and the owner's name.

    Raises:
        NotFoundError: The tenant has none of this name.
    """
    own = _with_owner(AdapterRow.tenant_id == tenant_id, AdapterRow.name == name)
    found = (await session.execute(own)).one_or_none() if is_name(name) else None
    if found is None:
        raise NotFoundError("There is no such adapter.")
    adapter, owner = found
    return adapter, owner


def _with_owner(*conditions: ColumnElement[bool]) -> Select[AdapterRow, str]:
    return select(AdapterRow, TenantRow.name).join(TenantRow, TenantRow.id == AdapterRow.tenant_id).where(*conditions)


def _is_meant(tenant_id: str, selector: Selector) -> list[ColumnElement[bool]]:
    owner = AdapterRow.tenant_id == tenant_id if selector.tenant is None else TenantRow.name == selector.tenant
    meant = [owner, may_call(tenant_id)]
    if selector.version is not None:
        return [*meant, VersionRow.version == selector.version]
    if selector.digest is not None:
        return [*meant, VersionRow.digest == selector.digest]
    shares = and_(AliasRow.adapter_id == VersionRow.adapter_id, AliasRow.version == VersionRow.version)
    return [*meant, shares, AliasRow.alias == selector.alias]


async def _records(
    session: AsyncSession,
    adapters: Sequence[tuple[AdapterRow, str]],
    meant: Mapping[str, VersionRow] | None = None,
) -> tuple[Adapter, ...]:
    """Records of adapters with their owners' names; `meant` has the `current` version where it is known."""
    ids = [adapter.id for adapter, _ in adapters]
    aliases = await read_aliases(session, ids)
    current = meant or {row.adapter_id: row for row in await session.scalars(_current_versions(ids))}
    return tuple(
        Adapter(
            id=adapter.id,
            tenant_id=adapter.tenant_id,
            tenant=owner,
            name=adapter.name,
            description=adapter.description,
            pinned=adapter.pinned,
            created_at=from_micros(adapter.created_at),
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
    return VersionRow(
        adapter_id=adapter.id,
        version=adapter.next_version,
        digest=facts.digest,
        weights_sha256=facts.weights_sha256,
        spec=facts.spec.canonical(),
        rank=facts.rank,
        target_modules=list(facts.target_modules),
        applied=facts.applied,
        total=facts.total,
        parameters=facts.parameters,
        size_bytes=facts.size_bytes,
        report=dict(facts.report),
        created_at=to_micros(now),
    )


def _version(row: VersionRow) -> AdapterVersion:
    return AdapterVersion(
        adapter_id=row.adapter_id,
        version=row.version,
        digest=row.digest,
        weights_sha256=row.weights_sha256,
        spec=LoraSpec.from_canonical(row.spec),
        rank=row.rank,
        target_modules=tuple(row.target_modules),
        applied=row.applied,
        total=row.total,
        parameters=row.parameters,
        size_bytes=row.size_bytes,
        report=row.report,
        created_at=from_micros(row.created_at),
    )
