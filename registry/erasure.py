"""Takes all usage of some keys out of the ledger: their events, and with them every sum in which these count.

Exact, because each row of a sum belongs to one key: none has to be told apart into what stays and what goes.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import InvalidRequestError
from weft.registry import audit
from weft.registry.models import UsageAdapterRow, UsageEventRow, UsageLatencyRow, UsageRollupRow
from weft.registry.names import check_text

_TABLES = (UsageEventRow, UsageLatencyRow, UsageRollupRow, UsageAdapterRow)


async def erase_keys(session: AsyncSession, key_ids: Collection[str], now: datetime) -> int:
    """Delete what was ever used with these keys, and note how much it was for each in the audit log.

    Returns:
        How many events went.

    Raises:
        InvalidRequestError: An id is empty, which would mean the admin's own requests, or is none that can be stored.
    """
    wanted = sorted({check_text(key_id, "key_ids", 64) for key_id in key_ids})
    if "" in wanted:
        raise InvalidRequestError("key_ids must not hold an empty id.", param="key_ids")
    counted = (
        select(UsageEventRow.key_id, func.min(UsageEventRow.tenant), func.count())
        .where(UsageEventRow.key_id.in_(wanted))
        .group_by(UsageEventRow.key_id)
        .order_by(UsageEventRow.key_id)
    )
    found = (await session.execute(counted)).all()
    for key_id, tenant, events in found:
        audit.add(session, now, audit.ADMIN, "usage.erase", tenant=tenant, target=key_id, events=events)
    for table in _TABLES:
        await session.execute(delete(table).where(table.key_id.in_(wanted)))
    return sum(events for _, _, events in found)
