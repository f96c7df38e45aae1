"""Deleting blobs keeps nobody else waiting: neither many of them, nor a store that hangs."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from api_server import Api, eventually
from weft.errors import CapacityError
from weft.server.garbage import HOLD_S, Sweeper, delete_blobs, end_removals

pytestmark = pytest.mark.anyio
SLOW_S = 0.05


def lonely_blobs(api: Api, count: int) -> list[str]:
    """Blobs that no version refers to."""
    digests = []
    for number in range(count):
        with api.services.blobs.create() as writer:
            writer.write(b"%d" % number)
            digests.append(writer.commit())
    return digests


async def test_a_long_sweep_lets_changes_pass(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    lonely_blobs(api, 40)
    delete = api.services.blobs.delete
    deleted: list[str] = []

    def slowly(sha256: str) -> bool:
        time.sleep(SLOW_S)
        deleted.append(sha256)
        return delete(sha256)

    monkeypatch.setattr(api.services.blobs, "delete", slowly)
    sweep = asyncio.create_task(Sweeper(api.services).sweep(is_start=True))
    await eventually(lambda: deleted)
    await api.services.registry.tenants.create_tenant("acme")
    assert len(deleted) <= 2 * HOLD_S / SLOW_S
    assert (await sweep)["blobs"] == 40
    assert len(deleted) == 40
    assert api.files() == []


async def test_nobody_waits_for_a_store_that_hangs(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = lonely_blobs(api, 2)
    is_asked, is_over = threading.Event(), threading.Event()

    def hang() -> None:
        is_asked.set()
        is_over.wait(60)
        raise CapacityError("no answer", code="storage.unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(api.services.blobs, "reach", hang)
        removal = asyncio.create_task(delete_blobs(api.services, digests))
        await eventually(is_asked.is_set)
        await api.services.registry.tenants.create_tenant("acme")
        assert not removal.done()
        is_over.set()
        await removal
        assert len(api.files()) == 2
    await eventually(lambda: not api.files())
    await end_removals(api.services)


async def test_a_database_that_is_away_ends_no_removal(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: object) -> None:
        raise CapacityError("away", code="db.unavailable")

    digests = lonely_blobs(api, 1)
    with monkeypatch.context() as patch:
        patch.setattr(api.services.registry.adapters, "holding_unreferenced", away)
        await delete_blobs(api.services, digests)
        assert len(api.files()) == 1
    await eventually(lambda: not api.files())
    await end_removals(api.services)
