from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import text

from registry_samples import NOON, usage_event
from weft.errors import InvalidRequestError
from weft.registry.db.database import Database
from weft.registry.records import UsageEvent, UsageQuery, UsageTotals
from weft.registry.usage import query as usage_query
from weft.registry.usage import write as usage

pytestmark = pytest.mark.anyio

DAY = UsageQuery(start=NOON - timedelta(days=1), end=NOON + timedelta(days=1))


async def _insert(database: Database, *events: UsageEvent) -> int:
    async with database.write() as session:
        return await usage.insert_events(session, events)


async def _differences(database: Database) -> int:
    async with database.read() as session:
        return await usage.count_differences(session)


async def test_an_event_counts_once_however_often_it_is_inserted(database: Database) -> None:
    event = usage_event("use_1")
    assert await _insert(database, event, event) == 1
    assert await _insert(database, event, usage_event("use_2"), usage_event("use_1", completion_tokens=999)) == 1
    assert await _insert(database) == 0
    expected = UsageTotals(requests=2, prompt_tokens=20, cached_tokens=8, completion_tokens=40)
    async with database.read() as session:
        for bucket in ("1m", None):
            assert (await usage_query.query(session, replace(DAY, bucket=bucket))).totals == expected
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
    async with database.write() as session:
        await session.execute(text("DELETE FROM usage_latency"))
    assert await _differences(database) == 3, "two hours more"


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
