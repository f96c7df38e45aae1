"""The page cuts time as the server does: hours and days of any zone, whatever its clocks do."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import Browser, Page

from browser import watched_page
from manylora.registry.usage.buckets import Buckets
from manylora_server import ManyloraServer

BUCKETS = """async ([zone, start, end, bucket]) => {
  const { bucketsBetween } = await import("/static/zone.js");
  return bucketsBetween(zone, start, end, bucket);
}"""
CHANGES = [
    ("America/New_York", date(2026, 3, 8)),
    ("America/New_York", date(2026, 11, 1)),
    ("Europe/Berlin", date(2026, 3, 29)),
    ("Europe/Berlin", date(2026, 10, 25)),
    ("Asia/Kolkata", date(2026, 3, 29)),
    ("Australia/Lord_Howe", date(2026, 4, 5)),
    ("Australia/Lord_Howe", date(2026, 10, 4)),
    ("America/Havana", date(2026, 11, 1)),  # has midnight twice
    ("America/Havana", date(2026, 3, 8)),  # has none
    ("Pacific/Apia", date(2011, 12, 30)),  # was left out
    ("America/Caracas", date(2016, 5, 1)),  # half an hour on, within an hour of the clock
]
"""Zones, and a day about which their clocks change, but for one that never does."""


@pytest.fixture(scope="module")
def bare(browser: Browser, server: ManyloraServer) -> Iterator[Page]:
    """A page that only lends its browser's clocks."""
    with watched_page(browser, server.url) as (page, _):
        page.goto("/")
        yield page


def millis(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def starts_in_server(zone: str, first: datetime, last: datetime, bucket: Any) -> list[int]:
    """The first moments of the server's buckets, found by asking for every minute which bucket it is in."""
    begin, end = (round(moment.timestamp()) * 1_000_000 for moment in (first, last))
    micros = range(begin, end, 60_000_000)
    buckets = Buckets.between(bucket, ZoneInfo(zone), micros[0], micros[-1])
    return sorted(
        millis(buckets.span(key)[0]) for key in {_key(buckets, micro) for micro in micros}
    )


def _key(buckets: Buckets, micro: int) -> int:
    """What `Buckets.key` makes of a moment in SQL."""
    offset = next(
        offset
        for begin, offset in reversed(buckets.pieces)
        if micro >= begin or begin == buckets.pieces[0][0]
    )
    width = {"1h": 3_600_000_000, "1d": 86_400_000_000}[str(buckets.bucket)]
    local = micro + offset
    return local // width * width if buckets.bucket == "1d" else micro - local % width


@pytest.mark.parametrize("bucket", ["1h", "1d"])
@pytest.mark.parametrize(("zone", "day"), CHANGES)
def test_buckets_start_where_those_of_the_server_do(
    bare: Page, zone: str, day: date, bucket: str
) -> None:
    midnight = datetime.combine(day - timedelta(days=2), time(), ZoneInfo(zone)).astimezone(UTC)
    first, last = midnight - timedelta(minutes=13), midnight + timedelta(days=5)
    shown = bare.evaluate(BUCKETS, [zone, millis(first), millis(last), bucket])
    assert shown == starts_in_server(zone, first, last, bucket)


RANGE = """async ([query, now]) => {
  history.replaceState(null, "", "/" + query);
  const place = await import("/static/place.js");
  place.open("/" + query, { replace: true });
  const { rangeShown } = await import("/static/range.js");
  return rangeShown("24h", now);
}"""


@pytest.mark.parametrize(
    ("query", "start", "end", "bucket"),
    [
        ("?range=1h", "2026-11-01T19:17", "2026-11-01T20:17", "1m"),
        (
            "?range=24h",
            "2026-10-31T21:00",
            "2026-11-01T20:17",
            "1h",
        ),  # a part of an hour makes no bar
        ("?range=7d", "2026-10-26T04:00", "2026-11-01T20:17", "1d"),
        ("?range=7d&bucket=1h", "2026-10-25T21:00", "2026-11-01T20:17", "1h"),
        ("?range=month", "2026-11-01T04:00", "2026-11-01T20:17", "1h"),
        ("?range=last-month", "2026-10-01T04:00", "2026-11-01T04:00", "1d"),
        ("?start=2026-11-01&end=2026-11-01", "2026-11-01T04:00", "2026-11-02T05:00", "1h"),
        ("?start=2026-03-07&end=2026-03-10", "2026-03-07T05:00", "2026-03-11T04:00", "1d"),
        (
            "?start=2026-03-10&end=2026-03-07",
            "2026-10-31T21:00",
            "2026-11-01T20:17",
            "1h",
        ),  # makes no sense
        (
            "?range=90d&bucket=1m",
            "2026-08-04T04:00",
            "2026-11-01T20:17",
            "1d",
        ),  # too many for a chart
    ],
)
def test_ranges_of_new_york_on_the_day_its_clocks_go_back(
    bare: Page, query: str, start: str, end: str, bucket: str
) -> None:
    now = millis(datetime(2026, 11, 1, 20, 16, 30, tzinfo=UTC))
    shown = bare.evaluate(RANGE, [f"{query}&tz=America/New_York", now])
    moments = [
        datetime.fromtimestamp(shown[name] / 1000, UTC).strftime("%Y-%m-%dT%H:%M")
        for name in ("start", "end")
    ]
    assert (*moments, shown["bucket"]) == (start, end, bucket)
    assert shown["previous"] == {"start": 2 * shown["start"] - shown["end"], "end": shown["start"]}
    assert shown["isNow"] == (end == "2026-11-01T20:17" or end > "2026-11-01T20:17")
