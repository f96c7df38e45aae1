"""Grants: which other tenants may call an adapter, or one version of it."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.errors import InvalidRequestError, NotFoundError
from manylora.registry import audit
from manylora.registry.adapters import own_row
from manylora.registry.audit import ADMIN
from manylora.registry.cache import Forgets, Transactions
from manylora.registry.db.models import AdapterRow, GrantRow, TenantRow, VersionRow
from manylora.registry.names import EVERY_VERSION, MAX_VERSION, check_integer, check_text, no_such

MAX_GRANTS = 1000


@dataclass(eq=False)
class Grants(Transactions):
    """The part of the registry that keeps grants."""

    resolved: Forgets

    async def list_grants(self, tenant_id: str, name: str) -> tuple[GrantRow, ...]:
        """Grants of one of a tenant's adapters, by grantee and version.

        Raises:
            NotFoundError: The tenant has no adapter of this name.
        """
        async with self.database.read() as session:
            return await _grants_of(session, await own_row(session, tenant_id, name))

    async def grant_adapter(
        self,
        tenant_id: str,
        name: str,
        grantee: str,
        version: int | None = None,
        *,
        actor: str = ADMIN,
    ) -> tuple[GrantRow, bool]:
        """Let the tenant with the id `grantee` call an adapter as `tenant/name`, or only one version of it.

        Returns:
            The grant, and whether it is new.

        Raises:
            NotFoundError: There is no such adapter, version or grantee.
            InvalidRequestError: The grantee is the owner, or there are too many grants.
        """
        async with self._change(self.resolved) as session:
            adapter = await own_row(session, tenant_id, name)
            other = await _grantee(session, grantee)
            if other.id == adapter.tenant_id:
                raise InvalidRequestError("The owner needs no grant.", param="tenant")
            if version is not None:
                check_integer(version, "version", low=1, high=MAX_VERSION)
                if await session.get(VersionRow, (adapter.id, version)) is None:
                    raise no_such("version", f"{name}@{version}", param="version")
            key = {
                "adapter_id": adapter.id,
                "tenant_id": other.id,
                "version": version or EVERY_VERSION,
            }
            row = await session.get(GrantRow, key)
            is_new = row is None
            if row is None:
                if len(await _grants_of(session, adapter)) >= MAX_GRANTS:
                    raise InvalidRequestError(
                        f"An adapter takes at most {MAX_GRANTS} grants.", param="tenant"
                    )
                row = GrantRow(**key, tenant=other.name, created_at=self.clock())
                session.add(row)
                await session.flush()
            audit.add(
                session,
                self.clock(),
                actor,
                "adapter.grant",
                tenant=adapter.tenant,
                target=name,
                grantee=other.name,
                version=version,
            )
            return row, is_new

    async def withdraw_grant(
        self,
        tenant_id: str,
        name: str,
        grantee: str,
        version: int | None = None,
        *,
        actor: str = ADMIN,
    ) -> None:
        """Delete a grant.

        Raises:
            NotFoundError: There is no such adapter or grant.
        """
        async with self._change(self.resolved) as session:
            adapter = await own_row(session, tenant_id, name)
            other = await _grantee(session, grantee)
            row = await session.get(GrantRow, (adapter.id, other.id, version or EVERY_VERSION))
            if row is None:
                granted = name if version is None else f"{name}@{version}"
                raise NotFoundError(f"`{granted}` is not granted to `{other.name}`.")
            await session.delete(row)
            audit.add(
                session,
                self.clock(),
                actor,
                "adapter.withdraw",
                tenant=adapter.tenant,
                target=name,
                grantee=grantee,
                version=version,
            )


async def _grants_of(session: AsyncSession, adapter: AdapterRow) -> tuple[GrantRow, ...]:
    of_adapter = select(GrantRow).where(GrantRow.adapter_id == adapter.id)
    return tuple(await session.scalars(of_adapter.order_by(GrantRow.tenant, GrantRow.version)))


async def _grantee(session: AsyncSession, tenant_id: str) -> TenantRow:
    found = await session.get(TenantRow, check_text(tenant_id, "tenant", 512))
    if found is None:
        raise no_such("tenant", tenant_id, param="tenant")
    return found
