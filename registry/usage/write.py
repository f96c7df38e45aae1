"""Usage in SQL: events, and the sums that are kept of them.

An event counts once by its id: inserting it again changes nothing, unless it overrules the first one. Sums change in
the transaction that inserts the event. An event adds to one row of each table of sums: by hour, by month, by time to
the first token, by adapter. The names of tenants and adapters stay as the first event had them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import ColumnElement, String, Table, case, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.errors import InvalidRequestError
from manylora.registry.db.clock import HOUR_US, from_micros, month_after, month_of, to_micros
from manylora.registry.db.database import insert_into
from manylora.registry.db.models import (
    UsageAdapterRow,
    UsageEventRow,
    UsageLatencyRow,
    UsageMonthRow,
    UsageRollupRow,
)
from manylora.registry.names import MAX_VERSION, check_integer, check_text, storable
from manylora.registry.records import RETRIED, AdapterUsage, UsageEvent
from manylora.registry.usage.latency import bin_of
from manylora.registry.usage.query import SUMS, sum_of, sums_of

MAX_TOKENS = 1 << 40
"""Most tokens in one event: the sum of 2^23 such events is below 2^63."""
_KEPT: tuple[tuple[Table, tuple[str, str]], ...] = (
    (cast(Table, UsageRollupRow.__table__), ("id", "")),  # every event has an id, so all count
    (cast(Table, UsageLatencyRow.__table__), ("service_class", "batch")),
    (cast(Table, UsageAdapterRow.__table__), ("adapter_id", "")),
    (cast(Table, UsageMonthRow.__table__), ("id", "")),
)
"""Tables of sums, each with a column and a value: events with this value in the column do not count there."""
_events = UsageEventRow.__table__.c
_TEXTS = {
    column.name: column.type.length or 0
    for column in _events
    if isinstance(column.type, String) and column.name != "request_id"
}
"""Texts, with the most characters that the column takes. `request_id` is cut instead of refused."""
_adapters = UsageAdapterRow.__table__
_months = UsageMonthRow.__table__.c


def checked_event(event: UsageEvent) -> UsageEvent:
    """The event as it can be stored: time in UTC, `request_id` without characters that databases refuse.

    Raises:
        InvalidRequestError: A text, a count or a time cannot be stored.
    """
    for name, max_length in _TEXTS.items():
        text = getattr(event, name)
        if text is not None:
            check_text(text, name, max_length)
    if not event.id:
        raise InvalidRequestError("id must not be empty.", param="id")
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        check_integer(getattr(event, name), name, high=MAX_TOKENS)
    if event.adapter_version is not None:
        check_integer(event.adapter_version, "adapter_version", low=1, high=MAX_VERSION)
    for name in ("queue_s", "ttft_s", "duration_s"):
        seconds = getattr(event, name)
        if seconds is not None and not math.isfinite(seconds):
            raise InvalidRequestError(f"{name} must be finite.", param=name)
    if event.at.tzinfo is None or event.at.year < 1971:
        raise InvalidRequestError("at must be a time after 1970 with a timezone.", param="at")
    return replace(event, at=event.at.astimezone(UTC), request_id=storable(event.request_id, 256))


async def insert_events(session: AsyncSession, events: Sequence[UsageEvent]) -> None:
    """Insert the events that are new, or overrule those that are there, and add them to the sums."""
    rows: dict[str, dict[str, Any]] = {}
    for event in sorted(events, key=lambda event: not event.overrules):
        rows.setdefault(event.id, _row(event))
    if not rows:
        return
    statement = (
        insert_into(session, UsageEventRow).on_conflict_do_nothing().returning(UsageEventRow.id)
    )
    inserted = set(await session.scalars(statement, list(rows.values())))
    overruled = {event.id for event in events if event.overrules} - inserted
    if overruled:  # deleted only now: another transaction's insert was waited for
        deleted = delete(UsageEventRow).where(_events.id.in_(overruled)).returning(*_events)
        found = [dict(row) for row in (await session.execute(deleted)).mappings()]
        await _add_to_sums(session, found, -1)
        inserted |= set(
            await session.scalars(statement, [rows[event_id] for event_id in overruled])
        )
    await _add_to_sums(session, (rows[event_id] for event_id in inserted))


async def month_tokens(
    session: AsyncSession, ids: Collection[str], month: datetime
) -> dict[str, int]:
    """Prompt and completion tokens of a calendar month, by the ids of tenants and keys that have any."""
    tokens = sum_of(_months.prompt_tokens + _months.completion_tokens)
    found: dict[str, int] = {}
    for holder in (_months.tenant_id, _months.key_id) if ids else ():
        sums = select(holder, tokens).where(_months.month == to_micros(month), holder.in_(ids))
        found |= dict((await session.execute(sums.group_by(holder))).all())
    return found


async def month_tokens_without(
    session: AsyncSession, holder_id: str, month: datetime, events: Collection[str]
) -> int:
    """Tokens of a tenant or a key in a month, without those of some events.

    The ids of the events are read after the sum: ids that are added meanwhile count, too.
    """
    tokens = (await month_tokens(session, [holder_id], month)).get(holder_id, 0)
    if not events:
        return tokens
    left_out = select(sum_of(_events.prompt_tokens + _events.completion_tokens)).where(
        _events.id.in_(list(events)),
        or_(_events.tenant_id == holder_id, _events.key_id == holder_id),
        _events.at >= to_micros(month),
        _events.at < to_micros(month_after(month)),
    )
    return tokens - (await session.scalar(left_out) or 0)


def _row(event: UsageEvent) -> dict[str, Any]:
    row = {name: getattr(event, name) for name in _events.keys()}  # noqa: SIM118 - a collection of columns
    for name in _TEXTS:
        row[name] = row[name] or ""
    row["adapter_version"] = row["adapter_version"] or 0
    row["at"] = to_micros(event.at)
    return row


async def _add_to_sums(
    session: AsyncSession, rows: Iterable[dict[str, Any]], sign: int = 1
) -> None:
    """Add events (rows of their table) that were inserted in this transaction to the sums; -1 takes them off."""
    facts = [
        {
            **row,
            **{name: sign * row[name] for name in SUMS[1:]},
            "at": row["at"] // HOUR_US * HOUR_US,
            "month": to_micros(month_of(from_micros(row["at"]))),
            "last_at": row["at"],
            "requests": 0 if row["status"] == RETRIED else sign,
            "bin": bin_of(row["ttft_s"]),
        }
        for row in rows
    ]
    for table, (column, left_out) in _KEPT:
        sums = [name for name in SUMS if name in table.c]
        added: dict[tuple[Any, ...], dict[str, Any]] = {}
        for fact in facts:
            if fact[column] == left_out:
                continue
            key = tuple(fact[each.name] for each in table.primary_key)
            row = added.get(key)
            if row is None:
                added[key] = {each.name: fact[each.name] for each in table.c}
                continue
            for name in sums:
                row[name] += fact[name]
            if "last_at" in row:
                row["last_at"] = max(row["last_at"], fact["last_at"])
        if added:
            upsert = insert_into(session, table)
            changes: dict[str, ColumnElement[Any]] = {
                name: table.c[name] + upsert.excluded[name] for name in sums
            }
            if "last_at" in table.c:
                later = upsert.excluded.last_at > table.c.last_at
                changes["last_at"] = case((later, upsert.excluded.last_at), else_=table.c.last_at)
            upsert = upsert.on_conflict_do_update(
                index_elements=list(table.primary_key), set_=changes
            )
            await session.execute(upsert, list(added.values()))


async def summary(session: AsyncSession, adapter_ids: Iterable[str]) -> dict[str, AdapterUsage]:
    """All usage of these adapters by all tenants; ids without usage are absent."""
    sums = sums_of(_adapters, SUMS)
    of_adapter = _adapters.c.adapter_id
    statement = select(of_adapter, func.max(_adapters.c.last_at).label("last_at"), *sums)
    statement = statement.where(of_adapter.in_(set(adapter_ids))).group_by(of_adapter)
    found = (await session.execute(statement)).mappings()
    return {
        row["adapter_id"]: AdapterUsage(
            last_used_at=from_micros(row["last_at"]), **{name: row[name] for name in SUMS}
        )
        for row in found
    }
