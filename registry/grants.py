"""Grants: which other tenants may call an adapter, or one version of it. Runs in the caller's transaction."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import InvalidRequestError, NotFoundError
from weft.registry.db.models import AdapterRow, GrantRow, TenantRow, VersionRow, to_record
from weft.registry.names import EVERY_VERSION, MAX_VERSION, check_integer, check_text, no_such
from weft.registry.records import Grant

MAX_GRANTS = 1000


async def add_grant(
    session: AsyncSession, adapter: AdapterRow, grantee: str, version: int | None, now: datetime
) -> tuple[Grant, bool]:
    """Let the tenant with the id `grantee` call an adapter, or only one version of it.

    Returns:
        The grant, and whether it is new.

    Raises:
        NotFoundError: No such tenant, or no such version.
        InvalidRequestError: The grantee is the owner, or there are too many grants.
    """
    other = await _grantee(session, grantee)
    if other.id == adapter.tenant_id:
        raise InvalidRequestError("The owner needs no grant.", param="tenant")
    if version is not None:
        check_integer(version, "version", low=1, high=MAX_VERSION)
        if await session.get(VersionRow, (adapter.id, version)) is None:
            raise no_such("version", f"{adapter.name}@{version}", param="version")
    row = await session.get(GrantRow, (adapter.id, other.id, version or EVERY_VERSION))
    is_new = row is None
    if row is None:
        if len(await list_grants(session, adapter)) >= MAX_GRANTS:
            raise InvalidRequestError(f"An adapter takes at most {MAX_GRANTS} grants.", param="tenant")
        row = GrantRow(adapter_id=adapter.id, tenant_id=other.id, version=version or EVERY_VERSION, created_at=now)
        session.add(row)
        await session.flush()
    return _grant(row, other), is_new


async def remove_grant(session: AsyncSession, adapter: AdapterRow, grantee: str, version: int | None) -> None:
    """Take a grant back.

    Raises:
        NotFoundError: There is no such grant.
    """
    other = await _grantee(session, grantee)
    row = await session.get(GrantRow, (adapter.id, other.id, version or EVERY_VERSION))
    if row is None:
        granted = adapter.name if version is None else f"{adapter.name}@{version}"
        raise NotFoundError(f"`{granted}` is not granted to `{other.name}`.")
    await session.delete(row)


async def list_grants(session: AsyncSession, adapter: AdapterRow) -> tuple[Grant, ...]:
    """An adapter's grants by grantee and version."""
    statement = (
        select(GrantRow, TenantRow)
        .join(TenantRow, TenantRow.id == GrantRow.tenant_id)
        .where(GrantRow.adapter_id == adapter.id)
        .order_by(TenantRow.name, GrantRow.version)
    )
    return tuple(_grant(row, other) for row, other in await session.execute(statement))


async def _grantee(session: AsyncSession, tenant_id: str) -> TenantRow:
    found = await session.get(TenantRow, check_text(tenant_id, "tenant", 512))
    if found is None:
        raise no_such("tenant", tenant_id, param="tenant")
    return found


def _grant(row: GrantRow, grantee: TenantRow) -> Grant:
    return to_record(Grant, row, tenant=grantee.name, version=row.version or None)
