from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from registry_samples import NOON, usage_event
from weft.errors import InvalidRequestError
from weft.registry.db.database import Database
from weft.registry.records import Bucket, UsageQuery, UsageRow
from weft.registry.usage import query as usage_query
from weft.registry.usage import write as usage
from weft.registry.usage.buckets import zone

pytestmark = pytest.mark.anyio
TICK = timedelta(microseconds=1)
HOUR = timedelta(hours=1)

CHANGES = {
    "UTC": datetime(2026, 3, 1, 0, tzinfo=UTC),
    "America/New_York": datetime(2026, 11, 1, 6, tzinfo=UTC),
    "Europe/Berlin": datetime(2026, 3, 29, 1, tzinfo=UTC),
    "Asia/Kolkata": datetime(2026, 5, 1, 18, 30, tzinfo=UTC),  # a midnight: nothing changes there
    "Asia/Kathmandu": datetime(2026, 5, 1, 18, 15, tzinfo=UTC),
    "Australia/Adelaide": datetime(2026, 4, 4, 16, 30, tzinfo=UTC),
    "America/St_Johns": datetime(2026, 3, 8, 5, 30, tzinfo=UTC),
    "Australia/Lord_Howe": datetime(2026, 4, 4, 15, tzinfo=UTC),  # by half an hour
    "Africa/Casablanca": datetime(2026, 3, 22, 2, tzinfo=UTC),
    "America/Santiago": datetime(2026, 9, 6, 4, tzinfo=UTC),  # skips midnight
    "Africa/Cairo": datetime(2026, 10, 29, 21, tzinfo=UTC),  # back across midnight
    "Pacific/Apia": datetime(2011, 12, 30, 10, tzinfo=UTC),  # a day that never was
}
"""A moment in which the zone's clocks change, or a midnight."""


async def _rows(
    database: Database, tz: str, bucket: Bucket, start: datetime, end: datetime, limit: int = 10_000
) -> list[UsageRow]:
    rows: list[UsageRow] = []
    after = None
    while True:
        wanted = UsageQuery(start=start, end=end, bucket=bucket, tz=tz, limit=limit, after=after)
        async with database.read() as session:
            page = await usage_query.query(session, wanted)
        rows += page.rows
        after = page.next
        if after is None:
            return rows


@pytest.mark.parametrize("bucket", ["1m", "1h", "1d"])
@pytest.mark.parametrize("tz", CHANGES)
async def test_every_event_is_in_the_row_of_its_hour_and_day(database: Database, tz: str, bucket: Bucket) -> None:
    change, rng = CHANGES[tz], random.Random(tz)
    near = [change + TICK * n for n in (-1, 0, 1)]
    whole = [change.replace(minute=0) + HOUR * n - TICK * late for n in range(-50, 50) for late in (0, 1)]
    spread = [change + timedelta(seconds=rng.uniform(-180_000, 180_000)) for _ in range(100)]
    times = sorted({*near, *whole, *spread})
    async with database.write() as session:
        await usage.insert_events(session, [usage_event(f"use_{n}", at=at) for n, at in enumerate(times)])
    start, end = change - timedelta(hours=47, minutes=11), change + timedelta(hours=44, seconds=7)
    rows = await _rows(database, tz, bucket, start, end, limit=3)
    counted = [at for at in times if start <= at < end]
    assert sum(row.requests for row in rows) == len(counted)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        assert row.requests == sum(row.start <= at < row.end for at in counted)
        assert following is None or row.end <= following.start
    home = ZoneInfo(tz)
    if bucket == "1d":
        for row in rows:
            day = row.start.astimezone(home).date()
            assert (row.end - TICK).astimezone(home).date() == day
            assert (row.start - TICK).astimezone(home).date() < day < row.end.astimezone(home).date()
    if bucket == "1h":
        begins = [row.start for row in rows if row.start.astimezone(home).minute]
        assert begins in ([], [change])
        assert all(row.end - row.start == HOUR for row in rows if change not in (row.start, row.end))


@pytest.mark.parametrize(
    ("day", "hours"),
    [(datetime(2026, 3, 8), 23), (datetime(2026, 11, 1), 25), (datetime(2026, 5, 1), 24)],  # noqa: DTZ001
)
async def test_days_on_which_clocks_change_have_23_and_25_hours(database: Database, day: datetime, hours: int) -> None:
    home = ZoneInfo("America/New_York")
    noon = day.replace(hour=12, tzinfo=home).astimezone(UTC)
    async with database.write() as session:
        await usage.insert_events(session, [usage_event(f"use_{n}", at=noon + HOUR * n) for n in range(-24, 25)])
    rows = await _rows(database, "America/New_York", "1d", noon - HOUR, noon + HOUR)
    assert [(row.start, row.end - row.start) for row in rows] == [
        (day.replace(tzinfo=home).astimezone(UTC), HOUR * hours)
    ]
    whole = await _rows(database, "America/New_York", "1d", rows[0].start, rows[0].end)
    assert [row.requests for row in whole] == [hours]
    by_hour = await _rows(database, "America/New_York", "1h", rows[0].start, rows[0].end)
    assert [row.start for row in by_hour] == [rows[0].start + HOUR * n for n in range(hours)]


async def test_without_a_bucket_the_zone_changes_nothing(database: Database) -> None:
    async with database.write() as session:
        await usage.insert_events(session, [usage_event("use_1")])
    wanted = UsageQuery(start=NOON - HOUR, end=NOON + HOUR, group_by=("adapter",))
    async with database.read() as session:
        plain = await usage_query.query(session, wanted)
        zoned = await usage_query.query(
            session, UsageQuery(start=NOON - HOUR, end=NOON + HOUR, group_by=("adapter",), tz="Asia/Kolkata")
        )
    assert plain == zoned


@pytest.mark.parametrize(
    "name", ["", "Mars/Olympus", "America", "../UTC", "/etc/passwd", "UTC\x00", "x" * 65, "tzdata.zi", "."]
)
def test_a_zone_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^tz "):
        zone(name)
