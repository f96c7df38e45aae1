"""Deleting blobs keeps nobody else waiting: neither many of them, nor a store that hangs."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from api_server import Api, eventually
from blob_io import store
from manylora.errors import CapacityError
from manylora.server.process.threads import cancel_all
from manylora.server.serve import sweeper_of
from manylora.server.versions.garbage import HOLD_S

pytestmark = pytest.mark.anyio


def lonely_blobs(api: Api, count: int) -> list[str]:
    """Blobs that no version refers to."""
    return [store(api.services.blobs, b"%d" % number) for number in range(count)]


async def test_a_long_sweep_lets_changes_pass(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database's lock is given back each time that it was held for `HOLD_S`."""
    lonely_blobs(api, 40)
    now_s, deleted_in_hold = 0.0, list[int]()
    delete, holding = api.services.blobs.delete, api.services.registry.adapters.locking_unreferenced

    def slowly(sha256: str) -> None:
        nonlocal now_s
        now_s += HOLD_S / 8
        deleted_in_hold[-1] += 1
        delete(sha256)

    def hold(weights: list[str]) -> Any:
        deleted_in_hold.append(0)
        return holding(weights)

    monkeypatch.setattr(api.services.blobs, "delete", slowly)
    monkeypatch.setattr(api.services.registry.adapters, "locking_unreferenced", hold)
    api.services.versions.garbage.monotonic = lambda: now_s
    swept, _ = await asyncio.gather(
        sweeper_of(api.services).sweep(is_start=True),
        api.services.registry.tenants.create_tenant("acme"),
    )
    assert swept["blobs"] == 40
    assert deleted_in_hold == [8] * 5
    assert api.files() == []


async def test_nobody_waits_for_a_store_that_hangs(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = lonely_blobs(api, 2)
    is_asked, is_over = threading.Event(), threading.Event()

    def hang() -> None:
        is_asked.set()
        is_over.wait(60)
        raise CapacityError("no answer", code="storage.unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(api.services.blobs, "reach", hang)
        removal = asyncio.create_task(api.services.versions.garbage.delete(digests))
        await eventually(is_asked.is_set)
        await api.services.registry.tenants.create_tenant("acme")
        assert not removal.done()
        is_over.set()
        await removal
        assert len(api.files()) == 2
    await eventually(lambda: not api.files())
    await api.services.versions.garbage.close()


async def test_a_server_that_stops_holds_the_lock_until_its_delete_has_ended(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another one could publish the same content, and lose it to the delete that is still on its way."""
    (digest,) = lonely_blobs(api, 1)
    delete, is_asked, is_over = api.services.blobs.delete, threading.Event(), threading.Event()

    def slowly(sha256: str) -> None:
        is_asked.set()
        is_over.wait(60)
        delete(sha256)

    monkeypatch.setattr(api.services.blobs, "delete", slowly)
    removal = asyncio.create_task(api.services.versions.garbage.delete([digest]))
    await eventually(is_asked.is_set)
    stopping = asyncio.create_task(cancel_all([removal]))
    others_write = asyncio.create_task(api.services.registry.tenants.create_tenant("acme"))
    await asyncio.wait({stopping, others_write}, timeout=0.3)
    assert not stopping.done()
    assert not others_write.done()
    is_over.set()
    await stopping
    await others_write
    assert api.files() == []


async def test_a_database_that_is_away_ends_no_removal(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> None:
        raise CapacityError("away", code="db.unavailable")

    digests = lonely_blobs(api, 1)
    with monkeypatch.context() as patch:
        patch.setattr(api.services.registry.adapters, "locking_unreferenced", away)
        await api.services.versions.garbage.delete(digests)
        assert len(api.files()) == 1
    await eventually(lambda: not api.files())
    await api.services.versions.garbage.close()
