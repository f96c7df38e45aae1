"""Tenants: how they are made, changed, listed and deleted."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.errors import ConflictError
from manylora.registry import audit
from manylora.registry.audit import ADMIN
from manylora.registry.cache import Forgets, ReadThroughCache, Transactions
from manylora.registry.db.models import AdapterRow, TenantRow, VersionRow
from manylora.registry.limits import (
    TENANT_LIMITS,
    Limits,
    checked_limits,
    count_adapters,
    stored_bytes,
)
from manylora.registry.names import check_name, is_name, no_such
from manylora.registry.records import Page, Removed
from manylora.registry.removal import CHUNK, remove


@dataclass(eq=False)
class Tenants(Transactions):
    """The part of the registry that keeps tenants."""

    identities: Forgets
    known_limits: ReadThroughCache[str, Limits]
    """Limits by tenant."""
    resolved: Forgets

    async def create_tenant(
        self, name: str, limits: Mapping[str, object] | None = None, weight: float = 1.0
    ) -> TenantRow:
        """Make a tenant.

        Raises:
            ConflictError: The name is taken.
            InvalidRequestError: The name cannot be stored, or there is no such limit.
        """
        check_name(name, "name")
        async with self._change() as session:
            if await session.scalar(select(TenantRow.id).where(TenantRow.name == name)) is not None:
                raise ConflictError(f"There is a tenant `{name}` already.", param="name")
            row = TenantRow(
                id=f"ten_{secrets.token_hex(12)}",
                name=name,
                limits=checked_limits(limits or {}, TENANT_LIMITS),
                weight=weight,
                created_at=self.clock(),
            )
            session.add(row)
            await session.flush()
            given = {"limits": row.limits or None, "weight": None if weight == 1 else weight}
            audit.add(
                session, self.clock(), ADMIN, "tenant.create", tenant=name, target=name, **given
            )
            return row

    async def list_tenants(self, after: str | None = None, limit: int = 100) -> Page[TenantRow]:
        """Tenants by name; those after the name `after`."""
        return await self._page(select(TenantRow), TenantRow.name, after, limit)

    async def get_tenant(self, name: str) -> TenantRow:
        """One tenant.

        Raises:
            NotFoundError: No tenant has this name.
        """
        async with self.database.read() as session:
            return await tenant_row(session, name)

    async def tenant_names(self, ids: Iterable[str]) -> dict[str, str]:
        """Names of the tenants with these ids, by id; ids that no tenant has are absent."""
        wanted = sorted(set(ids))
        names: dict[str, str] = {}
        for start in range(0, len(wanted), CHUNK):
            some = TenantRow.id.in_(wanted[start : start + CHUNK])
            names.update(await self.database.rows(select(TenantRow.id, TenantRow.name).where(some)))
        return names

    async def tenant_limits(self, tenant_id: str) -> Limits:
        """The tenant's limits, from the cache; none for a tenant that was deleted."""

        async def read() -> Limits:
            found = await self.database.rows(
                select(TenantRow.limits).where(TenantRow.id == tenant_id)
            )
            return Limits(**found[0].limits if found else {})

        return await self.known_limits.ask(tenant_id, read)

    async def stored(self, tenant_id: str) -> dict[str, int]:
        """Amounts that count against the tenant's limits `adapters` and `stored_bytes`."""
        async with self.database.read() as session:
            return {
                "adapters": await count_adapters(session, tenant_id),
                "stored_bytes": await stored_bytes(session, tenant_id, self.clock()),
            }

    async def update_tenant(
        self, name: str, limits: Mapping[str, object] | None = None, weight: float | None = None
    ) -> TenantRow:
        """Replace a tenant's limits, its weight, or both; None leaves the old value.

        Raises:
            NotFoundError: No tenant has this name.
            InvalidRequestError: There is no such limit, or its value is out of range.
        """
        async with self._change(self.identities, self.known_limits) as session:
            row = await tenant_row(session, name)
            row.limits = row.limits if limits is None else checked_limits(limits, TENANT_LIMITS)
            row.weight = row.weight if weight is None else weight
            given = {"limits": None if limits is None else row.limits, "weight": weight}
            audit.add(
                session, self.clock(), ADMIN, "tenant.update", tenant=name, target=name, **given
            )
            return row

    async def delete_tenant(self, name: str) -> Removed:
        """Delete a tenant with its keys, adapters and grants. Its keys stop working at once; its usage stays.

        Returns:
            Content that nothing refers to any more.

        Raises:
            NotFoundError: No tenant has this name.
        """
        async with self._change(self.identities, self.known_limits, self.resolved) as session:
            row = await tenant_row(session, name)
            own = VersionRow.adapter_id.in_(
                select(AdapterRow.id).where(AdapterRow.tenant_id == row.id)
            )
            audit.add(session, self.clock(), ADMIN, "tenant.delete", tenant=name, target=name)
            return await remove(session, own, delete(TenantRow).where(TenantRow.id == row.id))


async def tenant_row(session: AsyncSession, name: str) -> TenantRow:
    """The row of the tenant of this name.

    Raises:
        NotFoundError: No tenant has this name.
    """
    row = (
        await session.scalar(select(TenantRow).where(TenantRow.name == name))
        if is_name(name)
        else None
    )
    if row is None:
        raise no_such("tenant", name)
    return row
