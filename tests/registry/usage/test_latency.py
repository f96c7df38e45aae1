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
from sqlalchemy import select

from registry_samples import NOON, usage_event
from usage_sums import wrong_sums
from weft.errors import InvalidRequestError
from weft.registry.db.database import Database
from weft.registry.db.models import UsageLatencyRow
from weft.registry.records import LatencyReport, UsageEvent, UsageQuery
from weft.registry.usage import latency
from weft.registry.usage import write as usage
from weft.registry.usage.latency import BOUNDS_S, NO_TOKEN, PER_DECADE, bin_of, percentile

pytestmark = pytest.mark.anyio

WIDTH = 10 ** (1 / PER_DECADE)
AROUND_BOUNDS = [math.nextafter(bound, direction) for bound in BOUNDS_S for direction in (-math.inf, bound, math.inf)]
DAY = UsageQuery(start=NOON - timedelta(days=1), end=NOON + timedelta(days=1))


async def _insert(database: Database, *events: UsageEvent) -> None:
    async with database.write() as session:
        await usage.insert_events(session, events)


async def _query(database: Database, **wanted: Any) -> LatencyReport:
    async with database.read() as session:
        return await latency.query(session, replace(DAY, **wanted))


def _of_base(event: UsageEvent) -> UsageEvent:
    none: dict[str, Any] = dict.fromkeys(("adapter_id", "adapter", "adapter_version", "adapter_digest"))
    return replace(event, **none, adapter_state="base")


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
            ttft_s=numbers.choice((None, numbers.lognormvariate(-2, 1.5))),
        )
        events.append(_of_base(event) if numbers.random() < 0.2 else event)
    return events


def test_bins_are_equally_wide_and_hold_what_lies_between_their_bounds() -> None:
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (0.001, 1000.0)
    ratios = [high / low for low, high in pairwise(BOUNDS_S)]
    assert ratios == pytest.approx([WIDTH] * 120, rel=1e-5)
    assert [bin_of(seconds) for seconds in (None, -1.0, 0.0, 0.0009, 1e9)] == [NO_TOKEN, 0, 0, 0, 121]
    assert [bin_of(bound) for bound in BOUNDS_S] == list(range(1, 122))
    assert [bin_of(math.nextafter(bound, 0)) for bound in BOUNDS_S] == list(range(121))


async def test_every_time_is_counted_in_its_bin(database: Database) -> None:
    times = [*AROUND_BOUNDS, -1.0, 0.0, 1e-9, 1e9, None]
    await _insert(database, *(usage_event(f"use_{number}", ttft_s=ttft) for number, ttft in enumerate(times)))
    async with database.read() as session:
        counts = {row.bin: row.requests for row in await session.scalars(select(UsageLatencyRow))}
    assert counts == Counter(map(bin_of, times))
    assert counts.keys() == {NO_TOKEN, *range(122)}
    assert await wrong_sums(database) == 0


@given(st.lists(st.floats(0.001, 999.0), min_size=1, max_size=200), st.sampled_from((1, 50, 95, 99, 100)))
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


async def test_states_and_hit_rate_leave_base_and_unknown_apart_from_misses(database: Database) -> None:
    states = ["device"] * 3 + ["host", "stored", None]
    placed = [usage_event(f"use_{number}", adapter_state=state) for number, state in enumerate(states)]
    await _insert(database, *placed, *(_of_base(usage_event(f"use_base_{number}")) for number in range(4)))
    totals = (await _query(database)).totals
    assert totals.requests == 10
    assert totals.states == {"device": 3, "host": 1, "stored": 1, "base": 4, "unknown": 1}
    assert totals.hit_rate == 3 / 5
    base, support = (await _query(database, group_by=("adapter",))).rows
    assert (base.adapter, base.requests, base.hit_rate, base.states["base"]) == (None, 4, None, 4)
    assert (support.adapter, support.requests, support.hit_rate) == ("acme/support", 6, 3 / 5)


async def test_percentiles_are_those_of_the_requests_that_had_a_first_token(database: Database) -> None:
    times = [0.010] * 50 + [0.100] * 45 + [1.0] * 4 + [10.0] + [None] * 900
    await _insert(database, *(usage_event(f"use_{number}", ttft_s=ttft) for number, ttft in enumerate(times)))
    ttft_s = (await _query(database)).totals.ttft_s
    assert ttft_s is not None
    assert list(ttft_s) == ["p50", "p95", "p99"]
    for percent, exact in ((50, 0.010), (95, 0.100), (99, 1.0)):
        assert exact <= ttft_s[f"p{percent}"] <= exact * WIDTH * 1.001
    await _insert(database, usage_event("use_none", key_id="key_2", ttft_s=None))
    assert (await _query(database, key_ids=("key_2",))).totals.ttft_s is None


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
            DAY.start
            if width is None
            else datetime.min.replace(tzinfo=UTC) + ((event.at - datetime.min.replace(tzinfo=UTC)) // width * width)
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
    rows = {(row.start, row.tenant, named[row.adapter], row.version, row.key_id): row for row in report.rows}
    assert rows.keys() == expected.keys()
    assert [row.start for row in report.rows] == sorted(row.start for row in report.rows)
    for key, of_row in expected.items():
        row = rows[key]
        assert row.requests == len(of_row)
        assert row.states == {
            **dict.fromkeys(latency.STATES, 0),
            **Counter(e.adapter_state or "unknown" for e in of_row),
        }
        times = Counter(bin_of(event.ttft_s) for event in of_row)
        assert (row.ttft_s or {}) == {f"p{p}": s for p in latency.PERCENTS if (s := percentile(times, p)) is not None}
        assert row.end - row.start == (width or DAY.end - DAY.start)
    assert report.totals.requests == 400
    assert await wrong_sums(database) == 0


async def test_a_range_is_widened_to_whole_hours(database: Database) -> None:
    hour = timedelta(hours=1)
    moments = (NOON - timedelta(microseconds=1), NOON, NOON + hour - timedelta(microseconds=1), NOON + hour)
    await _insert(database, *(usage_event(f"use_{number}", at=at) for number, at in enumerate(moments)))
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


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"end": DAY.start}, "end"),
        ({"key_ids": ("nul\x00",)}, "key"),
    ],
)
async def test_questions_that_make_no_sense_are_refused(database: Database, wanted: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await _query(database, **wanted)
    assert caught.value.param == param


async def test_an_answer_that_would_be_too_long_is_refused(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "MAX_COUNTS", 3)
    await _insert(database, *(usage_event(f"use_{number}", key_id=f"key_{number}") for number in range(3)))
    assert len((await _query(database, group_by=("key",))).rows) == 3
    await _insert(database, usage_event("use_3", key_id="key_3"))
    with pytest.raises(InvalidRequestError, match="too long"):
        await _query(database, group_by=("key",))
    assert (await _query(database)).totals.requests == 4
