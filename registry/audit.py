"""The audit log: who changed what, written in the transaction that makes the change."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.registry.db.database import Database
from manylora.registry.db.models import AuditRow
from manylora.registry.names import storable

ADMIN = "admin"
"""The actor where the admin key was used: it has no id."""


def add(
    session: AsyncSession,
    now: datetime,
    actor: str,
    action: str,
    *,
    tenant: str,
    target: str,
    **detail: object,
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
