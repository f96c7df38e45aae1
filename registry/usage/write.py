"""Usage in SQL: events, the sums that are kept of them, and which rows a query reads.

An event's id is its identity: inserting it again changes nothing, and the sums move only for events that were really
inserted, in the same transaction. An event adds to one row of each table of sums: by hour, by time to the first token,
by adapter. Names of tenants and adapters stay as they came first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast, get_args

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    FromClause,
    Label,
    Select,
    String,
    Table,
    case,
    delete,
    func,
    literal,
    or_,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import InvalidRequestError
from weft.registry import audit
from weft.registry.db.clock import HOUR_US, from_micros, to_micros
from weft.registry.db.database import insert_into
from weft.registry.db.models import UsageAdapterRow, UsageEventRow, UsageLatencyRow, UsageRollupRow
from weft.registry.names import check_integer, check_text, storable
from weft.registry.records import AdapterUsage, GroupBy, RankBy, UsageEvent, UsageQuery
from weft.registry.usage.buckets import WIDTHS, zone
from weft.registry.usage.latency_bins import bin_in_sql, bin_of

MAX_TOKENS = 1 << 40
"""Most tokens in one event; 2^23 such events still sum to less than 2^63."""
MAX_ROWS = 10_000
MAX_WANTED = 100
"""Most values that one filter takes."""
MAX_TOP = 50
"""Most groups that one question ranks."""

NAMES = ("tenant", "adapter")
GROUP_COLUMNS: dict[GroupBy, tuple[str, ...]] = {
    "tenant": ("tenant_id",),
    "adapter": ("adapter_id",),
    "version": ("adapter_id", "adapter_version"),
    "key": ("key_id",),
    "status": ("status",),
    "service_class": ("service_class",),
}

SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_KEPT: tuple[tuple[Table, tuple[str, str]], ...] = (
    (cast(Table, UsageRollupRow.__table__), ("id", "")),  # every event has an id, so all count
    (cast(Table, UsageLatencyRow.__table__), ("service_class", "batch")),
    (cast(Table, UsageAdapterRow.__table__), ("adapter_id", "")),
)
"""Tables of sums, each with a column and a value of it: events with this value do not count there."""
_events = UsageEventRow.__table__.c
_TEXTS = {
    column.name: column.type.length or 0
    for column in _events
    if isinstance(column.type, String) and column.name != "request_id"
}
"""Texts by the characters that their columns take; what a request's own id has more is cut."""
_adapters = UsageAdapterRow.__table__.c
_TABLES = (UsageEventRow, UsageLatencyRow, UsageRollupRow, UsageAdapterRow)


def checked_event(event: UsageEvent) -> UsageEvent:
    """The event in a form that can be stored: its time in UTC, the client's own id without what databases refuse.

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
        check_integer(event.adapter_version, "adapter_version", low=1, high=(1 << 31) - 1)
    for name in ("queue_s", "ttft_s", "duration_s"):
        seconds = getattr(event, name)
        if seconds is not None and not math.isfinite(seconds):
            raise InvalidRequestError(f"{name} must be finite.", param=name)
    if event.at.tzinfo is None or event.at.year < 1971:
        raise InvalidRequestError("at must be a time after 1970 with a timezone.", param="at")
    return replace(event, at=event.at.astimezone(UTC), request_id=storable(event.request_id, 256))


async def insert_events(session: AsyncSession, events: Sequence[UsageEvent]) -> int:
    """Insert the events that are not there yet, and add them to the sums.

    Returns:
        How many were inserted.
    """
    rows: dict[str, dict[str, Any]] = {}
    for event in events:
        rows.setdefault(event.id, _row(event))
    if not rows:
        return 0
    statement = insert_into(session, UsageEventRow).on_conflict_do_nothing().returning(UsageEventRow.id)
    inserted = list(await session.scalars(statement, list(rows.values())))
    await add_to_sums(session, (rows[event_id] for event_id in inserted))
    return len(inserted)


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


def sum_of(column: ColumnElement[int]) -> Label[int]:
    """0 for no rows; an integer in PostgreSQL too, which sums 64-bit integers to decimal numbers."""
    return func.coalesce(func.sum(column), 0).cast(BigInteger).label(column.name)


def _row(event: UsageEvent) -> dict[str, Any]:
    row = {name: getattr(event, name) for name in _events.keys()}  # noqa: SIM118 - a collection of columns
    for name in _TEXTS:
        row[name] = row[name] or ""
    row["adapter_version"] = row["adapter_version"] or 0
    row["at"] = to_micros(event.at)
    return row


def check_query(query: UsageQuery) -> None:
    """Refuse what makes no sense.

    Raises:
        InvalidRequestError: Bucket, zone, grouping, ranking, range, limit or a filter cannot be answered.
    """
    if query.bucket not in WIDTHS:
        raise InvalidRequestError("bucket must be 1m, 1h or 1d.", param="bucket")
    if not set(query.group_by) <= set(GROUP_COLUMNS):
        raise InvalidRequestError(f"group_by takes {', '.join(GROUP_COLUMNS)}.", param="group_by")
    for name, moment in (("start", query.start), ("end", query.end)):
        if moment.tzinfo is None:
            raise InvalidRequestError(f"{name} must have a timezone.", param=name)
    if query.start >= query.end:
        raise InvalidRequestError("end must be after start.", param="end")
    zone(query.tz)
    check_integer(query.limit, "limit", low=1, high=MAX_ROWS)
    _check_top(query)
    _check_filters(query)


def _check_top(query: UsageQuery) -> None:
    if query.rank_by not in get_args(RankBy):
        raise InvalidRequestError(f"rank_by takes {', '.join(get_args(RankBy))}.", param="rank_by")
    if query.top is None:
        return
    check_integer(query.top, "top", low=1, high=MAX_TOP)
    if not query.group_by:
        raise InvalidRequestError("top ranks groups, so it needs group_by.", param="top")
    if query.after is not None:
        raise InvalidRequestError("With top there are no further pages: leave out after.", param="after")


def _check_filters(query: UsageQuery) -> None:
    owner = () if query.tenant_id is None else (query.tenant_id,)
    texts = {"tenant": owner, "adapter": query.adapters, "key": query.key_ids, "status": query.statuses}
    for name, wanted in {**texts, "service_class": query.service_classes}.items():
        for text in wanted:
            check_text(text, name, 127)
    for version in query.versions:
        check_integer(version, "version", high=(1 << 31) - 1)
    if max(len(wanted) for wanted in _filters(query).values()) > MAX_WANTED:
        raise InvalidRequestError(f"A filter takes at most {MAX_WANTED} values.")


def event_sums() -> list[ColumnElement[int]]:
    """What one event adds to each of the sums."""
    return [literal(1).label("requests"), *(_events[name] for name in SUMS[1:])]


def matching(query: UsageQuery, facts: Select[Any], table: FromClause, start: int, end: int) -> Select[Any]:
    """`facts` of a table of usage, without what lies outside the range (microseconds) or does not match the filters."""
    facts = facts.where(table.c.at >= start, table.c.at < end)
    if query.tenant_id is not None:
        facts = facts.where(table.c.tenant_id == query.tenant_id)
    for column, wanted in _filters(query).items():
        if wanted:
            is_wanted = table.c[column].in_(wanted)
            facts = facts.where(is_wanted | _asked_by_owner(query, table) if column == "adapter" else is_wanted)
    return facts


def _asked_by_owner(query: UsageQuery, table: FromClause) -> ColumnElement[bool]:
    """Whether the owner of a wanted `owner/name` asked: its own usage says only `name`."""
    owned = [tuple(text.split("/", 1)) for text in query.adapters if "/" in text]
    return tuple_(table.c.tenant, table.c.adapter).in_(owned)


def adapter_label(query: UsageQuery, facts: FromClause) -> ColumnElement[str]:
    """An adapter's name in a row, which is also the filter for what the row sums up.

    A row over several tenants names the owner, because each of them may have an adapter of this name.
    """
    name: ColumnElement[str] = facts.c.adapter
    if query.tenant_id is not None or "tenant" in query.group_by:
        return name
    return case((or_(name == "", name.contains("/"), facts.c.tenant == ""), name), else_=facts.c.tenant + "/" + name)


def _filters(query: UsageQuery) -> dict[str, tuple[Any, ...]]:
    return {
        "adapter": query.adapters,
        "adapter_version": query.versions,
        "key_id": query.key_ids,
        "status": query.statuses,
        "service_class": query.service_classes,
    }


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
    sums = [sum_of(_adapters[name]) for name in SUMS]
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


async def erase_keys(session: AsyncSession, key_ids: Collection[str], now: datetime) -> int:
    """Delete what was ever used with these keys, and note how much it was for each in the audit log.

    Exact, because each row of a sum belongs to one key: none has to be told apart into what stays and what goes.

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
