"""Queries of usage: sums of a range by bucket and group, and single events.

Whole hours are answered from the hourly sums, the rest of the range from the events. A query reads these facts once, or
twice if the answer has more than one page.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from datetime import UTC
from typing import Any, get_args

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    FromClause,
    Label,
    RowMapping,
    Select,
    Subquery,
    and_,
    case,
    func,
    literal,
    not_,
    or_,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncSession

from weft.errors import InvalidRequestError
from weft.registry.db.clock import HOUR_US, from_micros, to_micros
from weft.registry.db.models import UsageEventRow, UsageRollupRow
from weft.registry.names import MAX_INTEGER, MAX_VERSION, check_integer, check_text
from weft.registry.records import GroupBy, Page, RankBy, UsageEvent, UsageQuery, UsageReport, UsageRow, UsageTotals
from weft.registry.usage.buckets import WIDTHS, Buckets, zone
from weft.registry.usage.prices import PART, PriceTable, cost_sums

MAX_ROWS = 10_000
MAX_WANTED = 100
"""Most values of one filter."""
MAX_TOP = 50
"""Most groups that one query ranks."""

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
_COSTS = ("cost_parts", "cost_units")
_FIGURES = (*SUMS, *_COSTS)

_events = UsageEventRow.__table__
_rollups = UsageRollupRow.__table__
_OPTIONAL = (
    *("tenant_id", "tenant", "key_id"),
    *("adapter_id", "adapter", "adapter_version", "adapter_digest", "adapter_state"),
)
"""Fields of an event that may be None; the table has the empty text or 0."""


async def query(session: AsyncSession, query: UsageQuery, prices: PriceTable | None = None) -> UsageReport:
    """Sums of usage; rows are ordered by bucket, then by rank or by the ids of their groups.

    With prices, rows and totals have their cost.

    Raises:
        InvalidRequestError: The query or its cursor is wrong, or it ranks by cost without prices.
    """
    check_query(query)
    if query.top is not None and query.rank_by == "cost" and prices is None:
        raise InvalidRequestError("This server has no prices, so rank_by cannot be cost.", param="rank_by")
    buckets = await _buckets(session, query)
    needed = NAMES if "adapter" in _names(query) else _names(query)
    facts = _facts(query, buckets, needed if prices is None else (*NAMES, "service_class"))
    costs = (cost.label(name) for name, cost in zip(_COSTS, cost_sums(prices, facts), strict=True))
    sums = [*(sum_of(facts.c[name]) for name in SUMS), *costs]
    cells = _cells(query, facts, sums)
    if query.top is not None:
        found = (await session.execute(_top(query, query.top, cells.cte("cells")))).mappings().all()
        return _top_report(query, query.top, buckets, found)
    grouped = cells.subquery()
    order = [column for column in grouped.c if column.name in ("bucket", *_groups(query))]
    page = select(grouped).where(grouped.c.requests > 0).order_by(*order).limit(query.limit + 1)
    if query.after is not None:
        page = page.where(tuple_(*order) > tuple_(*_read_cursor(query.after, order)))
    found = (await session.execute(page)).mappings().all()
    rows = [_usage_row(query, buckets, row) for row in found[: query.limit]]
    more = len(found) > query.limit
    if not more and query.after is None:
        totals, groups = _total(rows), len({_group(row) for row in rows})
    else:
        totals, groups = await _whole(session, query, facts, sums)
    return UsageReport(
        rows=tuple(rows),
        totals=totals,
        groups=groups if query.group_by else None,
        next=_write_cursor([found[query.limit - 1][column.name] for column in order]) if more else None,
    )


def check_query(query: UsageQuery) -> None:
    """Check everything but the cursor.

    Raises:
        InvalidRequestError: Bucket, zone, grouping, ranking, range, limit or a filter is wrong.
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
        check_integer(version, "version", high=MAX_VERSION)
    if max(len(wanted) for wanted in _filters(query).values()) > MAX_WANTED:
        raise InvalidRequestError(f"A filter takes at most {MAX_WANTED} values.")


def event_sums() -> list[ColumnElement[int]]:
    """What one event adds to each of the sums."""
    return [literal(1).label("requests"), *(_events.c[name] for name in SUMS[1:])]


def matching(query: UsageQuery, facts: Select[Any], table: FromClause, start: int, end: int) -> Select[Any]:
    """The rows of `facts`, a select of a usage table, that lie in the range (microseconds) and match the filters."""
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


def sum_of(column: ColumnElement[int]) -> Label[int]:
    """0 for no rows; an integer in PostgreSQL too, which sums 64-bit integers to decimal numbers."""
    return func.coalesce(func.sum(column), 0).cast(BigInteger).label(column.name)


async def _buckets(session: AsyncSession, query: UsageQuery) -> Buckets:
    """Buckets for the time that has events: a zone's transitions have no end."""
    if query.tz == "UTC" or query.bucket not in ("1h", "1d"):
        return Buckets(query.bucket, zone(query.tz))
    start, end = to_micros(query.start), to_micros(query.end)
    ends = (func.min(_events.c.at), func.max(_events.c.at))
    # Each by itself is one look into the index.
    found = (select(one).where(_events.c.at >= start, _events.c.at < end).scalar_subquery() for one in ends)
    first, last = (await session.execute(select(*found))).one()
    return Buckets.between(query.bucket, zone(query.tz), first or 0, last or 0)


def _facts(query: UsageQuery, buckets: Buckets, names: Iterable[str]) -> Subquery:
    """The facts of the range as rows of one shape: hourly sums for whole hours, events for the rest."""
    kept = dict.fromkeys((*_groups(query), *names))

    def facts(table: FromClause, sums: Iterable[ColumnElement[int]], begin: int, end: int) -> Select[Any]:
        bucket = (buckets.key(table.c.at).label("bucket"),) if query.bucket else ()
        return matching(query, select(*bucket, *(table.c[name] for name in kept), *sums), table, begin, end)

    start, end = to_micros(query.start), to_micros(query.end)
    first_hour, last_hour = -(-start // HOUR_US) * HOUR_US, end // HOUR_US * HOUR_US
    if not buckets.hold_hours or first_hour >= last_hour:
        return facts(_events, event_sums(), start, end).subquery()
    hours = facts(_rollups, (_rollups.c[name] for name in SUMS), first_hour, last_hour)
    edges = [facts(_events, event_sums(), start, first_hour), facts(_events, event_sums(), last_hour, end)]
    if buckets.cut_hours:
        hours = hours.where(not_(buckets.is_cut(_rollups.c.at)))
        is_cut = buckets.is_cut(_events.c.at // HOUR_US * HOUR_US)
        edges.append(facts(_events, event_sums(), first_hour, last_hour).where(is_cut))
    return union_all(hours, *edges).subquery()


def _groups(query: UsageQuery) -> tuple[str, ...]:
    """Columns of the ids that make a group."""
    return tuple(dict.fromkeys(column for group in query.group_by for column in GROUP_COLUMNS[group]))


def _names(query: UsageQuery) -> list[str]:
    """Columns of the names that belong to these ids."""
    ids = _groups(query)
    return [name for name in NAMES if f"{name}_id" in ids]


def _cells(query: UsageQuery, facts: Subquery, sums: Sequence[Label[int]]) -> Select[Any]:
    """Each bucket of each group."""
    groups = [facts.c[name] for name in _groups(query)]
    shown = (adapter_label(query, facts) if name == "adapter" else facts.c[name] for name in _names(query))
    names = [func.min(text).label(name) for name, text in zip(_names(query), shown, strict=True)]
    if query.bucket:
        return select(facts.c.bucket, *groups, *names, *sums).group_by(facts.c.bucket, *groups)
    # Not the start: by default it moves with the clock, and cursors must not.
    bucket = literal(0, BigInteger).label("bucket")
    return select(bucket, *groups, *names, *sums).group_by(*groups)


async def _whole(
    session: AsyncSession, query: UsageQuery, facts: Subquery, sums: Sequence[Label[int]]
) -> tuple[UsageTotals, int]:
    """Totals of the whole range, and how many groups it has."""
    groups = [facts.c[name] for name in _groups(query)]
    per_group = select(*groups, *sums).group_by(*groups).subquery()
    statement = select(func.count().label("groups"), *(sum_of(per_group.c[name]) for name in _FIGURES))
    row = (await session.execute(statement)).mappings().one()
    return UsageTotals(**_figures(row)), row["groups"]


def _top(query: UsageQuery, top: int, cells: CTE) -> Select[Any]:
    """The cells of the top groups, and behind them in each bucket one cell of all other groups."""
    ids = _groups(query)
    groups = [cells.c[name] for name in ids]
    place = func.row_number().over(order_by=[*_rank(query, cells), *groups]).label("place")
    ranked = select(*groups, place, func.count().over().label("groups")).group_by(*groups)
    chosen = ranked.order_by(place).limit(top).cte("chosen")
    place = func.coalesce(chosen.c.place, top + 1).label("place")
    shown = (func.min(cells.c[name]).label(name) for name in (*ids, *_names(query)))
    sums = (sum_of(cells.c[name]) for name in _FIGURES)
    joined = cells.outerjoin(chosen, and_(*(cells.c[name] == chosen.c[name] for name in ids)))
    rows = select(cells.c.bucket, place, func.max(chosen.c.groups).label("groups"), *shown, *sums)
    return rows.select_from(joined).group_by(cells.c.bucket, place).order_by(cells.c.bucket, place).limit(MAX_ROWS + 1)


def _rank(query: UsageQuery, cells: CTE) -> list[ColumnElement[Any]]:
    if query.rank_by == "cost":
        parts, units = (sum_of(cells.c[name]).element for name in _COSTS)
        return [(parts + units // PART).desc(), (units % PART).desc()]
    names = ("prompt_tokens", "completion_tokens") if query.rank_by == "total_tokens" else (query.rank_by,)
    return [func.sum(sum((cells.c[name] for name in names[1:]), cells.c[names[0]])).desc()]


def _top_report(query: UsageQuery, top: int, buckets: Buckets, found: Sequence[RowMapping]) -> UsageReport:
    if len(found) > MAX_ROWS:
        raise InvalidRequestError(
            f"The answer would have more than {MAX_ROWS} rows: take a wider bucket, a shorter range or a smaller top.",
            param="top",
        )
    rows = tuple(_usage_row(query, buckets, row, is_other=row["place"] > top) for row in found)
    groups = max((row["groups"] or 0 for row in found), default=0)
    return UsageReport(rows=rows, totals=_total(rows), groups=groups, next=None)


def _usage_row(query: UsageQuery, buckets: Buckets, row: RowMapping, *, is_other: bool = False) -> UsageRow:
    start, end = buckets.span(row["bucket"]) if query.bucket else (query.start, query.end)
    ids: dict[str, Any] = {} if is_other else {name: row[name] or None for name in (*_groups(query), *_names(query))}
    return UsageRow(
        start=start.astimezone(UTC),
        end=end.astimezone(UTC),
        other=is_other,
        version=ids.pop("adapter_version", None),
        **ids,
        **_figures(row),
    )


def _group(row: UsageRow) -> tuple[object, ...]:
    return row.tenant_id, row.adapter_id, row.version, row.key_id, row.status, row.service_class


def _total(rows: Iterable[UsageTotals]) -> UsageTotals:
    found = list(rows)
    return UsageTotals(**{name: sum(getattr(row, name) for row in found) for name in (*SUMS, "cost")})


def _figures(row: RowMapping) -> dict[str, Any]:
    parts, units = (row[name] for name in _COSTS)
    return {**{name: row[name] for name in SUMS}, "cost": parts * PART + units}


def _write_cursor(place: Sequence[object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


def _read_cursor(text: str, order: Sequence[ColumnElement[Any]]) -> list[Any]:
    """The place that `_write_cursor` wrote; raises InvalidRequestError where it does not fit the query."""
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


async def list_events(session: AsyncSession, query: UsageQuery) -> Page[UsageEvent]:
    """The events of a range that match the filters, oldest first; ignores bucket and grouping.

    Raises:
        InvalidRequestError: The query or its cursor is wrong.
    """
    check_query(query)
    found = matching(query, select(*_events.c), _events, to_micros(query.start), to_micros(query.end))
    if query.after is not None:
        at, dash, last = check_text(query.after, "after", 128).partition("-")
        if not (dash and at.isascii() and at.isdigit() and len(at) < 18):
            raise InvalidRequestError("The cursor is not one that this query gave out.", param="after")
        found = found.where(tuple_(_events.c.at, _events.c.id) > tuple_(int(at), last))
    rows = (await session.execute(found.order_by(_events.c.at, _events.c.id).limit(query.limit + 1))).mappings()
    events = [
        UsageEvent(**{**row, **{name: row[name] or None for name in _OPTIONAL}, "at": from_micros(row["at"])})
        for row in rows
    ]
    return Page.of(events, query.limit, lambda event: f"{to_micros(event.at)}-{event.id}")
