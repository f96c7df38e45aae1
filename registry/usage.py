"""Usage in SQL: events, hourly sums of them, and questions about both.

An event's id is its identity: inserting it again changes nothing, and the sums move only for events that were really
inserted, in the same transaction. Whole hours are answered from the sums and the ragged ends of a range from the
events, so any range is exact.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    FromClause,
    Label,
    RowMapping,
    Select,
    Subquery,
    case,
    cast,
    func,
    literal,
    or_,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import InvalidRequestError
from weft.registry.clock import DAY_US, HOUR_US, MINUTE_US, from_micros, to_micros
from weft.registry.latency_sums import add_latencies, count_wrong_latencies
from weft.registry.models import UsageEventRow, UsageRollupRow
from weft.registry.names import MAX_INTEGER, check_integer, check_text, storable
from weft.registry.prices import PART, PriceTable, cost_sums
from weft.registry.records import AdapterUsage, UsageEvent, UsageQuery, UsageReport, UsageRow, UsageTotals

MAX_TOKENS = 1 << 40
"""Most tokens in one event; 2^23 such events still sum to less than 2^63."""
MAX_ROWS = 10_000
MAX_WANTED = 100
"""Most values that one filter takes."""

_BUCKETS = {None: 0, "1m": MINUTE_US, "1h": HOUR_US, "1d": DAY_US}
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_COSTS = ("cost_parts", "cost_units")
_KEYS = ("at", "tenant_id", "adapter_id", "adapter_version", "key_id", "status")
_NAMES = ("tenant", "adapter")
_GROUP_COLUMNS = {
    "tenant": ("tenant_id",),
    "adapter": ("adapter_id",),
    "version": ("adapter_id", "adapter_version"),
    "key": ("key_id",),
    "status": ("status",),
}
_TEXTS = (
    ("id", 64),
    ("tenant_id", 64),
    ("tenant", 63),
    ("key_id", 64),
    ("adapter_id", 64),
    ("adapter", 127),
    ("adapter_digest", 71),
    ("endpoint", 64),
    ("status", 64),
    ("adapter_state", 16),
)

_events = UsageEventRow.__table__.c
_rollups = UsageRollupRow.__table__.c


def checked_event(event: UsageEvent) -> UsageEvent:
    """The event in a form that can be stored: its time in UTC, the client's own id without what databases refuse.

    Raises:
        InvalidRequestError: A text, a count or a time cannot be stored.
    """
    for name, max_length in _TEXTS:
        text = getattr(event, name)
        if text is not None:
            check_text(text, name, max_length)
    if not event.id:
        raise InvalidRequestError("id must not be empty.", param="id")
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        check_integer(getattr(event, name), name, high=MAX_TOKENS)
    if event.adapter_version is not None:
        check_integer(event.adapter_version, "adapter_version", low=1, high=(1 << 31) - 1)
    for name in ("queue_s", "ttft_s", "duration_s"):
        seconds = getattr(event, name)
        if seconds is not None and not math.isfinite(seconds):
            raise InvalidRequestError(f"{name} must be finite.", param=name)
    if event.at.tzinfo is None or event.at.year < 1971:
        raise InvalidRequestError("at must be a time after 1970 with a timezone.", param="at")
    return replace(event, at=event.at.astimezone(UTC), request_id=storable(event.request_id, 256))


async def insert_events(session: AsyncSession, events: Sequence[UsageEvent]) -> int:
    """Insert the events that are not there yet, and add them to their hours.

    Returns:
        How many were inserted.
    """
    rows: dict[str, dict[str, Any]] = {}
    for event in events:
        rows.setdefault(event.id, _row(event))
    if not rows:
        return 0
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    statement = insert(UsageEventRow).on_conflict_do_nothing().returning(UsageEventRow.id)
    inserted = list(await session.scalars(statement, list(rows.values())))
    sums = _sum_by_hour(rows[event_id] for event_id in inserted)
    if sums:
        upsert = insert(UsageRollupRow)
        changes: dict[str, ColumnElement[Any]] = {name: _rollups[name] + upsert.excluded[name] for name in _SUMS}
        later = upsert.excluded.last_at > _rollups.last_at
        changes["last_at"] = case((later, upsert.excluded.last_at), else_=_rollups.last_at)
        await session.execute(upsert.on_conflict_do_update(index_elements=_KEYS, set_=changes), sums)
    await add_latencies(session, insert, (rows[event_id] for event_id in inserted))
    return len(inserted)


async def query(session: AsyncSession, query: UsageQuery, prices: PriceTable | None = None) -> UsageReport:
    """Answer a question about usage; rows are ordered by bucket, then by the ids they are grouped by.

    With prices, rows and totals have their cost.

    Raises:
        InvalidRequestError: Range, grouping, limit or cursor make no sense.
    """
    check_query(query)
    facts = _facts(query)
    costs = zip(cost_sums(prices, facts), _COSTS, strict=True)
    sums = [*(_sum(facts.c[name]) for name in _SUMS), *(cost.label(name) for cost, name in costs)]
    grouped, order = _grouped(query, facts, sums)
    page = select(grouped).where(grouped.c.requests > 0).order_by(*order).limit(query.limit + 1)
    if query.after is not None:
        page = page.where(tuple_(*order) > tuple_(*_read_cursor(query.after, order)))
    found = (await session.execute(page)).mappings().all()
    totals = (await session.execute(select(*sums))).mappings().one()
    more = len(found) > query.limit
    return UsageReport(
        rows=tuple(_usage_row(query, row) for row in found[: query.limit]),
        totals=UsageTotals(**_figures(totals)),
        next=_write_cursor([found[query.limit - 1][column.name] for column in order]) if more else None,
    )


async def summary(session: AsyncSession, adapter_ids: Iterable[str]) -> dict[str, AdapterUsage]:
    """All that was ever asked of these adapters, by whomever; ids without usage are missing."""
    sums = [_sum(_rollups[name]) for name in _SUMS]
    statement = select(_rollups.adapter_id, func.max(_rollups.last_at).label("last_at"), *sums)
    statement = statement.where(_rollups.adapter_id.in_(set(adapter_ids) - {""})).group_by(_rollups.adapter_id)
    found = (await session.execute(statement)).mappings()
    return {
        row["adapter_id"]: AdapterUsage(last_used_at=from_micros(row["last_at"]), **{name: row[name] for name in _SUMS})
        for row in found
    }


async def count_tokens(
    session: AsyncSession, holder: Mapping[str, str], start: int, end: int, but: Collection[str]
) -> int:
    """Prompt and completion tokens of whole hours, in microseconds, without those of the events `but`.

    Args:
        session: A transaction on one snapshot.
        holder: Whose: column to value, of `tenant_id` or `key_id`.
        start: First microsecond of the first hour.
        end: First microsecond of the first hour that no longer counts.
        but: Read after the sums were, so that an event that comes meanwhile may still be added.
    """

    async def total(table: FromClause, *conditions: ColumnElement[bool]) -> int:
        of_holder = (table.c[name] == value for name, value in holder.items())
        tokens = func.coalesce(func.sum(table.c.prompt_tokens + table.c.completion_tokens), 0)
        in_range = (table.c.at >= start, table.c.at < end)
        return int(await session.scalar(select(tokens).where(*in_range, *of_holder, *conditions)) or 0)

    tokens = await total(UsageRollupRow.__table__)
    return tokens - (await total(UsageEventRow.__table__, _events.id.in_(list(but))) if but else 0)


async def count_differences(session: AsyncSession) -> int:
    """How many hourly sums differ from the sum of their events; 0 unless there is a bug."""
    hour = (_events.at // HOUR_US * HOUR_US).label("at")
    counted = select(hour, *(_events[name] for name in _KEYS[1:]), *_event_sums())
    negated = select(*(_rollups[name] for name in _KEYS), *((-_rollups[name]).label(name) for name in _SUMS))
    both = union_all(counted, negated).subquery()
    differs = or_(*(func.sum(both.c[name]) != 0 for name in _SUMS))
    wrong = select(both.c.at).group_by(*(both.c[name] for name in _KEYS)).having(differs).subquery()
    num_wrong = await session.scalar(select(func.count()).select_from(wrong)) or 0
    return num_wrong + await count_wrong_latencies(session)


def _sum(column: ColumnElement[int]) -> Label[int]:
    """0 for no rows; an integer in PostgreSQL too, which sums 64-bit integers to decimal numbers."""
    return cast(func.coalesce(func.sum(column), 0), BigInteger).label(column.name)


def _row(event: UsageEvent) -> dict[str, Any]:
    row = {name: getattr(event, name) for name in _events.keys()}  # noqa: SIM118 - a collection of columns
    for name, _ in _TEXTS:
        row[name] = row[name] or ""
    row["adapter_version"] = row["adapter_version"] or 0
    row["at"] = to_micros(event.at)
    return row


def _sum_by_hour(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    hours: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        keys = {**{name: row[name] for name in _KEYS}, "at": row["at"] // HOUR_US * HOUR_US}
        names = {name: row[name] for name in _NAMES}
        hour = hours.setdefault(tuple(keys.values()), {**keys, **names, **dict.fromkeys(_SUMS, 0), "last_at": 0})
        hour["requests"] += 1
        for name in _SUMS[1:]:
            hour[name] += row[name]
        hour["last_at"] = max(hour["last_at"], row["at"])
    return list(hours.values())


def check_query(query: UsageQuery) -> None:
    """Refuse what makes no sense.

    Raises:
        InvalidRequestError: Bucket, grouping, range, limit or a filter cannot be answered.
    """
    if query.bucket not in _BUCKETS:
        raise InvalidRequestError("bucket must be 1m, 1h or 1d.", param="bucket")
    if not set(query.group_by) <= set(_GROUP_COLUMNS):
        raise InvalidRequestError(f"group_by takes {', '.join(_GROUP_COLUMNS)}.", param="group_by")
    for name, moment in (("start", query.start), ("end", query.end)):
        if moment.tzinfo is None:
            raise InvalidRequestError(f"{name} must have a timezone.", param=name)
    if query.start >= query.end:
        raise InvalidRequestError("end must be after start.", param="end")
    check_integer(query.limit, "limit", low=1, high=MAX_ROWS)
    _check_filters(query)


def _check_filters(query: UsageQuery) -> None:
    owner = () if query.tenant_id is None else (query.tenant_id,)
    texts = {"tenant": owner, "adapter": query.adapters, "key": query.key_ids, "status": query.statuses}
    for name, wanted in texts.items():
        for text in wanted:
            check_text(text, name, 127)
    for version in query.versions:
        check_integer(version, "version", high=(1 << 31) - 1)
    if max(len(wanted) for wanted in _filters(query).values()) > MAX_WANTED:
        raise InvalidRequestError(f"A filter takes at most {MAX_WANTED} values.")


def _facts(query: UsageQuery) -> Subquery:
    """Everything in the range as rows of one shape: hourly sums where whole hours serve, events elsewhere."""
    start, end = to_micros(query.start), to_micros(query.end)
    first_hour, last_hour = -(-start // HOUR_US) * HOUR_US, end // HOUR_US * HOUR_US
    if query.bucket == "1m" or first_hour >= last_hour:
        return _event_facts(query, start, end).subquery()
    hours = select(*(_rollups[name] for name in (*_KEYS, *_NAMES, *_SUMS)))
    return union_all(
        matching(query, hours, UsageRollupRow.__table__, first_hour, last_hour),
        _event_facts(query, start, first_hour),
        _event_facts(query, last_hour, end),
    ).subquery()


def _event_facts(query: UsageQuery, start: int, end: int) -> Select[Any]:
    facts = select(*(_events[name] for name in (*_KEYS, *_NAMES)), *_event_sums())
    return matching(query, facts, UsageEventRow.__table__, start, end)


def _event_sums() -> list[ColumnElement[int]]:
    return [literal(1).label("requests"), *(_events[name] for name in _SUMS[1:])]


def matching(query: UsageQuery, facts: Select[Any], table: FromClause, start: int, end: int) -> Select[Any]:
    """`facts` of a table of usage, without what lies outside the range (microseconds) or does not match the filters."""
    facts = facts.where(table.c.at >= start, table.c.at < end)
    if query.tenant_id is not None:
        facts = facts.where(table.c.tenant_id == query.tenant_id)
    for column, wanted in _filters(query).items():
        if wanted:
            facts = facts.where(table.c[column].in_(wanted))
    return facts


def _filters(query: UsageQuery) -> dict[str, tuple[Any, ...]]:
    return {
        "adapter": query.adapters,
        "adapter_version": query.versions,
        "key_id": query.key_ids,
        "status": query.statuses,
    }


def _grouped(query: UsageQuery, facts: Subquery, sums: list[Label[int]]) -> tuple[Subquery, list[ColumnElement[Any]]]:
    """The rows before paging, and the columns that order them and tell them apart."""
    groups = [facts.c[name] for name in dict.fromkeys(c for group in query.group_by for c in _GROUP_COLUMNS[group])]
    names = [func.min(facts.c[name]).label(name) for name in _NAMES]
    width = _BUCKETS[query.bucket]
    if width:
        bucket = (facts.c.at // width * width).label("bucket")
        rows = select(bucket, *groups, *names, *sums).group_by(bucket, *groups)
    else:
        # Not the start, which by default moves with the clock: the next page would begin anew.
        bucket = literal(0, BigInteger).label("bucket")
        rows = select(bucket, *groups, *names, *sums).group_by(*groups)
    grouped = rows.subquery()
    return grouped, [grouped.c.bucket, *(grouped.c[column.name] for column in groups)]


def _usage_row(query: UsageQuery, row: RowMapping) -> UsageRow:
    width = _BUCKETS[query.bucket]
    by_adapter = "adapter" in query.group_by or "version" in query.group_by
    return UsageRow(
        start=from_micros(row["bucket"]) if width else query.start.astimezone(UTC),
        end=from_micros(row["bucket"] + width) if width else query.end.astimezone(UTC),
        tenant_id=row.get("tenant_id") or None,
        tenant=(row["tenant"] or None) if "tenant" in query.group_by else None,
        adapter_id=row.get("adapter_id") or None,
        adapter=(row["adapter"] or None) if by_adapter else None,
        version=row.get("adapter_version") or None,
        key_id=row.get("key_id") or None,
        status=row.get("status") or None,
        **_figures(row),
    )


def _figures(row: RowMapping) -> dict[str, int]:
    parts, units = (row[name] for name in _COSTS)
    return {**{name: row[name] for name in _SUMS}, "cost": parts * PART + units}


def _write_cursor(place: Sequence[object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


def _read_cursor(text: str, order: Sequence[ColumnElement[Any]]) -> list[Any]:
    """The place that `_write_cursor` wrote, if it fits the query's order."""
    try:
        place = json.loads(base64.urlsafe_b64decode(text))
    except (ValueError, RecursionError):
        place = None
    kinds = [column.type.python_type for column in order]
    if not isinstance(place, list) or [type(part) for part in place] != kinds:
        raise InvalidRequestError("The cursor is not one that this query gave out.", param="after")
    for part in place:
        check_text(part, "after", 127) if isinstance(part, str) else check_integer(part, "after", low=-MAX_INTEGER)
    return place
