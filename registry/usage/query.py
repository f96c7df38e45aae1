"""Queries of usage: sums of a range by bucket and group, and single events.

Whole hours are answered from the hourly sums, the rest of the range from the events. A query reads these facts once, or
twice if the answer has more than one page.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from manylora import strict_json
from manylora.errors import InvalidRequestError
from manylora.registry.db.clock import HOUR_US, from_micros, to_micros
from manylora.registry.db.models import UsageEventRow, UsageRollupRow
from manylora.registry.names import MAX_INTEGER, check_integer, check_text
from manylora.registry.records import (
    RETRIED,
    GroupBy,
    Page,
    UsageEvent,
    UsageQuery,
    UsageReport,
    UsageRow,
    UsageTotals,
)
from manylora.registry.usage.buckets import Buckets
from manylora.registry.usage.prices import PART, PriceTable

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
_RANKED = {"cost": _COSTS, "total_tokens": ("prompt_tokens", "completion_tokens")}
"""Figures by which `rank_by` orders, if it names none of them."""

_events = UsageEventRow.__table__
_rollups = UsageRollupRow.__table__
_EVENT_SUMS = (
    sa.case((_events.c.status == RETRIED, 0), else_=1).label("requests"),
    *(_events.c[name] for name in SUMS[1:]),
)
"""Amounts that one event adds to the sums."""
_OPTIONAL = (
    "tenant_id",
    "tenant",
    "key_id",
    "adapter_id",
    "adapter",
    "adapter_version",
    "adapter_digest",
    "adapter_state",
)
"""Fields of an event that may be None; the table has the empty text or 0."""


async def query(
    session: AsyncSession, query: UsageQuery, prices: PriceTable | None = None
) -> UsageReport:
    """Sums of usage; rows are ordered by bucket, then by rank or by the ids of their groups.

    With prices, rows and totals have their cost.

    Raises:
        InvalidRequestError: The query or its cursor is wrong, or it ranks by cost without prices.
    """
    check_query(query)
    if query.top is not None and query.rank_by == "cost" and prices is None:
        raise InvalidRequestError(
            "This server has no prices, so rank_by cannot be cost.", param="rank_by"
        )
    buckets = await _buckets(session, query)
    facts = _facts(query, buckets)
    nothing = sa.literal(0, sa.BigInteger)
    costs = (nothing, nothing) if prices is None else prices.costs(facts)
    columns = (*(facts.c[name] for name in SUMS), *costs)
    sums = [sum_of(each).label(name) for name, each in zip(_FIGURES, columns, strict=True)]
    cells = group_cells(query, facts, sums)
    if query.top is not None:
        return await _top_report(session, query, query.top, buckets, cells.cte("cells"))
    grouped = cells.subquery()
    order = [grouped.c[name] for name in ("bucket", *group_columns(query))]
    page = sa.select(grouped).where(grouped.c.requests > 0).order_by(*order).limit(query.limit + 1)
    if query.after is not None:
        page = page.where(sa.tuple_(*order) > sa.tuple_(*_read_cursor(query.after, order)))
    found = (await session.execute(page)).mappings().all()
    rows = [_usage_row(query, buckets, row) for row in found[: query.limit]]
    more = len(found) > query.limit
    if not more and query.after is None:
        totals = _total(rows)
        groups = len({tuple(row[name] for name in group_columns(query)) for row in found})
    else:
        totals, groups = await _whole(session, query, facts, sums)
    return UsageReport(
        rows=tuple(rows),
        totals=totals,
        groups=groups if query.group_by else None,
        next=_write_cursor([found[query.limit - 1][column.name] for column in order])
        if more
        else None,
    )


def check_query(query: UsageQuery) -> None:
    """Check what its types do not say; the routes check numbers against `MAX_ROWS`, `MAX_WANTED` and `MAX_TOP`.

    Raises:
        InvalidRequestError: The range is empty, a filter cannot be stored, or `top` has no groups or has a cursor.
    """
    if query.start >= query.end:
        raise InvalidRequestError("end must be after start.", param="end")
    for name, wanted in (
        ("adapter", query.adapters),
        ("key", query.key_ids),
        ("status", query.statuses),
    ):
        for text in wanted:
            check_text(text, name, 127)
    if query.top is not None and not query.group_by:
        raise InvalidRequestError("top ranks groups, so it needs group_by.", param="top")
    if query.top is not None and query.after is not None:
        raise InvalidRequestError(
            "With top there are no further pages: leave out after.", param="after"
        )


def matching(
    query: UsageQuery, facts: sa.Select[Any], table: sa.FromClause, start: int, end: int
) -> sa.Select[Any]:
    """The rows of `facts`, a select of a usage table, that lie in the range (microseconds) and match the filters."""
    conditions = [table.c.at >= start, table.c.at < end]
    if query.tenant_id is not None:
        conditions.append(table.c.tenant_id == query.tenant_id)
    filters = {
        "adapter_version": query.versions,
        "key_id": query.key_ids,
        "status": query.statuses,
        "service_class": query.service_classes,
    }
    conditions += [table.c[column].in_(wanted) for column, wanted in filters.items() if wanted]
    if query.adapters:
        # The usage of an owner says only `name` where that of others says `owner/name`.
        owned = [tuple(text.split("/", 1)) for text in query.adapters if "/" in text]
        is_owners = sa.tuple_(table.c.tenant, table.c.adapter).in_(owned)
        conditions.append(table.c.adapter.in_(query.adapters) | is_owners)
    return facts.where(*conditions)


def _adapter_label(query: UsageQuery, facts: sa.FromClause) -> sa.ColumnElement[str]:
    """An adapter's name in a row, which is also the filter for what the row sums up.

    A row over several tenants names the owner, because each of them may have an adapter of this name.
    """
    name: sa.ColumnElement[str] = facts.c.adapter
    if query.tenant_id is not None or "tenant" in query.group_by:
        return name
    return sa.case(
        (sa.or_(name == "", name.contains("/"), facts.c.tenant == ""), name),
        else_=facts.c.tenant + "/" + name,
    )


def sum_of(column: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    """0 for no rows; an integer in PostgreSQL too, which sums 64-bit integers to decimal numbers."""
    return sa.func.coalesce(sa.func.sum(column), 0).cast(sa.BigInteger)


def sums_of(table: sa.FromClause, names: Iterable[str]) -> list[sa.Label[int]]:
    """The sums of these columns, under their names."""
    return [sum_of(table.c[name]).label(name) for name in names]


async def _buckets(session: AsyncSession, query: UsageQuery) -> Buckets:
    """Buckets for the time that has events: a zone's transitions have no end."""
    if query.zone.key == "UTC" or query.bucket not in ("1h", "1d"):
        return Buckets(query.bucket, query.zone)
    start = to_micros(query.start)
    end = to_micros(query.end)
    ends = (sa.func.min(_events.c.at), sa.func.max(_events.c.at))
    # Each by itself is one look into the index.
    found = (
        sa.select(one).where(_events.c.at >= start, _events.c.at < end).scalar_subquery()
        for one in ends
    )
    first, last = (await session.execute(sa.select(*found))).one()
    return Buckets.between(query.bucket, query.zone, first or 0, last or 0)


def _facts(query: UsageQuery, buckets: Buckets) -> sa.Subquery:
    """The facts of the range as rows of one shape: hourly sums for whole hours, events for the rest."""
    kept = dict.fromkeys((*group_columns(query), *NAMES, "service_class"))

    def facts(
        table: sa.FromClause, sums: Iterable[sa.ColumnElement[int]], begin: int, end: int
    ) -> sa.Select[Any]:
        columns = (buckets.key(table.c.at).label("bucket"), *(table.c[name] for name in kept))
        return matching(query, sa.select(*columns, *sums), table, begin, end)

    start = to_micros(query.start)
    end = to_micros(query.end)
    first_hour = -(-start // HOUR_US) * HOUR_US
    last_hour = end // HOUR_US * HOUR_US
    if query.bucket == "1m" or first_hour >= last_hour:
        return facts(_events, _EVENT_SUMS, start, end).subquery()
    hours = facts(_rollups, (_rollups.c[name] for name in SUMS), first_hour, last_hour)
    edges = [
        facts(_events, _EVENT_SUMS, start, first_hour),
        facts(_events, _EVENT_SUMS, last_hour, end),
    ]
    if buckets.cut_hours:
        hours = hours.where(sa.not_(buckets.is_cut(_rollups.c.at)))
        is_cut = buckets.is_cut(_events.c.at // HOUR_US * HOUR_US)
        edges.append(facts(_events, _EVENT_SUMS, first_hour, last_hour).where(is_cut))
    return sa.union_all(hours, *edges).subquery()


def group_columns(query: UsageQuery) -> tuple[str, ...]:
    """Columns of the ids that make a group."""
    return tuple(
        dict.fromkeys(column for group in query.group_by for column in GROUP_COLUMNS[group])
    )


def name_columns(query: UsageQuery) -> list[str]:
    """Columns of the names that belong to these ids."""
    ids = group_columns(query)
    return [name for name in NAMES if f"{name}_id" in ids]


def group_cells(
    query: UsageQuery, facts: sa.FromClause, sums: Iterable[sa.Label[int]], *more: str
) -> sa.Select[Any]:
    """The sums of each bucket of each group, and of each value of `more` columns."""
    keys = [facts.c[name] for name in ("bucket", *group_columns(query), *more)]
    labels = {"tenant": facts.c.tenant, "adapter": _adapter_label(query, facts)}
    names = (sa.func.min(labels[name]).label(name) for name in name_columns(query))
    return sa.select(*keys, *names, *sums).group_by(*keys)


async def _whole(
    session: AsyncSession, query: UsageQuery, facts: sa.Subquery, sums: Sequence[sa.Label[int]]
) -> tuple[UsageTotals, int]:
    """Totals of the whole range, and how many groups it has."""
    groups = [facts.c[name] for name in group_columns(query)]
    per_group = sa.select(*groups, *sums).group_by(*groups).subquery()
    statement = sa.select(sa.func.count().label("groups"), *sums_of(per_group, _FIGURES))
    row = (await session.execute(statement)).mappings().one()
    return UsageTotals(**_figures(row)), row["groups"]


async def _top_report(
    session: AsyncSession, query: UsageQuery, top: int, buckets: Buckets, cells: sa.CTE
) -> UsageReport:
    """The cells of the top groups, and behind them in each bucket one cell of all other groups."""
    ids = group_columns(query)
    groups = [cells.c[name] for name in ids]
    place = sa.func.row_number().over(order_by=[*_rank(query, cells), *groups]).label("place")
    ranked = sa.select(*groups, place, sa.func.count().over().label("groups")).group_by(*groups)
    chosen = ranked.order_by(place).limit(top).cte("chosen")
    joined = cells.outerjoin(chosen, sa.and_(*(cells.c[name] == chosen.c[name] for name in ids)))
    keys = (cells.c.bucket, sa.func.coalesce(chosen.c.place, top + 1).label("place"))
    shown = (sa.func.min(cells.c[name]).label(name) for name in (*ids, *name_columns(query)))
    statement = sa.select(
        *keys, sa.func.max(chosen.c.groups).label("groups"), *shown, *sums_of(cells, _FIGURES)
    )
    statement = statement.select_from(joined).group_by(*keys).order_by(*keys).limit(MAX_ROWS + 1)
    found = (await session.execute(statement)).mappings().all()
    if len(found) > MAX_ROWS:
        raise InvalidRequestError(
            f"The answer would have more than {MAX_ROWS} rows: take a wider bucket, a shorter range or a smaller top.",
            param="top",
        )
    rows = tuple(_usage_row(query, buckets, row, is_other=row["place"] > top) for row in found)
    num_groups = max((row["groups"] or 0 for row in found), default=0)
    return UsageReport(rows=rows, totals=_total(rows), groups=num_groups, next=None)


def _rank(query: UsageQuery, cells: sa.CTE) -> list[sa.ColumnElement[Any]]:
    names = _RANKED.get(query.rank_by, (query.rank_by,))
    first, *more = (sum_of(cells.c[name]) for name in names)
    if query.rank_by == "cost":
        return [(first + more[0] // PART).desc(), (more[0] % PART).desc()]
    return [sum(more, first).desc()]


def group_fields(query: UsageQuery, buckets: Buckets, row: Mapping[Any, Any]) -> dict[str, Any]:
    """The fields of `UsageGroup`, by a row of `group_cells`."""
    start, end = buckets.span(row["bucket"]) if query.bucket else (query.start, query.end)
    fields = {name: row[name] or None for name in (*group_columns(query), *name_columns(query))}
    version = fields.pop("adapter_version", None)
    return {
        **fields,
        "version": version,
        "start": start.astimezone(UTC),
        "end": end.astimezone(UTC),
    }


def _usage_row(
    query: UsageQuery, buckets: Buckets, row: sa.RowMapping, *, is_other: bool = False
) -> UsageRow:
    if is_other:
        query = replace(query, group_by=())
    return UsageRow(other=is_other, **group_fields(query, buckets, row), **_figures(row))


def _total(rows: Sequence[UsageTotals]) -> UsageTotals:
    names = (*SUMS, "cost")
    return UsageTotals(**{name: sum(getattr(row, name) for row in rows) for name in names})


def _figures(row: sa.RowMapping) -> dict[str, Any]:
    parts, units = (row[name] for name in _COSTS)
    return {**{name: row[name] for name in SUMS}, "cost": parts * PART + units}


def _write_cursor(place: Sequence[object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


def _read_cursor(text: str, order: Sequence[sa.ColumnElement[Any]]) -> list[Any]:
    """The place that `_write_cursor` wrote; raises InvalidRequestError where it does not fit the query."""
    try:
        place = strict_json.loads(base64.urlsafe_b64decode(text))
    except ValueError:
        place = None
    kinds = [column.type.python_type for column in order]
    if not isinstance(place, list) or [type(part) for part in place] != kinds:
        raise InvalidRequestError("The cursor is not one that this query gave out.", param="after")
    for part in place:
        check_text(part, "after", 127) if isinstance(part, str) else check_integer(
            part, "after", low=-MAX_INTEGER
        )
    return place


async def list_events(session: AsyncSession, query: UsageQuery) -> Page[UsageEvent]:
    """The events of a range that match the filters, oldest first; ignores bucket and grouping.

    Raises:
        InvalidRequestError: The query or its cursor is wrong.
    """
    check_query(query)
    found = matching(
        query, sa.select(*_events.c), _events, to_micros(query.start), to_micros(query.end)
    )
    order = (_events.c.at, _events.c.id)
    if query.after is not None:
        found = found.where(sa.tuple_(*order) > sa.tuple_(*_read_cursor(query.after, order)))
    rows = (await session.execute(found.order_by(*order).limit(query.limit + 1))).mappings()
    events = [
        UsageEvent(
            **{
                **row,
                **{name: row[name] or None for name in _OPTIONAL},
                "at": from_micros(row["at"]),
            }
        )
        for row in rows
    ]
    return Page.of(
        events, query.limit, lambda event: _write_cursor([to_micros(event.at), event.id])
    )
