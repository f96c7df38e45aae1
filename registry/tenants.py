"""Tenants: rows in, records out. Each function runs in the caller's transaction."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import ConflictError, InvalidRequestError, NotFoundError
from weft.registry.clock import from_micros, to_micros
from weft.registry.limits import TENANT_LIMITS, WEIGHTS, Limits, checked_limits, known_limits
from weft.registry.models import AdapterRow, TenantRow
from weft.registry.names import check_integer, check_name, check_text, is_name
from weft.registry.records import Page, Removed, Tenant
from weft.registry.references import only_referenced_by

MAX_PAGE = 1000


async def create_tenant(
    session: AsyncSession, name: str, limits: Mapping[str, object], weight: float, now: datetime
) -> Tenant:
    """Make a tenant.

    Raises:
        ConflictError: The name is taken.
        InvalidRequestError: The name cannot be stored, there is no such limit, or the weight is out of range.
    """
    check_name(name, "name")
    if await session.scalar(select(TenantRow.id).where(TenantRow.name == name)) is not None:
        raise ConflictError(f"There is a tenant `{name}` already.", param="name")
    row = TenantRow(
        id=f"ten_{secrets.token_hex(12)}",
        name=name,
        limits=checked_limits(limits, TENANT_LIMITS),
        weight=_checked_weight(weight),
        created_at=to_micros(now),
    )
    session.add(row)
    await session.flush()
    return _tenant(row)


async def list_tenants(session: AsyncSession, after: str | None, limit: int) -> Page[Tenant]:
    """Tenants by name, those after the name `after`."""
    check_integer(limit, "limit", low=1, high=MAX_PAGE)
    statement = select(TenantRow).order_by(TenantRow.name).limit(limit + 1)
    if after is not None:
        statement = statement.where(TenantRow.name > check_text(after, "after", 63))
    rows = (await session.scalars(statement)).all()
    more = len(rows) > limit
    return Page(items=tuple(_tenant(row) for row in rows[:limit]), next=rows[limit - 1].name if more else None)


async def get_tenant(session: AsyncSession, name: str) -> Tenant:
    """One tenant.

    Raises:
        NotFoundError: There is none of this name.
    """
    return _tenant(await tenant_row(session, name))


async def tenant_names(session: AsyncSession, ids: Iterable[str]) -> dict[str, str]:
    """Names by id; ids that no tenant has are absent."""
    wanted = sorted(set(ids))
    names: dict[str, str] = {}
    for start in range(0, len(wanted), MAX_PAGE):
        statement = select(TenantRow.id, TenantRow.name).where(TenantRow.id.in_(wanted[start : start + MAX_PAGE]))
        names.update((row.id, row.name) for row in await session.execute(statement))
    return names


async def limits_of(session: AsyncSession, tenant_id: str) -> Limits:
    """What the tenant of this id may have; nothing limits one that is gone."""
    return Limits.of(await session.scalar(select(TenantRow.limits).where(TenantRow.id == tenant_id)) or {})


async def update_tenant(
    session: AsyncSession, name: str, limits: Mapping[str, object] | None, weight: float | None
) -> Tenant:
    """Replace a tenant's limits, its weight, or both; None leaves what there is.

    Raises:
        NotFoundError: There is none of this name.
        InvalidRequestError: There is no such limit, or it or the weight cannot have this value.
    """
    row = await tenant_row(session, name)
    if limits is not None:
        row.limits = checked_limits(limits, TENANT_LIMITS)
    if weight is not None:
        row.weight = _checked_weight(weight)
    return _tenant(row)


async def delete_tenant(session: AsyncSession, name: str) -> Removed:
    """Delete a tenant with its keys, adapters and grants.

    Returns:
        What nobody refers to any more.

    Raises:
        NotFoundError: There is none of this name.
    """
    row = await tenant_row(session, name)
    own = select(AdapterRow.id).where(AdapterRow.tenant_id == row.id)
    removed = await only_referenced_by(session, lambda version: version.adapter_id.in_(own))
    await session.execute(delete(TenantRow).where(TenantRow.id == row.id))
    return removed


async def tenant_row(session: AsyncSession, name: str) -> TenantRow:
    """The row of the tenant of this name.

    Raises:
        NotFoundError: There is none.
    """
    row = await session.scalar(select(TenantRow).where(TenantRow.name == name)) if is_name(name) else None
    if row is None:
        raise NotFoundError("There is no such tenant.")
    return row


def _checked_weight(weight: float) -> float:
    low, high = WEIGHTS
    if not low <= weight <= high:  # also what is no number
        raise InvalidRequestError(f"weight must be from {low} to {high}, got {weight}.", param="weight")
    return weight


def _tenant(row: TenantRow) -> Tenant:
    return Tenant(
        id=row.id,
        name=row.name,
        limits=known_limits(row.limits),
        weight=row.weight,
        created_at=from_micros(row.created_at),
    )
