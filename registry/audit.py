"""The audit log: who changed what, written in the transaction that makes the change."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from weft.registry.db.clock import from_micros, to_micros
from weft.registry.db.database import Database
from weft.registry.db.models import AuditRow
from weft.registry.names import check_integer, check_text, storable
from weft.registry.records import AuditEntry

ADMIN = "admin"
"""The actor behind the admin key, which has no id."""
MAX_PAGE = 1000


def add(
    session: AsyncSession, now: datetime, actor: str, action: str, *, tenant: str, target: str, **detail: object
) -> None:
    """Note a change. `detail` takes JSON values; None is left out."""
    session.add(
        AuditRow(
            at=to_micros(now),
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
    """Entries, newest first; those older than the entry `before`, and of one tenant's objects."""
    check_integer(limit, "limit", low=1, high=MAX_PAGE)
    statement = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
    if before is not None:
        statement = statement.where(AuditRow.id < check_integer(before, "before"))
    if tenant is not None:
        statement = statement.where(AuditRow.tenant == check_text(tenant, "tenant", 512))
    return tuple(
        AuditEntry(
            id=row.id,
            at=from_micros(row.at),
            actor=row.actor,
            action=row.action,
            tenant=row.tenant,
            target=row.target,
            detail=row.detail,
        )
        for row in await session.scalars(statement)
    )
