from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from registry_samples import NOON, StandingClock, usage_event
from weft.errors import CapacityError, InvalidRequestError
from weft.registry.db.models import UsageAdapterRow, UsageEventRow, UsageLatencyRow, UsageRollupRow
from weft.registry.records import UsageEvent, UsageQuery
from weft.registry.registry import Registry

pytestmark = pytest.mark.anyio

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
    async with registry._database.read() as session:
        return [set(await session.scalars(select(table.key_id))) for table in TABLES]


async def test_the_usage_of_keys_is_erased_and_all_other_stays(registry: Registry) -> None:
    for key_id, count in (("key_1", 7), ("key_2", 5), ("key_3", 4), (None, 3)):
        for event in _events(key_id, count):
            await registry.usage.record(event)
    assert await registry.usage.erase({"key_1", "key_3", "key_unheard_of"}) == 11
    assert await _keys_in_tables(registry) == [{"key_2", ""}] * len(TABLES)
    assert await _requests(registry) == {None: 3, "key_2": 5}
    assert (await registry.usage.summary(["adp_support"]))["adp_support"].requests == 8
    assert await registry.usage.check() == 0
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
