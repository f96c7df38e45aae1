"""Usage events in SQL: what is stored, what is refused, and what is erased."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from registry_samples import NOON, StandingClock, usage_event
from usage_sums import wrong_sums
from weft.errors import CapacityError, InvalidRequestError
from weft.registry.db.database import Database
from weft.registry.db.models import UsageAdapterRow, UsageEventRow, UsageLatencyRow, UsageRollupRow
from weft.registry.records import UsageEvent, UsageQuery
from weft.registry.registry import Registry
from weft.registry.usage import write as usage

pytestmark = pytest.mark.anyio

DAY = UsageQuery(start=NOON - timedelta(days=1), end=NOON + timedelta(days=1))


async def _insert(database: Database, *events: UsageEvent) -> None:
    async with database.write() as session:
        await usage.insert_events(session, events)


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


BY_KEY = UsageQuery(start=NOON - timedelta(days=2), end=NOON + timedelta(days=2), group_by=("key",))
TABLES = (UsageEventRow, UsageLatencyRow, UsageRollupRow, UsageAdapterRow)


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


async def _keys_in_tables(registry: Registry) -> list[set[str]]:
    async with registry.database.read() as session:
        return [set(await session.scalars(select(table.key_id))) for table in TABLES]


async def test_the_usage_of_keys_is_erased_and_all_other_stays(registry: Registry) -> None:
    for key_id, count in (("key_1", 7), ("key_2", 5), ("key_3", 4), (None, 3)):
        for event in _events(key_id, count):
            await registry.usage.record(event)
    assert await registry.usage.erase({"key_1", "key_3", "key_unheard_of"}) == 11
    assert await _keys_in_tables(registry) == [{"key_2", ""}] * len(TABLES)
    assert await _requests(registry) == {None: 3, "key_2": 5}
    assert (await registry.usage.summary(["adp_support"]))["adp_support"].requests == 8
    assert await wrong_sums(registry.database) == 0
    day, holder = timedelta(days=1), {"tenant_id": "ten_acme"}
    midnight = NOON - timedelta(hours=12)
    assert await registry.usage.tokens(holder, midnight, midnight + day) == 8 * 30


async def test_the_audit_log_tells_what_went(registry: Registry) -> None:
    for event in (*_events("key_1", 2), *_events("key_2", 3)):
        await registry.usage.record(event)
    await registry.usage.erase(["key_2", "key_1", "key_2", "key_unheard_of"])
    entries = [(entry.actor, entry.action, entry.tenant, entry.target) for entry in await registry.list_audit()]
    assert entries == [("admin", "usage.erase", "acme", f"key_{number}") for number in (2, 1)]
    assert [dict(entry.detail) for entry in await registry.list_audit()] == [{"events": 3}, {"events": 2}]
    assert await registry.usage.erase([]) == 0
    assert len(await registry.list_audit()) == 2


async def test_what_the_journal_held_is_erased_for_good(
    tmp_path: Path, database_url: str | None, clock: StandingClock
) -> None:
    registry = await Registry.open(database_url, tmp_path, clock=clock)
    for event in _events("key_1", 3):
        await registry.usage.record(event)
    assert await registry.usage.erase(["key_1"]) == 3
    await registry.usage.record(usage_event("use_later", key_id="key_1"))
    await registry.close()
    reopened = await Registry.open(database_url, tmp_path, clock=clock)
    assert await _requests(reopened) == {"key_1": 1}
    await reopened.close()


async def test_nothing_is_erased_while_the_journal_would_bring_it_back(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk a file stays for its marks, and the ends in it are moved again with them."""
    registry.usage.progress(usage_event("use_running", key_id="key_2"))
    await registry.usage.record(usage_event("use_1", key_id="key_1"))

    def full(_fd: int, _lines: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(CapacityError) as caught:
            await registry.usage.erase(["key_1"])
    assert caught.value.code == "storage.unavailable"
    assert await _requests(registry) == {"key_1": 1}
    assert await registry.usage.erase(["key_1"]) == 1
    await registry.usage.flush()
    assert await _requests(registry) == {}


@pytest.mark.parametrize("key_id", ["", "k" * 65, "nul\x00"])
async def test_ids_that_name_no_key_are_refused(registry: Registry, key_id: str) -> None:
    await registry.usage.record(usage_event("use_1", key_id=None))
    with pytest.raises(InvalidRequestError):
        await registry.usage.erase(["key_1", key_id])
    assert await _requests(registry) == {None: 1}
    assert await registry.list_audit() == ()
