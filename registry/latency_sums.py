"""Hourly counts of usage events by time to the first token and by where their adapter was; made with the events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import func, literal, select, union_all
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from weft.registry.clock import HOUR_US
from weft.registry.latency_bins import bin_in_sql, bin_of
from weft.registry.models import UsageEventRow, UsageLatencyRow

_KEYS = ("at", "tenant_id", "adapter_id", "adapter_version", "key_id", "adapter_state", "bin")
_events = UsageEventRow.__table__.c
_counts = UsageLatencyRow.__table__.c


async def add_latencies(
    session: AsyncSession,
    insert: Callable[[type[UsageLatencyRow]], postgresql.Insert | sqlite.Insert],
    rows: Iterable[dict[str, Any]],
) -> None:
    """Count events, as rows of their table, that were inserted in this transaction; `insert` is the database's own."""
    hours: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row["service_class"] == "batch":
            continue
        keys = {name: row[name] for name in _KEYS[1:-1]}
        keys |= {"at": row["at"] // HOUR_US * HOUR_US, "bin": bin_of(row["ttft_s"])}
        names = {"tenant": row["tenant"], "adapter": row["adapter"], "requests": 0}
        hours.setdefault(tuple(keys[name] for name in _KEYS), {**keys, **names})["requests"] += 1
    if hours:
        upsert = insert(UsageLatencyRow)
        added = {"requests": _counts.requests + upsert.excluded.requests}
        await session.execute(upsert.on_conflict_do_update(index_elements=_KEYS, set_=added), list(hours.values()))


async def count_wrong_latencies(session: AsyncSession) -> int:
    """How many counts differ from their events; 0 unless there is a bug."""
    hour = (_events.at // HOUR_US * HOUR_US).label("at")
    keys = (_events[name] for name in _KEYS[1:-1])
    counted = select(hour, *keys, bin_in_sql(_events.ttft_s).label("bin"), literal(1).label("requests"))
    counted = counted.where(_events.service_class != "batch")
    negated = select(*(_counts[name] for name in _KEYS), (-_counts.requests).label("requests"))
    both = union_all(counted, negated).subquery()
    wrong = select(both.c.at).group_by(*(both.c[name] for name in _KEYS)).having(func.sum(both.c.requests) != 0)
    return await session.scalar(select(func.count()).select_from(wrong.subquery())) or 0
