"""Usage events in SQL: what is stored, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import select

from manylora.errors import InvalidRequestError
from manylora.registry.db.database import Database
from manylora.registry.db.models import (
    UsageEventRow,
)
from manylora.registry.records import RETRIED, UsageEvent, UsageQuery
from manylora.registry.registry import Registry
from manylora.registry.usage import query as usage_query
from manylora.registry.usage import write as usage
from registry_samples import NOON, usage_event
from usage_sums import wrong_sums

pytestmark = pytest.mark.anyio

BY_KEY = UsageQuery(start=NOON - timedelta(days=2), end=NOON + timedelta(days=2), group_by=("key",))


async def test_the_summary_tells_all_use_and_the_last(database: Database) -> None:
    later = NOON + timedelta(hours=30)
    async with database.write() as session:
        first = [
            usage_event("use_1", at=later),
            usage_event("use_2"),
            usage_event("use_3", adapter_id=None),
        ]
        await usage.insert_events(session, first)
        await usage.insert_events(session, [usage_event("use_4", at=later - timedelta(minutes=1))])
        found = await usage.summary(session, ["adp_support", "adp_unused", ""])
    assert list(found) == ["adp_support"]
    assert (found["adp_support"].requests, found["adp_support"].last_used_at) == (3, later)


@pytest.mark.parametrize("batches", ["wo", "ow", "w o", "o w", "w o w o", "o o"])
@pytest.mark.parametrize("status", ["error", RETRIED])
async def test_an_event_that_overrules_counts_whoever_was_first(
    database: Database, batches: str, status: str
) -> None:
    """`o` overrules what `w`, another server, wrote under the same id; a space begins another transaction."""
    word = usage_event(
        "use_1", at=NOON - timedelta(hours=1), status="aborted", completion_tokens=13
    )
    tokens = {
        "prompt_tokens": 10 * (status == "error"),
        "cached_tokens": 0,
        "completion_tokens": 7 * (status == "error"),
    }
    over = usage_event("use_1", status=status, ttft_s=None, overrules=True, **tokens)
    for batch in batches.split():
        async with database.write() as session:
            events = [{"w": word, "o": over}[each] for each in batch]
            await usage.insert_events(session, [usage_event(f"use_{batch}"), *events])
    assert await wrong_sums(database) == 0
    async with database.read() as session:
        (row,) = await session.scalars(select(UsageEventRow).where(UsageEventRow.id == "use_1"))
        assert {name: getattr(row, name) for name in tokens} == tokens
        assert row.status == status
        for range_ in (
            BY_KEY,
            replace(BY_KEY, bucket="1h"),
            replace(BY_KEY, bucket="1m"),
        ):  # sums, both, events
            report = await usage_query.query(session, range_)
            assert report.totals.requests == len(set(batches.split())) + (status == "error")


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
        usage.checked_event(replace(usage_event("use_1"), **changes))


def test_the_clients_own_id_never_costs_an_event() -> None:
    checked = usage.checked_event(usage_event("use_1", request_id="\x00\ud800" + "x" * 999))
    assert checked.request_id == "\ufffd\ufffd" + "x" * 254


def test_times_of_any_zone_are_kept_in_utc() -> None:
    paris = timezone(timedelta(hours=2))
    checked = usage.checked_event(usage_event("use_1", at=datetime(2026, 5, 1, 14, tzinfo=paris)))
    assert checked.at == NOON
    assert checked.at.tzinfo is UTC


def _events(key_id: str | None, count: int) -> Iterator[UsageEvent]:
    """Of several hours, adapters and ends, so that each table has several rows of the key."""
    for number in range(count):
        yield usage_event(
            f"use_{key_id}_{number}",
            key_id=key_id,
            at=NOON + timedelta(minutes=40 * number),
            adapter_version=1 + number % 2,
            status=("stop", "aborted", "length")[number % 3],
        )


async def _requests(registry: Registry) -> dict[str | None, int]:
    return {row.key_id: row.requests for row in (await registry.usage.query(BY_KEY)).rows}
