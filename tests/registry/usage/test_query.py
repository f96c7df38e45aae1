"""The SQL of usage queries against a plain count of the events."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from typing import Any, get_args
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from manylora.errors import InvalidRequestError
from manylora.registry.db.database import Database
from manylora.registry.records import (
    GroupBy,
    RankBy,
    UsageEvent,
    UsageQuery,
    UsageReport,
    UsageRow,
    UsageTotals,
)
from manylora.registry.usage import query as usage_query
from manylora.registry.usage import write as usage
from manylora.registry.usage.buckets import zone_of
from manylora.registry.usage.prices import UNITS, Price, PriceTable, in_currency
from registry_samples import NOON, usage_event
from usage_sums import wrong_sums

pytestmark = pytest.mark.anyio

DAY = UsageQuery(start=NOON - timedelta(days=1), end=NOON + timedelta(days=1))
PRICES = PriceTable(
    currency="EUR",
    prices={
        "default": Price(prompt=10**6 + 7, cached=3, completion=99_999),
        "base": Price(prompt=1, cached=0, completion=1),
        "b/*": Price(prompt=5, cached=5, completion=10**9),
        "b/y": Price(prompt=100, cached=100, completion=100),
    },
    batch=Decimal(3),
)
NOTHING = (0,) * 5
FIGURES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost")
IDS = ("tenant_id", "adapter_id", "version", "key_id", "status", "service_class")
Figures = tuple[int, ...]


async def _insert(database: Database, *events: UsageEvent) -> None:
    async with database.write() as session:
        await usage.insert_events(session, events)


async def _query(
    database: Database, prices: PriceTable | None = PRICES, **wanted: Any
) -> UsageReport:
    async with database.read() as session:
        return await usage_query.query(session, replace(DAY, **wanted), prices)


def _cost(event: UsageEvent, prices: PriceTable) -> int:
    names = (
        f"{event.tenant}/{event.adapter}",
        f"{event.tenant}/*",
        "base" if event.adapter is None else "",
        "default",
    )
    price = next(prices.prices[name] for name in names if name in prices.prices)
    computed = event.prompt_tokens - event.cached_tokens
    cost = (
        computed * price.prompt
        + event.cached_tokens * price.cached
        + event.completion_tokens * price.completion
    )
    return int(cost * (prices.batch if event.service_class == "batch" else 1))


def _figures(row: UsageTotals) -> Figures:
    return tuple(getattr(row, name) for name in FIGURES)


def _counts(query: UsageQuery, event: UsageEvent) -> bool:
    filters = (
        (query.versions, event.adapter_version or 0),
        (query.key_ids, event.key_id or ""),
        (query.statuses, event.status),
        (query.service_classes, event.service_class),
    )
    is_own = (
        query.tenant_id in (None, event.tenant_id or "") and query.start <= event.at < query.end
    )
    is_wanted = not query.adapters or bool(
        {event.adapter or "", f"{event.tenant}/{event.adapter}"} & {*query.adapters}
    )
    return is_own and is_wanted and all(not wanted or has in wanted for wanted, has in filters)


def _label(query: UsageQuery, event: UsageEvent) -> str | None:
    """The name of the event's adapter in a row: with its owner if several tenants may be in the row."""
    if event.adapter is None or "/" in event.adapter or event.tenant is None:
        return event.adapter
    return (
        event.adapter
        if query.tenant_id is not None or "tenant" in query.group_by
        else f"{event.tenant}/{event.adapter}"
    )


def _begin(query: UsageQuery, at: datetime) -> datetime:
    local = at.astimezone(query.zone)
    if query.bucket == "1d":
        return datetime.combine(local.date(), time(), local.tzinfo).astimezone(UTC)
    whole = timedelta(minutes=local.minute if query.bucket == "1h" else 0, seconds=local.second)
    return at - whole - timedelta(microseconds=local.microsecond) if query.bucket else query.start


def _ids(query: UsageQuery, event: UsageEvent) -> tuple[Any, ...]:
    shown = {
        "tenant_id": event.tenant_id if "tenant" in query.group_by else None,
        "adapter_id": event.adapter_id if {"adapter", "version"} & set(query.group_by) else None,
        "version": event.adapter_version if "version" in query.group_by else None,
        "key_id": event.key_id if "key" in query.group_by else None,
        "status": event.status if "status" in query.group_by else None,
        "service_class": event.service_class if "service_class" in query.group_by else None,
    }
    return tuple(shown[name] for name in IDS)


def _rank(query: UsageQuery, figures: Figures) -> int:
    named = dict(zip(FIGURES, figures, strict=True))
    return {**named, "total_tokens": named["prompt_tokens"] + named["completion_tokens"]}[
        query.rank_by
    ]


def _expected(query: UsageQuery, events: list[UsageEvent]) -> dict[tuple[Any, ...], Figures]:
    """Figures by begin, ids of the group, and whether it is that of all others."""
    cells: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: list(NOTHING))
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: list(NOTHING))
    for event in events:
        tokens = (event.prompt_tokens, event.cached_tokens, event.completion_tokens)
        for sums in (
            cells[_begin(query, event.at), _ids(query, event)],
            groups[_ids(query, event)],
        ):
            for index, figure in enumerate((1, *tokens, _cost(event, PRICES))):
                sums[index] += figure
    by_size = sorted(groups, key=lambda ids: (-_rank(query, tuple(groups[ids])), _stored(ids)))
    top = by_size[: query.top]
    folded: dict[tuple[Any, ...], list[int]] = {}
    for (begin, ids), figures in cells.items():
        key = (begin, ids, False) if ids in top else (begin, (None,) * len(IDS), True)
        folded[key] = [a + b for a, b in zip(folded.get(key, NOTHING), figures, strict=True)]
    return {key: tuple(figures) for key, figures in folded.items()}


def _stored(ids: tuple[Any, ...]) -> list[str]:
    """Ids as texts in the order of their columns: of equal groups the database has the smaller ones first."""
    return [
        str(each or ("0" if name == "version" else "")) for name, each in zip(IDS, ids, strict=True)
    ]


_EVENTS = st.lists(
    st.builds(
        lambda number, tenant, adapter, **fields: usage_event(
            f"use_{number}",
            tenant_id=None if tenant is None else f"ten_{tenant}",
            tenant=tenant,
            adapter_id=None if adapter is None else f"adp_{adapter[-1]}",
            adapter=adapter,
            **fields,
        ),
        st.integers(0, 99),
        st.sampled_from([None, "a", "b"]),
        st.sampled_from([None, "x", "y", "z", "b/y"]),
        at=st.integers(-30 * 3600, 40 * 3600).map(
            lambda s: NOON + timedelta(seconds=s, microseconds=s % 3)
        ),
        adapter_version=st.sampled_from([None, 1, 2]),
        key_id=st.sampled_from([None, "key_1", "key_2"]),
        status=st.sampled_from(["stop", "length", "error"]),
        service_class=st.sampled_from(["interactive", "batch"]),
        prompt_tokens=st.sampled_from([4, 5, 1000, usage.MAX_TOKENS]),
        completion_tokens=st.sampled_from([0, 1, 1000]),
    ),
    max_size=30,
)
_QUERIES = st.builds(
    lambda start, length, **fields: UsageQuery(
        start=NOON + timedelta(seconds=start),
        end=NOON + timedelta(seconds=start + length),
        **fields,
    ),
    st.integers(-36 * 3600, 36 * 3600),
    st.integers(1, 72 * 3600),
    bucket=st.sampled_from([None, "1m", "1h", "1d"]),
    zone=st.sampled_from([ZoneInfo(name) for name in ("UTC", "America/New_York", "Asia/Kolkata")]),
    group_by=st.sets(st.sampled_from(get_args(GroupBy))).map(
        lambda groups: tuple(group for group in get_args(GroupBy) if group in groups)
    ),
    top=st.none() | st.integers(1, 4),
    rank_by=st.sampled_from(get_args(RankBy)),
    tenant_id=st.sampled_from([None, None, "ten_a", "ten_nobody", ""]),
    adapters=st.sampled_from([(), (), ("x",), ("", "y"), ("b/y", "a/x")]),
    versions=st.sampled_from([(), (), (2, 3)]),
    key_ids=st.sampled_from([(), (), ("key_1", "key_3")]),
    statuses=st.sampled_from([(), (), ("stop", "error")]),
    service_classes=st.sampled_from([(), (), ("batch",)]),
    limit=st.sampled_from([3, 10_000]),
).map(lambda query: query if query.group_by else replace(query, top=None))


@pytest.mark.no_cover
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches=st.lists(_EVENTS, max_size=2), query=_QUERIES)
async def test_any_query_equals_a_plain_count(
    database: Database, batches: list[list[UsageEvent]], query: UsageQuery
) -> None:
    events: dict[str, UsageEvent] = {}
    async with database.write() as session:
        for table in (
            "usage_events",
            "usage_rollups",
            "usage_latency",
            "usage_adapters",
            "usage_months",
        ):
            await session.execute(text(f"DELETE FROM {table}"))
        for batch in batches:
            await usage.insert_events(session, batch)
            events = {event.id: event for event in reversed(batch)} | events
    counted = [event for event in events.values() if _counts(query, event)]
    expected = _expected(query, counted)
    rows: list[UsageRow] = []
    after = None
    async with database.read() as session:
        while True:
            report = await usage_query.query(session, replace(query, after=after), PRICES)
            rows += report.rows
            assert list(_figures(report.totals)) == [
                *map(sum, zip(NOTHING, *expected.values(), strict=True))
            ]
            assert report.groups == (
                len({_ids(query, event) for event in counted}) if query.group_by else None
            )
            after = report.next
            if after is None:
                break
    assert await wrong_sums(database) == 0
    found = {
        (row.start, tuple(getattr(row, name) for name in IDS), row.other): _figures(row)
        for row in rows
    }
    assert found == expected
    assert len(found) == len(rows)
    assert [row.start for row in rows] == sorted(row.start for row in rows)
    labels: dict[object, set[str | None]] = defaultdict(set)
    for event in counted:
        labels[_begin(query, event.at), _ids(query, event)].add(_label(query, event))
    for row in rows:
        named = labels[row.start, tuple(getattr(row, name) for name in IDS)]
        assert row.tenant == (None if row.tenant_id is None else row.tenant_id[4:])
        assert row.adapter == (None if row.adapter_id is None else min(filter(None, named)))
        assert query.bucket or row.end == query.end


async def test_usage_of_a_deleted_adapter_stays_apart_from_its_successor(
    database: Database,
) -> None:
    await _insert(database, usage_event("use_1"), usage_event("use_2", adapter_id="adp_new"))
    report = await _query(database, group_by=("adapter",), adapters=("support",))
    assert [(row.adapter, row.requests) for row in report.rows] == [("acme/support", 1)] * 2


async def test_more_rows_than_an_answer_holds_are_refused(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_query, "MAX_ROWS", 100)
    day = [
        usage_event(f"use_{n}", at=NOON + timedelta(minutes=n // 9), key_id=f"key_{n % 9}")
        for n in range(108)
    ]
    await _insert(database, *day)
    with pytest.raises(InvalidRequestError, match="wider bucket, a shorter range or a smaller top"):
        await _query(database, bucket="1m", group_by=("key",), top=9)
    assert (
        len((await _query(database, bucket="1m", group_by=("key",), top=7, limit=1)).rows) == 8 * 12
    )


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"start": NOON, "end": NOON}, "end must be after"),
        ({"adapters": ("a\x00",)}, "adapter"),
        ({"key_ids": ("\ud800",)}, "key"),
        ({"statuses": ("x" * 128,)}, "status"),
        *(
            ({"after": cursor}, "cursor|after")
            for cursor in ("garbage", "", "W10=", "WyJ4Il0=", "WzFlOTk5OV0=", "é")
        ),
        ({"after": "WzEwMDAwMDAwMDAwMDAwMDAwMDAwXQ=="}, "after"),
        ({"after": "WzAsICJhXHUwMDAwIl0=", "group_by": ("key",)}, "NUL"),
        ({"top": 2}, "group_by"),
        ({"top": 2, "group_by": ("key",), "after": "W10="}, "leave out after"),
        ({"top": 2, "group_by": ("key",), "rank_by": "cost", "prices": None}, "no prices"),
    ],
)
async def test_a_wrong_query_is_refused(
    database: Database, wanted: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        await _query(database, **wanted)


@pytest.mark.parametrize(
    "name",
    ["", "Mars/Olympus", "America", "../UTC", "/etc/passwd", "UTC\x00", "x" * 65, "tzdata.zi", "."],
)
def test_a_name_of_no_time_zone_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="tz must "):
        zone_of(name)


async def test_a_large_bill_in_a_small_currency_is_exact(database: Database) -> None:
    tokens = {"prompt_tokens": usage.MAX_TOKENS, "cached_tokens": 0, "completion_tokens": 1}
    await _insert(database, *(usage_event(f"use_{number}", **tokens) for number in range(3)))
    dear = PriceTable(
        currency="VND",
        prices={"default": Price(prompt=10**10, cached=0, completion=123_456_789)},
    )
    report = await _query(database, dear)
    assert report.totals.cost == 3 * (usage.MAX_TOKENS * 10**10 + 123_456_789)
    assert [row.cost for row in report.rows] == [report.totals.cost]
    assert (await _query(database, None)).totals.cost == 0


def test_a_cost_is_shown_exactly() -> None:
    shown = {
        0: "0",
        UNITS: "1",
        10 * UNITS: "10",
        UNITS // 2: "0.5",
        1: "0.0000000001",
        3 * UNITS + 20: "3.000000002",
    }
    assert {units: in_currency(units) for units in shown} == shown


async def test_events_come_one_by_one_in_pages_with_the_same_filters(database: Database) -> None:
    made = [
        usage_event("use_b", at=NOON),
        usage_event("use_a", at=NOON),
        usage_event(
            "use_c",
            at=NOON + timedelta(seconds=1),
            status="error",
            queue_s=None,
            adapter_state=None,
        ),
        usage_event(
            "use_d",
            at=NOON + timedelta(seconds=2),
            adapter_id=None,
            adapter=None,
            adapter_version=None,
        ),
    ]
    await _insert(database, *made)
    found: list[UsageEvent] = []
    after: str | None = None
    async with database.read() as session:
        while True:
            page = await usage_query.list_events(session, replace(DAY, after=after, limit=1))
            found += page.items
            after = page.next
            if after is None:
                break
        assert found == [made[1], made[0], made[2], made[3]]
        assert (
            await usage_query.list_events(session, replace(DAY, statuses=("error",)))
        ).items == (made[2],)
        for cursor in ("x", "W10=", "WyJ4IiwieCJd", "\x00"):
            with pytest.raises(InvalidRequestError):
                await usage_query.list_events(session, replace(DAY, after=cursor))


CHANGES = {
    "UTC": datetime(2026, 3, 1, 0, tzinfo=UTC),
    "America/New_York": datetime(2026, 11, 1, 6, tzinfo=UTC),
    "Europe/Berlin": datetime(2026, 3, 29, 1, tzinfo=UTC),
    "Asia/Kathmandu": datetime(2026, 5, 1, 18, 15, tzinfo=UTC),  # a midnight: nothing changes there
    "Australia/Adelaide": datetime(2026, 4, 4, 16, 30, tzinfo=UTC),
    "America/St_Johns": datetime(2026, 3, 8, 5, 30, tzinfo=UTC),
    "Australia/Lord_Howe": datetime(2026, 4, 4, 15, tzinfo=UTC),  # by half an hour
    "America/Santiago": datetime(2026, 9, 6, 4, tzinfo=UTC),  # skips midnight
    "Africa/Cairo": datetime(2026, 10, 29, 21, tzinfo=UTC),  # back across midnight
    "Pacific/Apia": datetime(2011, 12, 30, 10, tzinfo=UTC),  # a day that never was
}
"""A moment in which the zone's clocks change, or a midnight."""
TICK, HOUR = timedelta(microseconds=1), timedelta(hours=1)


@pytest.mark.parametrize("tz", CHANGES)
async def test_every_event_is_in_the_row_of_its_hour_and_day_where_clocks_change(
    database: Database, tz: str
) -> None:
    change, home = CHANGES[tz], ZoneInfo(tz)
    near = {change + TICK * n for n in (-1, 0, 1)}
    whole = {
        change.replace(minute=0) + HOUR * n - TICK * late for n in range(-50, 50) for late in (0, 1)
    }
    times = sorted(near | whole)
    await _insert(database, *(usage_event(f"use_{n}", at=at) for n, at in enumerate(times)))
    start, end = change - timedelta(hours=47, minutes=11), change + timedelta(hours=44, seconds=7)
    counted = Counter(at for at in times if start <= at < end)
    for bucket in ("1m", "1h", "1d"):
        rows = (
            await _query(database, zone=home, bucket=bucket, start=start, end=end, limit=10_000)
        ).rows
        assert sum(row.requests for row in rows) == counted.total(), bucket
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            assert row.requests == sum(row.start <= at < row.end for at in counted)
            assert following is None or row.end <= following.start
            if bucket == "1d":
                day = row.start.astimezone(home).date()
                assert (row.end - TICK).astimezone(home).date() == day
                assert (
                    (row.start - TICK).astimezone(home).date()
                    < day
                    < row.end.astimezone(home).date()
                )
        if bucket == "1h":
            assert [row.start for row in rows if row.start.astimezone(home).minute] in (
                [],
                [change],
            )
            assert all(
                row.end - row.start == HOUR for row in rows if change not in (row.start, row.end)
            )
