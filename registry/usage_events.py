"""Usage events one by one, in the order in which they ended: what every sum is made of."""

from __future__ import annotations

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import InvalidRequestError
from weft.registry.clock import from_micros, to_micros
from weft.registry.models import UsageEventRow
from weft.registry.names import check_text
from weft.registry.records import Page, UsageEvent, UsageQuery
from weft.registry.usage import check_query, matching

_columns = UsageEventRow.__table__.c
_OPTIONAL = ("tenant_id", "tenant", "key_id", "adapter_id", "adapter", "adapter_version", "adapter_digest")


async def list_events(session: AsyncSession, query: UsageQuery) -> Page[UsageEvent]:
    """The events of a range that match, oldest first; bucket and grouping do not count.

    Raises:
        InvalidRequestError: Range, limit or cursor make no sense.
    """
    check_query(query)
    table = UsageEventRow.__table__
    found = matching(query, select(*table.c), table, to_micros(query.start), to_micros(query.end))
    if query.after is not None:
        at, dash, last = check_text(query.after, "after", 128).partition("-")
        if not (dash and at.isascii() and at.isdigit() and len(at) < 18):
            raise InvalidRequestError("The cursor is not one that this query gave out.", param="after")
        found = found.where(tuple_(_columns.at, _columns.id) > tuple_(int(at), last))
    rows = (await session.execute(found.order_by(_columns.at, _columns.id).limit(query.limit + 1))).mappings().all()
    events = []
    for row in rows[: query.limit]:
        none = {name: row[name] or None for name in (*_OPTIONAL, "adapter_state")}
        events.append(UsageEvent(**{**row, **none, "at": from_micros(row["at"])}))
    last_row = rows[query.limit - 1] if len(rows) > query.limit else None
    return Page(items=tuple(events), next=f"{last_row['at']}-{last_row['id']}" if last_row else None)
