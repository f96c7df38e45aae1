from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from registry_samples import NOON, usage_event
from weft.errors import InvalidRequestError
from weft.registry.db.clock import to_micros
from weft.registry.db.database import Database
from weft.registry.records import Bucket, GroupBy, UsageEvent, UsageQuery, UsageReport, UsageRow, UsageTotals
from weft.registry.usage import query as usage_query
from weft.registry.usage import write as usage
from weft.registry.usage.prices import UNITS, Price, PriceTable, in_currency
from weft.registry.usage.query import list_events

pytestmark = pytest.mark.anyio

DAY = UsageQuery(start=NOON - timedelta(days=1), end=NOON + timedelta(days=1))


async def _insert(database: Database, *events: UsageEvent) -> int:
    async with database.write() as session:
        return await usage.insert_events(session, events)


async def _query(database: Database, **wanted: Any) -> UsageReport:
    defaults: dict[str, Any] = {"start": DAY.start, "end": DAY.end}
    async with database.read() as session:
        return await usage_query.query(session, UsageQuery(**{**defaults, **wanted}))


async def _differences(database: Database) -> int:
    async with database.read() as session:
        return await usage.count_differences(session)


async def test_an_event_counts_once_however_often_it_is_inserted(database: Database) -> None:
    event = usage_event("use_1")
    assert await _insert(database, event, event) == 1
    assert await _insert(database, event, usage_event("use_2"), usage_event("use_1", completion_tokens=999)) == 1
    assert await _insert(database) == 0
    expected = UsageTotals(requests=2, prompt_tokens=20, cached_tokens=8, completion_tokens=40)
    assert (await _query(database)).totals == expected
    assert (await _query(database, bucket="1m")).totals == expected
    assert await _differences(database) == 0


async def test_sums_that_drifted_are_noticed(database: Database) -> None:
    await _insert(database, usage_event("use_1"), usage_event("use_2", at=NOON + timedelta(hours=2)))
    async with database.write() as session:
        await session.execute(text("UPDATE usage_rollups SET completion_tokens = completion_tokens + 1"))
    assert await _differences(database) == 2, "two hours; the sum of the adapter agrees with its events"
    async with database.write() as session:
        await session.execute(text("UPDATE usage_rollups SET completion_tokens = completion_tokens - 1"))
        await session.execute(text("UPDATE usage_adapters SET requests = requests + 1"))
    assert await _differences(database) == 1


async def test_without_usage_there_are_no_rows_and_zero_totals(database: Database) -> None:
    for bucket in (None, "1m", "1h", "1d"):
        report = await _query(database, bucket=bucket, group_by=("adapter",))
        assert (report.rows, report.totals, report.next) == ((), UsageTotals(), None)


async def test_one_span_covers_the_range_when_there_is_no_bucket(database: Database) -> None:
    await _insert(database, usage_event("use_1"))
    (row,) = (await _query(database)).rows
    assert (row.start, row.end, row.tenant, row.adapter, row.key_id) == (DAY.start, DAY.end, None, None, None)


@pytest.mark.parametrize(
    ("bucket", "start", "end"),
    [
        ("1m", datetime(2026, 5, 1, 12, 34, tzinfo=UTC), datetime(2026, 5, 1, 12, 35, tzinfo=UTC)),
        ("1h", datetime(2026, 5, 1, 12, tzinfo=UTC), datetime(2026, 5, 1, 13, tzinfo=UTC)),
        ("1d", datetime(2026, 5, 1, tzinfo=UTC), datetime(2026, 5, 2, tzinfo=UTC)),
    ],
)
async def test_buckets_begin_at_whole_minutes_hours_and_days(
    database: Database, bucket: Bucket, start: datetime, end: datetime
) -> None:
    await _insert(database, usage_event("use_1", at=NOON + timedelta(minutes=34, seconds=56, microseconds=7)))
    (row,) = (await _query(database, bucket=bucket)).rows
    assert (row.start, row.end) == (start, end)


async def test_start_counts_and_end_does_not(database: Database) -> None:
    at = NOON + timedelta(minutes=5, microseconds=1)
    await _insert(database, usage_event("use_1", at=at))
    tick = timedelta(microseconds=1)
    for bucket in (None, "1m", "1h", "1d"):
        counted = [
            (await _query(database, start=start, end=end, bucket=bucket)).totals.requests
            for start, end in ((at, at + tick), (at - tick, at), (at + tick, at + timedelta(hours=5)))
        ]
        assert counted == [1, 0, 0]


async def test_rows_say_what_they_are_grouped_by(database: Database) -> None:
    await _insert(
        database,
        usage_event("use_1"),
        usage_event("use_2", adapter_version=2),
        usage_event("use_3", adapter_id=None, adapter=None, adapter_version=None, adapter_digest=None),
        usage_event("use_4", tenant_id=None, tenant=None, key_id=None),
    )
    report = await _query(database, group_by=("tenant", "version", "key"))
    assert [(row.tenant, row.tenant_id, row.adapter, row.version, row.key_id) for row in report.rows] == [
        (None, None, "support", 1, None),
        ("acme", "ten_acme", None, None, "key_1"),
        ("acme", "ten_acme", "support", 1, "key_1"),
        ("acme", "ten_acme", "support", 2, "key_1"),
    ]
    by_adapter = await _query(database, group_by=("adapter",))
    assert [(row.adapter, row.adapter_id, row.requests) for row in by_adapter.rows] == [
        (None, None, 1),
        ("acme/support", "adp_support", 3),
    ]
    assert {row.tenant for row in by_adapter.rows} == {None}


async def test_filters_leave_out_the_rest_of_rows_and_totals(database: Database) -> None:
    await _insert(
        database,
        usage_event("use_1"),
        usage_event("use_2", tenant_id="ten_b", tenant="b", key_id="key_2"),
        usage_event("use_3", adapter_id=None, adapter=None, adapter_version=None),
    )
    for wanted, requests in (
        ({"tenant_id": "ten_b"}, 1),
        ({"tenant_id": "ten_acme"}, 2),
        ({"adapters": ("support",)}, 2),
        ({"adapters": ("b/support", "")}, 2),
        ({"tenant_id": "ten_acme", "adapters": ("b/support",)}, 0),
        ({"adapters": ("",)}, 1),
        ({"key_ids": ("key_2", "key_3")}, 1),
        ({"tenant_id": "ten_nobody"}, 0),
        ({"tenant_id": ""}, 0),
    ):
        for bucket in ("1m", "1h"):
            assert (await _query(database, bucket=bucket, **wanted)).totals.requests == requests


async def test_usage_of_a_deleted_adapter_stays_apart_from_its_successor(database: Database) -> None:
    await _insert(database, usage_event("use_1"), usage_event("use_2", adapter_id="adp_new"))
    report = await _query(database, group_by=("adapter",), adapters=("support",))
    assert [(row.adapter, row.requests) for row in report.rows] == [("acme/support", 1)] * 2


async def test_pages_give_every_row_once_and_totals_stay_whole(database: Database) -> None:
    events = [
        usage_event(f"use_{i}", at=NOON + timedelta(minutes=i % 7), key_id=f"key_{i % 5}", completion_tokens=i)
        for i in range(40)
    ]
    await _insert(database, *events)
    whole = await _query(database, bucket="1m", group_by=("key", "tenant"))
    rows: list[UsageRow] = []
    after = None
    while True:
        page = await _query(database, bucket="1m", group_by=("key", "tenant"), after=after, limit=4)
        rows += page.rows
        assert page.totals == whole.totals
        if page.next is None:
            break
        after = page.next
    assert tuple(rows) == whole.rows
    assert len(rows) == 35


async def test_paging_works_without_buckets_too(database: Database) -> None:
    await _insert(database, *(usage_event(f"use_{i}", key_id=f"key_{i}") for i in range(3)))
    first = await _query(database, group_by=("key",), limit=2)
    second = await _query(database, group_by=("key",), limit=2, after=first.next)
    assert [row.key_id for row in (*first.rows, *second.rows)] == ["key_0", "key_1", "key_2"]


@pytest.mark.parametrize(
    "wanted",
    [
        {"start": NOON, "end": NOON},
        {"start": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"end": datetime(2027, 1, 1)},  # noqa: DTZ001
        {"bucket": "1w"},
        {"group_by": ("tenant", "colour")},
        {"limit": 0},
        {"limit": 10_001},
        {"adapters": ("a\x00",)},
        {"versions": (-1,)},
        {"statuses": ("x",) * 101},
        {"tenant_id": "\ud800"},
        {"after": "garbage"},
        {"after": ""},
        {"after": "W10="},
        {"after": "WyJ4Il0="},
        {"after": "WzFlOTk5OV0="},
        {"after": "WzEwMDAwMDAwMDAwMDAwMDAwMDAwXQ=="},
        {"after": "é"},
    ],
)
async def test_a_question_that_makes_no_sense_is_refused(database: Database, wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        await _query(database, **wanted)


async def test_a_cursor_with_text_is_checked(database: Database) -> None:
    cursor = usage_query._write_cursor([0, "a\x00"])
    with pytest.raises(InvalidRequestError):
        await _query(database, group_by=("key",), after=cursor)


async def test_the_summary_tells_all_use_and_the_last(database: Database) -> None:
    later = NOON + timedelta(hours=30)
    await _insert(database, usage_event("use_1", at=later), usage_event("use_2"), usage_event("use_3", adapter_id=None))
    await _insert(database, usage_event("use_4", at=later - timedelta(minutes=1)))
    async with database.read() as session:
        found = await usage.summary(session, ["adp_support", "adp_unused", ""])
    assert list(found) == ["adp_support"]
    assert (found["adp_support"].requests, found["adp_support"].last_used_at) == (3, later)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": ""},
        {"id": "x" * 65},
        {"status": "a\x00"},
        {"tenant": "\ud800"},
        {"prompt_tokens": -1},
        {"cached_tokens": 1 << 41},
        {"completion_tokens": 1.0},
        {"completion_tokens": True},
        {"adapter_version": 0},
        {"adapter_version": 1 << 31},
        {"ttft_s": math.nan},
        {"duration_s": math.inf},
        {"at": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"at": datetime(1970, 1, 1, tzinfo=UTC)},
    ],
)
def test_an_event_that_cannot_be_stored_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        usage.checked_event(usage_event(**{"event_id": "use_1", **_renamed(changes)}))


def _renamed(changes: dict[str, Any]) -> dict[str, Any]:
    return {"event_id" if name == "id" else name: value for name, value in changes.items()}


def test_the_clients_own_id_never_costs_an_event() -> None:
    checked = usage.checked_event(usage_event("use_1", request_id="\x00\ud800" + "x" * 999))
    assert checked.request_id == "\ufffd\ufffd" + "x" * 254


def test_times_of_any_zone_are_kept_in_utc() -> None:
    paris = timezone(timedelta(hours=2))
    checked = usage.checked_event(usage_event("use_1", at=datetime(2026, 5, 1, 14, tzinfo=paris)))
    assert checked.at == NOON
    assert checked.at.tzinfo is UTC


_EVENTS = st.lists(
    st.builds(
        usage_event,
        st.integers(0, 30).map(lambda number: f"use_{number}"),
        at=st.integers(0, 3 * 86_400).map(lambda seconds: NOON + timedelta(seconds=seconds, microseconds=seconds % 3)),
        tenant_id=st.sampled_from([None, "ten_a", "ten_b"]),
        adapter_id=st.sampled_from([None, "adp_a", "adp_b"]),
        adapter_version=st.sampled_from([None, 1, 2]),
        key_id=st.sampled_from([None, "key_1"]),
        prompt_tokens=st.integers(0, 1 << 40),
        completion_tokens=st.integers(0, 1000),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(_EVENTS, max_size=3),
    start=st.integers(0, 3 * 86_400),
    length=st.integers(1, 2 * 86_400),
    bucket=st.sampled_from([None, "1m", "1h", "1d"]),
    group_by=st.sets(st.sampled_from(["tenant", "adapter", "version", "key"])),
    tenant_id=st.sampled_from([None, "ten_a"]),
)
async def test_any_range_and_grouping_equals_a_plain_count(
    database: Database,
    batches: list[list[UsageEvent]],
    start: int,
    length: int,
    bucket: Bucket | None,
    group_by: set[GroupBy],
    tenant_id: str | None,
) -> None:
    async with database.write() as session:
        for table in ("usage_events", "usage_rollups", "usage_latency", "usage_adapters"):
            await session.execute(text(f"DELETE FROM {table}"))
    events: dict[str, UsageEvent] = {}
    for batch in batches:
        await _insert(database, *batch)
        for event in batch:
            events.setdefault(event.id, event)
    span = {"start": NOON + timedelta(seconds=start), "end": NOON + timedelta(seconds=start + length)}
    report = await _query(database, **span, bucket=bucket, group_by=tuple(group_by), tenant_id=tenant_id, limit=10_000)
    counted = [
        event
        for event in events.values()
        if span["start"] <= event.at < span["end"] and tenant_id in (None, event.tenant_id)
    ]
    expected: Counter[tuple[object, ...]] = Counter()
    for event in counted:
        expected[_group(event, bucket, span["start"], group_by)] += event.prompt_tokens * 1000 + event.completion_tokens
    found = {
        (row.start, row.tenant_id, row.adapter_id, row.version, row.key_id): row.prompt_tokens * 1000
        + row.completion_tokens
        for row in report.rows
    }
    assert found == dict(expected)
    assert report.totals.requests == len(counted) == sum(row.requests for row in report.rows)
    assert report.totals.prompt_tokens == sum(event.prompt_tokens for event in counted)
    assert await _differences(database) == 0


def _group(event: UsageEvent, bucket: Bucket | None, start: datetime, group_by: set[GroupBy]) -> tuple[object, ...]:
    width = {None: 0, "1m": 60, "1h": 3600, "1d": 86_400}[bucket] * 1_000_000
    seen = start if bucket is None else event.at - timedelta(microseconds=to_micros(event.at) % width)
    return (
        seen,
        event.tenant_id if "tenant" in group_by else None,
        event.adapter_id if group_by & {"adapter", "version"} else None,
        event.adapter_version if "version" in group_by else None,
        event.key_id if "key" in group_by else None,
    )


PRICES = PriceTable(
    currency="EUR",
    default=Price(prompt=2, cached=1, completion=10),
    base=Price(prompt=1, cached=0, completion=1),
    tenants={"b": Price(prompt=7, cached=7, completion=7)},
    adapters={("b", "dear"): Price(prompt=100, cached=100, completion=100)},
)


async def test_cost_is_that_of_the_closest_price_and_adds_up(database: Database) -> None:
    base = {"adapter_id": None, "adapter": None, "adapter_version": None}
    await _insert(
        database,
        usage_event("use_1"),  # 10 prompt tokens, 4 of them cached, 20 completion tokens
        usage_event("use_2", **base),
        usage_event("use_3", tenant_id="ten_b", tenant="b"),
        usage_event("use_4", tenant_id="ten_b", tenant="b", **base),
        usage_event("use_5", tenant_id="ten_b", tenant="b", adapter_id="adp_dear", adapter="dear"),
        usage_event("use_6", at=NOON + timedelta(hours=1)),
    )
    expected = {("acme", "support"): 2 * 216, ("acme", None): 26, ("b", "support"): 210, ("b", None): 210}
    expected["b", "dear"] = 3000
    for bucket in ("1m", "1h", None):
        async with database.read() as session:
            wanted = UsageQuery(start=DAY.start, end=DAY.end, bucket=bucket, group_by=("tenant", "adapter"))
            report = await usage_query.query(session, wanted, PRICES)
        found: Counter[tuple[str | None, str | None]] = Counter()
        for row in report.rows:
            found[row.tenant, row.adapter] += row.cost
        assert found == expected
        assert report.totals.cost == sum(expected.values())
    assert (await _query(database)).totals.cost == 0


async def test_a_large_bill_in_a_small_currency_is_exact(database: Database) -> None:
    tokens = {"prompt_tokens": usage.MAX_TOKENS, "cached_tokens": 0, "completion_tokens": 1}
    await _insert(database, *(usage_event(f"use_{number}", **tokens) for number in range(3)))
    dear = PriceTable(currency="VND", default=Price(prompt=10**10, cached=0, completion=123_456_789))
    async with database.read() as session:
        report = await usage_query.query(session, UsageQuery(start=DAY.start, end=DAY.end), dear)
    assert report.totals.cost == 3 * (usage.MAX_TOKENS * 10**10 + 123_456_789)
    assert [row.cost for row in report.rows] == [report.totals.cost]


def test_a_cost_is_shown_exactly() -> None:
    shown = {0: "0", UNITS: "1", 10 * UNITS: "10", UNITS // 2: "0.5", 1: "0.0000000001", 3 * UNITS + 20: "3.000000002"}
    assert {units: in_currency(units) for units in shown} == shown


async def test_status_tells_rows_apart_and_filters(database: Database) -> None:
    await _insert(
        database,
        *(usage_event(f"use_{n}", status=status) for n, status in enumerate(["stop", "aborted", "stop"])),
        usage_event("use_9", adapter_version=2, status="error"),
    )
    rows = (await _query(database, group_by=("status",))).rows
    assert {row.status: row.requests for row in rows} == {"stop": 2, "aborted": 1, "error": 1}
    assert (await _query(database, statuses=("stop", "error"))).totals.requests == 3
    assert (await _query(database, versions=(2,))).totals.requests == 1
    assert await _differences(database) == 0


async def test_events_come_one_by_one_in_pages_with_the_same_filters(database: Database) -> None:
    made = [
        usage_event("use_b", at=NOON),
        usage_event("use_a", at=NOON),
        usage_event("use_c", at=NOON + timedelta(seconds=1), status="error", queue_s=None, adapter_state=None),
        usage_event("use_d", at=NOON + timedelta(seconds=2), adapter_id=None, adapter=None, adapter_version=None),
    ]
    await _insert(database, *made)
    found: list[UsageEvent] = []
    after: str | None = None
    while True:
        async with database.read() as session:
            page = await list_events(session, UsageQuery(start=DAY.start, end=DAY.end, after=after, limit=1))
        found += page.items
        after = page.next
        if after is None:
            break
    assert found == [made[1], made[0], made[2], made[3]]
    async with database.read() as session:
        assert (await list_events(session, UsageQuery(start=DAY.start, end=DAY.end, statuses=("error",)))).items == (
            made[2],
        )
        for cursor in ("x", "1", "99999999999999999999-a", "\x00"):
            with pytest.raises(InvalidRequestError):
                await list_events(session, UsageQuery(start=DAY.start, end=DAY.end, after=cursor))
