from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.errors import InvalidRequestError
from manylora.registry.db.database import Database
from manylora.registry.records import LatencyFigures, LatencyReport, UsageEvent, UsageQuery
from manylora.registry.usage import latency
from manylora.registry.usage import write as usage
from manylora.registry.usage.latency import BOUNDS_S, NO_TOKEN, PER_DECADE, bin_of, percentile
from registry_samples import NOON, usage_event
from usage_sums import wrong_sums

pytestmark = pytest.mark.anyio

WIDTH = 10 ** (1 / PER_DECADE)
OF_BASE: dict[str, Any] = {
    "adapter_id": None,
    "adapter": None,
    "adapter_version": None,
    "adapter_state": "base",
}
DAY = UsageQuery(start=NOON - timedelta(days=1), end=NOON + timedelta(days=1))


async def _insert(database: Database, *events: UsageEvent) -> None:
    async with database.write() as session:
        await usage.insert_events(session, events)


async def _query(database: Database, **wanted: Any) -> LatencyReport:
    async with database.read() as session:
        return await latency.query(session, replace(DAY, **wanted))


def _random_events(count: int, seed: int = 3) -> list[UsageEvent]:
    numbers = random.Random(seed)
    events = []
    for number in range(count):
        event = usage_event(
            f"use_{number}",
            at=NOON + timedelta(seconds=numbers.uniform(-80_000, 80_000)),
            tenant_id=f"ten_{number % 2}",
            tenant=f"tenant{number % 2}",
            key_id=f"key_{numbers.randrange(3)}",
            adapter_version=numbers.randint(1, 2),
            adapter_state=numbers.choice(("device", "device", "host", "stored", None)),
            ttft_s=numbers.choice(
                (None, numbers.lognormvariate(-2, 1.5), numbers.choice((-1.0, 0.0, 1e9, *BOUNDS_S)))
            ),
        )
        events.append(replace(event, **OF_BASE) if numbers.random() < 0.2 else event)
    return events


def _figures(row: LatencyFigures) -> tuple[object, ...]:
    return row.requests, dict(row.states), row.hit_rate, row.ttft_s and dict(row.ttft_s)


def _counted(events: list[UsageEvent]) -> tuple[object, ...]:
    """The figures of these events: neither the base nor an adapter that was not looked up is a hit or a miss."""
    states = Counter(event.adapter_state or "unknown" for event in events)
    placed = states["device"] + states["host"] + states["stored"]
    times = Counter(bin_of(event.ttft_s) for event in events)
    percentiles = {
        name: percentile(times, percent)
        for name, percent in (("p50", 50), ("p95", 95), ("p99", 99))
    }
    return (
        len(events),
        {**dict.fromkeys(latency.STATES, 0), **states},
        states["device"] / placed if placed else None,
        percentiles if times.keys() - {NO_TOKEN} else None,
    )


def test_bins_are_equally_wide_and_hold_what_lies_between_their_bounds() -> None:
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (0.001, 1000.0)
    ratios = [high / low for low, high in pairwise(BOUNDS_S)]
    assert ratios == pytest.approx([WIDTH] * 120, rel=1e-5)
    assert [bin_of(seconds) for seconds in (None, -1.0, 0.0, 0.0009, 1e9)] == [
        NO_TOKEN,
        0,
        0,
        0,
        121,
    ]
    assert [bin_of(bound) for bound in BOUNDS_S] == list(range(1, 122))
    assert [bin_of(math.nextafter(bound, 0)) for bound in BOUNDS_S] == list(range(121))


@given(
    st.lists(st.floats(0.001, 999.0), min_size=1, max_size=200),
    st.sampled_from((1, 50, 95, 99, 100)),
)
def test_a_percentile_is_at_most_a_bin_off(seconds: list[float], percent: int) -> None:
    found = percentile(Counter(map(bin_of, seconds)), percent)
    exact = float(np.quantile(seconds, percent / 100, method="inverted_cdf"))
    assert found is not None
    assert exact / WIDTH * 0.999 < found < exact * WIDTH * 1.001


def test_percentiles_need_a_first_token_and_end_with_the_bins() -> None:
    assert percentile({}, 50) is None
    assert percentile({NO_TOKEN: 7, 5: 0}, 50) is None
    assert percentile({NO_TOKEN: 7, 0: 1}, 50) == 0.001
    assert percentile({121: 1}, 50) == 1000.0
    assert percentile({41: 1}, 100) == pytest.approx(BOUNDS_S[41])


@pytest.mark.no_cover
@pytest.mark.parametrize("bucket", [None, "1h", "1d"])
@pytest.mark.parametrize("group_by", [(), ("adapter",), ("tenant", "version", "key")])
async def test_rows_agree_with_the_events_they_are_made_of(
    database: Database, bucket: str | None, group_by: tuple[Any, ...]
) -> None:
    events = _random_events(400)
    await _insert(database, *events)
    width = {None: None, "1h": timedelta(hours=1), "1d": timedelta(days=1)}[bucket]
    expected: dict[tuple[Any, ...], list[UsageEvent]] = {}
    for event in events:
        start = (
            NOON.replace(hour=0) + (event.at - NOON.replace(hour=0)) // width * width
            if width
            else DAY.start
        )
        values = {
            "tenant": event.tenant,
            "adapter": event.adapter if {"adapter", "version"} & set(group_by) else None,
            "version": event.adapter_version,
            "key": event.key_id,
        }
        names = [values[name] if name in group_by or name == "adapter" else None for name in values]
        expected.setdefault((start, *names), []).append(event)
    report = await _query(database, bucket=bucket, group_by=group_by)
    # One adapter of several tenants, which no server makes: which of them the name tells is left out here.
    named = {row.adapter: row.adapter and row.adapter.rpartition("/")[2] for row in report.rows}
    rows = {
        (row.start, row.tenant, named[row.adapter], row.version, row.key_id): row
        for row in report.rows
    }
    assert rows.keys() == expected.keys()
    assert [row.start for row in report.rows] == sorted(row.start for row in report.rows)
    for key, of_row in expected.items():
        row = rows[key]
        assert _figures(row) == _counted(of_row)
        assert row.end - row.start == (width or DAY.end - DAY.start)
    assert _figures(report.totals) == _counted(events)
    assert await wrong_sums(database) == 0


async def test_a_range_is_widened_to_whole_hours(database: Database) -> None:
    hour = timedelta(hours=1)
    moments = (
        NOON - timedelta(microseconds=1),
        NOON,
        NOON + hour - timedelta(microseconds=1),
        NOON + hour,
    )
    await _insert(
        database, *(usage_event(f"use_{number}", at=at) for number, at in enumerate(moments))
    )
    for start, end in (
        (NOON, NOON + hour),
        (NOON + timedelta(minutes=59), NOON + hour),
        (NOON, NOON + timedelta(microseconds=1)),
    ):
        report = await _query(database, start=start, end=end)
        assert (report.start, report.end, report.totals.requests) == (NOON, NOON + hour, 2)
        assert [(row.start, row.end) for row in report.rows] == [(NOON, NOON + hour)]
    ages = {"start": datetime.min.replace(tzinfo=UTC), "end": datetime.max.replace(tzinfo=UTC)}
    assert (await _query(database, **ages)).totals.requests == 4


async def test_a_question_that_makes_no_sense_is_refused(database: Database) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await _query(database, end=DAY.start)
    assert caught.value.param == "end"


async def test_an_answer_that_would_be_too_long_is_refused(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "MAX_COUNTS", 3)
    await _insert(
        database, *(usage_event(f"use_{number}", key_id=f"key_{number}") for number in range(3))
    )
    assert len((await _query(database, group_by=("key",))).rows) == 3
    await _insert(database, usage_event("use_3", key_id="key_3"))
    with pytest.raises(InvalidRequestError, match="too long"):
        await _query(database, group_by=("key",))
    assert (await _query(database)).totals.requests == 4
