from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from registry_samples import NOON, usage_event
from weft.errors import InvalidRequestError
from weft.registry.db.database import Database
from weft.registry.records import Bucket, GroupBy, RankBy, UsageEvent, UsageQuery, UsageReport, UsageRow
from weft.registry.usage import query as usage_query
from weft.registry.usage import write as usage
from weft.registry.usage.prices import Price, PriceTable

pytestmark = pytest.mark.anyio
START, END = NOON - timedelta(hours=30, minutes=7), NOON + timedelta(hours=41, seconds=3)
PRICES = PriceTable(
    currency="EUR",
    default=Price(prompt=10**6 + 7, cached=3, completion=99_999),
    tenants={"b": Price(prompt=5, cached=5, completion=10**9)},
)
FIGURES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost")


async def _insert(database: Database, *events: UsageEvent) -> None:
    async with database.write() as session:
        await usage.insert_events(session, events)


async def _query(database: Database, prices: PriceTable | None = PRICES, **wanted: Any) -> UsageReport:
    async with database.read() as session:
        return await usage_query.query(session, UsageQuery(**{"start": START, "end": END, **wanted}), prices)


async def test_the_largest_groups_keep_their_rows_and_all_others_are_one(database: Database) -> None:
    sizes = {"a": 5, "b": 50, "c": 40, "d": 3}
    events = [
        usage_event(f"use_{name}_{hour}", at=NOON + timedelta(hours=hour), adapter_id=f"adp_{name}", adapter=name,
                    prompt_tokens=size * (hour + 1), completion_tokens=1)
        for name, size in sizes.items() for hour in (0, 1)
    ]  # fmt: skip
    await _insert(database, *events, usage_event("use_base", adapter_id=None, adapter=None, adapter_version=None))
    report = await _query(database, bucket="1h", group_by=("adapter",), top=2)
    seen = [(row.start.hour, row.adapter, row.adapter_id, row.other, row.prompt_tokens) for row in report.rows]
    assert seen == [
        (12, "acme/b", "adp_b", False, 50),
        (12, "acme/c", "adp_c", False, 40),
        (12, None, None, True, 5 + 3 + 10),
        (13, "acme/b", "adp_b", False, 100),
        (13, "acme/c", "adp_c", False, 80),
        (13, None, None, True, 10 + 6),
    ]
    assert report.groups == 5
    by_completion = await _query(database, group_by=("adapter",), top=1, rank_by="completion_tokens")
    assert [(row.adapter, row.other) for row in by_completion.rows] == [(None, False), (None, True)]
    assert by_completion.rows[0].completion_tokens == 20


async def test_where_all_groups_are_shown_there_are_no_others(database: Database) -> None:
    assert await _query(database, group_by=("key",), top=3) == UsageReport(
        rows=(), totals=usage_query._total([]), groups=0, next=None
    )
    await _insert(database, usage_event("use_1"), usage_event("use_2", key_id="key_2"))
    report = await _query(database, group_by=("key",), top=2)
    assert [(row.key_id, row.other) for row in report.rows] == [("key_1", False), ("key_2", False)]
    assert (await _query(database, group_by=("key",))).groups == report.groups == 2
    assert (await _query(database)).groups is None


async def test_cut_pages_tell_the_groups_and_totals_of_the_whole_range(database: Database) -> None:
    await _insert(
        database,
        *(usage_event(f"use_{n}", key_id=f"key_{n % 5}", at=NOON + timedelta(hours=n)) for n in range(10)),
    )
    whole = await _query(database, bucket="1h", group_by=("key", "adapter"))
    first = await _query(database, bucket="1h", group_by=("key", "adapter"), limit=7)
    second = await _query(database, bucket="1h", group_by=("key", "adapter"), limit=7, after=first.next)
    assert (*first.rows, *second.rows) == whole.rows
    assert {first.groups, second.groups, whole.groups} == {5}
    assert first.totals == second.totals == whole.totals
    assert whole.totals.cost > 0


async def test_more_rows_than_an_answer_holds_are_refused(database: Database) -> None:
    day = [usage_event(f"use_{n}", at=NOON + timedelta(minutes=n // 9), key_id=f"key_{n % 9}") for n in range(10_008)]
    await _insert(database, *day)
    with pytest.raises(InvalidRequestError, match="wider bucket, a shorter range or a smaller top"):
        await _query(database, bucket="1m", group_by=("key",), top=9)
    assert len((await _query(database, bucket="1m", group_by=("key",), top=7)).rows) == 8 * 1112
    assert len((await _query(database, bucket="1m", group_by=("key",), top=7, limit=1)).rows) == 8 * 1112


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"top": 2}, "group_by"),
        ({"top": 0, "group_by": ("key",)}, "top"),
        ({"top": 51, "group_by": ("key",)}, "top"),
        ({"top": 2, "group_by": ("key",), "after": "W10="}, "leave out after"),
        ({"top": 2, "group_by": ("key",), "rank_by": "colour"}, "rank_by takes"),
        ({"top": 2, "group_by": ("key",), "rank_by": "cost", "prices": None}, "no prices"),
        ({"tz": "Mars/Olympus"}, "tz"),
    ],
)
async def test_a_ranking_that_makes_no_sense_is_refused(database: Database, wanted: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        await _query(database, **wanted)


_EVENTS = st.lists(
    st.builds(
        usage_event,
        st.integers(0, 99).map(lambda number: f"use_{number}"),
        at=st.integers(-30 * 3600, 40 * 3600).map(lambda seconds: NOON + timedelta(seconds=seconds)),
        tenant=st.sampled_from(["a", "b"]),
        adapter_id=st.sampled_from([None, "adp_a", "adp_b", "adp_c"]),
        adapter_version=st.sampled_from([None, 1, 2]),
        key_id=st.sampled_from([None, "key_1", "key_2"]),
        status=st.sampled_from(["stop", "length", "error"]),
        prompt_tokens=st.sampled_from([4, 5, 1000]),
        completion_tokens=st.sampled_from([0, 1, 1000]),
    ).map(lambda event: usage_event(event.id, **{**_fields(event), "tenant_id": f"ten_{event.tenant}"})),
    max_size=30,
)


def _fields(event: UsageEvent) -> dict[str, Any]:
    return {name: getattr(event, name) for name in UsageEvent.__slots__ if name != "id"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=_EVENTS,
    bucket=st.sampled_from([None, "1h", "1d"]),
    group_by=st.sets(st.sampled_from(["tenant", "adapter", "version", "key", "status"]), min_size=1),
    top=st.integers(1, 4),
    rank_by=st.sampled_from(["requests", "prompt_tokens", "completion_tokens", "total_tokens", "cost"]),
    tz=st.sampled_from(["UTC", "America/New_York", "Asia/Kolkata"]),
)
async def test_folding_the_rows_of_all_groups_gives_the_same(
    database: Database,
    events: list[UsageEvent],
    bucket: Bucket | None,
    group_by: set[GroupBy],
    top: int,
    rank_by: RankBy,
    tz: str,
) -> None:
    async with database.write() as session:
        await session.execute(text("DELETE FROM usage_events"))
        await session.execute(text("DELETE FROM usage_rollups"))
    await _insert(database, *events)
    shape: dict[str, Any] = {
        "bucket": bucket,
        "group_by": tuple(filter(group_by.__contains__, get_args(GroupBy))),
        "tz": tz,
    }
    whole = await _query(database, **shape, limit=10_000)
    sizes: dict[tuple[object, ...], int] = defaultdict(int)
    for row in whole.rows:
        size = row.prompt_tokens + row.completion_tokens if rank_by == "total_tokens" else getattr(row, rank_by)
        sizes[_group(row)] += size
    ranked = sorted(sizes, key=lambda group: (-sizes[group], _stored(group)))
    shown = ranked[:top]
    expected: dict[tuple[datetime, int], list[int]] = {}
    for row in whole.rows:
        place = shown.index(_group(row)) if _group(row) in shown else top
        sums = expected.setdefault((row.start, place), [0] * len(FIGURES))
        for index, name in enumerate(FIGURES):
            sums[index] += getattr(row, name)
    report = await _query(database, **shape, top=top, rank_by=rank_by)
    found = {
        (row.start, top if row.other else shown.index(_group(row))): [getattr(row, name) for name in FIGURES]
        for row in report.rows
    }
    assert found == expected
    assert list(found) == sorted(expected)
    assert report.totals == whole.totals
    assert report.groups == whole.groups == len(sizes)


def _group(row: UsageRow) -> tuple[object, ...]:
    return row.tenant_id, row.adapter_id, row.version, row.key_id, row.status


def _stored(group: tuple[object, ...]) -> tuple[object, ...]:
    """Of equal groups the one with the smaller ids is first, as the database has them."""
    tenant_id, adapter_id, version, key_id, status = group
    return tenant_id or "", adapter_id or "", version or 0, key_id or "", status or ""
