"""Sums of usage, made in the transaction that inserts the events: by hour, by time to the first token, by adapter.

An event adds to one row of each table: the row with its key. Names of tenants and adapters stay as they came first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from sqlalchemy import BigInteger, ColumnElement, Table, case, func, literal, or_, select, union_all
from sqlalchemy import cast as sql_cast
from sqlalchemy.ext.asyncio import AsyncSession

from weft.registry.clock import HOUR_US, from_micros
from weft.registry.database import insert_into
from weft.registry.latency_bins import bin_in_sql, bin_of
from weft.registry.models import UsageAdapterRow, UsageEventRow, UsageLatencyRow, UsageRollupRow
from weft.registry.records import AdapterUsage

SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_KEPT: tuple[tuple[Table, tuple[str, str]], ...] = (
    (cast(Table, UsageRollupRow.__table__), ("id", "")),  # every event has an id, so all count
    (cast(Table, UsageLatencyRow.__table__), ("service_class", "batch")),
    (cast(Table, UsageAdapterRow.__table__), ("adapter_id", "")),
)
"""Tables of sums, each with a column and a value of it: events with this value do not count there."""
_events = UsageEventRow.__table__.c
_adapters = UsageAdapterRow.__table__.c


async def add_to_sums(session: AsyncSession, rows: Iterable[dict[str, Any]]) -> None:
    """Add events, as rows of their table, that were inserted in this transaction."""
    facts = [
        {
            **row,
            "at": row["at"] // HOUR_US * HOUR_US,
            "last_at": row["at"],
            "requests": 1,
            "bin": bin_of(row["ttft_s"]),
        }
        for row in rows
    ]
    for table, (column, left_out) in _KEPT:
        if added := _sums_of(table, (fact for fact in facts if fact[column] != left_out)):
            upsert = insert_into(session, table)
            changes: dict[str, ColumnElement[Any]] = {
                name: table.c[name] + upsert.excluded[name] for name in SUMS if name in table.c
            }
            if "last_at" in table.c:
                later = upsert.excluded.last_at > table.c.last_at
                changes["last_at"] = case((later, upsert.excluded.last_at), else_=table.c.last_at)
            upsert = upsert.on_conflict_do_update(index_elements=list(table.primary_key), set_=changes)
            await session.execute(upsert, added)


async def count_differences(session: AsyncSession) -> int:
    """How many rows of sums differ from the sum of their events; 0 unless there is a bug."""
    facts: dict[str, ColumnElement[Any]] = {
        **_events,
        "at": _events.at // HOUR_US * HOUR_US,
        "requests": literal(1),
        "bin": bin_in_sql(_events.ttft_s),
    }
    num_wrong = 0
    for table, (column, left_out) in _KEPT:
        keys = [column.name for column in table.primary_key]
        sums = [name for name in SUMS if name in table.c]
        counted = select(*(facts[name].label(name) for name in (*keys, *sums))).where(_events[column] != left_out)
        negated = select(*(table.c[name] for name in keys), *((-table.c[name]).label(name) for name in sums))
        both = union_all(counted, negated).subquery()
        differs = or_(*(func.sum(both.c[name]) != 0 for name in sums))
        rows = select(literal(1)).select_from(both).group_by(*(both.c[name] for name in keys))
        wrong = rows.having(differs).subquery()
        num_wrong += await session.scalar(select(func.count()).select_from(wrong)) or 0
    return num_wrong


async def summary(session: AsyncSession, adapter_ids: Iterable[str]) -> dict[str, AdapterUsage]:
    """All that was ever asked of these adapters, by whomever; ids without usage are missing."""
    sums = [sql_cast(func.sum(_adapters[name]), BigInteger).label(name) for name in SUMS]
    statement = select(_adapters.adapter_id, func.max(_adapters.last_at).label("last_at"), *sums)
    statement = statement.where(_adapters.adapter_id.in_(set(adapter_ids))).group_by(_adapters.adapter_id)
    found = (await session.execute(statement)).mappings()
    return {
        row["adapter_id"]: AdapterUsage(last_used_at=from_micros(row["last_at"]), **{name: row[name] for name in SUMS})
        for row in found
    }


def _sums_of(table: Table, facts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table, one for each key."""
    keys = [column.name for column in table.primary_key]
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for fact in facts:
        key = tuple(fact[name] for name in keys)
        row = rows.get(key)
        if row is None:
            rows[key] = {column.name: fact[column.name] for column in table.c}
            continue
        for name in SUMS:
            if name in row:
                row[name] += fact[name]
        if "last_at" in row:
            row["last_at"] = max(row["last_at"], fact["last_at"])
    return list(rows.values())
