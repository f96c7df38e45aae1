"""The audit log: who changed what, written in the transaction that makes the change."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from weft.registry.db.database import Database
from weft.registry.db.models import AuditRow, to_record
from weft.registry.names import check_integer, check_text, storable
from weft.registry.records import AuditEntry

ADMIN = "admin"
"""The actor where the admin key was used: it has no id."""
MAX_PAGE = 1000


def add(
    session: AsyncSession, now: datetime, actor: str, action: str, *, tenant: str, target: str, **detail: object
) -> None:
    """Write an entry. `detail` takes JSON values; None is left out."""
    session.add(
        AuditRow(
            at=now,
            actor=storable(actor, 64),
            action=action,
            tenant=tenant,
            target=target,
            detail={name: value for name, value in detail.items() if value is not None},
        )
    )


async def last_entry(database: Database) -> int:
    """Id of the newest entry; 0 while there is none."""
    ((newest,),) = await database.rows(select(func.max(AuditRow.id)))
    return newest or 0


async def list_entries(
    session: AsyncSession, before: int | None, limit: int, tenant: str | None
) -> tuple[AuditEntry, ...]:
    """Entries, newest first; those older than the entry `before`, of all tenants or of one."""
    check_integer(limit, "limit", low=1, high=MAX_PAGE)
    statement = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
    if before is not None:
        statement = statement.where(AuditRow.id < check_integer(before, "before"))
    if tenant is not None:
        statement = statement.where(AuditRow.tenant == check_text(tenant, "tenant", 512))
    return tuple(to_record(AuditEntry, row) for row in await session.scalars(statement))
