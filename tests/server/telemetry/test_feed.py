"""`GET /v1/engine/events` over a socket: what comes when, what it costs, and how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest

from api_server import ADMIN_KEY, Api, at_rest, eventually, new_client
from manylora.adapters.ref import ResidentAdapter
from manylora.engine.fairness.service import TenantLoad
from manylora.engine.status import StepBatches
from manylora.errors import CapacityError
from manylora.memory.pool import PageMap, PageUse
from manylora.server.telemetry import feed as engine_feed

pytestmark = pytest.mark.anyio
POLL_S = 0.02


@pytest.fixture
async def url(api: Api, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(engine_feed, "POLL_S", POLL_S)
    async with api.listening() as address:
        yield address


@dataclass
class Watcher:
    """Reads as a browser's EventSource does."""

    content_type: str
    lines: AsyncIterator[str]
    retry_ms: int | None = None
    num_comments: int = 0

    async def next(self) -> tuple[str, Any]:
        """The next event's name and data."""
        name, data = "message", ""
        async for line in self.lines:
            field, _, value = line.partition(": ")
            if not line and data:
                return name, json.loads(data)
            if line.startswith(":"):
                self.num_comments += 1
            elif field == "retry":
                self.retry_ms = int(value)
            elif field == "event":
                name = value
            elif field == "data":
                data += value
        raise EOFError

    async def snapshot(self) -> dict[str, Any]:
        name, data = await self.next()
        assert name == "message", data
        return dict(data)


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[Watcher]:
    async with (
        new_client(ADMIN_KEY, url) as client,
        client.stream("GET", "/v1/engine/events") as answer,
    ):
        assert answer.status_code == 200
        yield Watcher(answer.headers["content-type"], aiter(answer.aiter_lines()))


def waiting_in(snapshot: dict[str, Any]) -> dict[str, int]:
    return {name: load["waiting"] for name, load in snapshot["tenants"].items()}


async def test_a_watcher_gets_the_present_at_once_and_how_to_come_again(api: Api, url: str) -> None:
    async with watching(url) as watcher:
        snapshot = await watcher.snapshot()
    assert watcher.content_type == "text/event-stream; charset=utf-8"
    assert watcher.retry_ms == 2000
    shown = (await api.admin.get("/v1/engine")).json()
    assert snapshot == shown
    assert snapshot["object"] == "engine"
    assert set(snapshot["pages"]) == {"free", "kv", "prefix", "adapter", "quarantine"}
    assert snapshot["ready"]["base"]["num_layers"] > 0


async def test_an_idle_engine_is_told_once_and_comments_show_that_the_line_is_up(
    api: Api, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_feed, "KEEP_ALIVE_S", 10 * POLL_S)
    async with watching(url) as watcher:
        await watcher.snapshot()
        nothing = asyncio.create_task(watcher.next())
        await eventually(lambda: watcher.num_comments >= 3)
        assert not nothing.done()
        assert api.engine.num_asked > 10
        async with watching(url) as late:
            await late.snapshot()
        assert not nothing.done()
        api.engine.tenants = {"ten_gone": TenantLoad(waiting=1)}
        name, snapshot = await nothing
    assert (name, waiting_in(snapshot)) == ("message", {"ten_gone": 1})


async def test_twenty_watchers_cost_as_much_as_one_and_nothing_once_they_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_feed, "POLL_S", 0.0)
    feed, num_asked = engine_feed.EngineFeed(), 0
    answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def ask() -> dict[str, Any]:
        nonlocal num_asked
        num_asked += 1
        return await answers.get()

    others = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        watchers = [
            await stack.enter_async_context(aclosing(feed.events(ask, lambda: False)))
            for _ in range(20)
        ]
        assert {await anext(watcher) for watcher in watchers} == {engine_feed.RETRY}
        for index in range(10):
            answers.put_nowait({"boot_id": "boot-1", "index": index})
            shown = await asyncio.gather(*(anext(watcher) for watcher in watchers))
            assert len(set(shown)) == 1
            assert f'"index":{index}'.encode() in shown[0]
        assert num_asked == 10
    await asyncio.sleep(0)
    assert (num_asked, asyncio.all_tasks()) == (10, others)


async def test_a_watcher_that_leaves_while_nothing_happens_is_noticed_at_once(
    api: Api, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine_feed, "KEEP_ALIVE_S", 10_000.0
    )  # it must not take the next comment to notice
    async with watching(url) as watcher:
        await watcher.snapshot()
    await at_rest(lambda: api.engine.num_asked)
    async with watching(url) as watcher:  # and the next one starts anew
        await watcher.snapshot()


async def test_a_restart_is_told_with_the_time_without_an_engine_before_it(
    api: Api, url: str
) -> None:
    ready = api.engine.ready
    assert ready is not None
    async with watching(url) as watcher, watching(url) as other:
        assert (await watcher.snapshot())["boot_id"] == "boot-1"
        await other.snapshot()
        api.engine.ready = None
        name, away = await watcher.next()
        assert (name, away["error"]["code"]) == ("engine_error", "engine_restarted")
        await asyncio.sleep(5 * POLL_S)
        api.engine.ready = replace(ready, boot_id="boot-2")
        assert await watcher.next() == ("restart", {"boot_id": "boot-2"})
        assert (await watcher.snapshot())["boot_id"] == "boot-2"
        assert [(await other.next())[0] for _ in range(3)] == ["engine_error", "restart", "message"]


async def test_events_go_on_after_an_outage_of_the_database(
    api: Api, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_: object) -> None:
        raise CapacityError("away", code="db.unavailable")

    with monkeypatch.context() as outage:
        outage.setattr(api.services.registry.tenants, "tenant_names", away)
        async with watching(url) as watcher:
            name, said = await watcher.next()
            assert (name, said["error"]["code"]) == ("engine_error", "db.unavailable")
            outage.undo()
            assert (await watcher.snapshot())["object"] == "engine"


async def test_a_failure_ends_the_stream_that_waits_for_it_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_feed, "POLL_S", 0.0)
    feed, asked = engine_feed.EngineFeed(), 0

    async def ask() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("nobody expected this")
        return {"boot_id": "boot-1"}

    def listen() -> AsyncGenerator[bytes, None]:
        return feed.events(ask, lambda: False)

    async with (
        aclosing(listen()) as hangs,
        aclosing(listen()) as fails,
        aclosing(listen()) as later,
    ):
        assert await anext(hangs) == await anext(fails) == engine_feed.RETRY
        with pytest.raises(RuntimeError, match="nobody expected"):
            await anext(fails)
        assert await anext(later) == engine_feed.RETRY
        assert b"boot-1" in await anext(later)
        assert b"boot-1" in await anext(hangs)


async def test_a_stream_ends_with_the_session_that_it_began_in(api: Api, url: str) -> None:
    async with new_client(ADMIN_KEY, url) as client:
        cookie = (await client.post("/v1/session")).headers["set-cookie"].partition(";")[0]
    sent = {"cookie": cookie, "sec-fetch-site": "same-origin"}
    async with (
        new_client(None, url) as client,
        client.stream("GET", "/v1/engine/events", headers=sent) as answer,
    ):
        watcher = Watcher(answer.headers["content-type"], aiter(answer.aiter_lines()))
        await watcher.snapshot()
        api.engine.tenants = {"": TenantLoad(waiting=1)}
        await watcher.snapshot()
        assert (await client.delete("/v1/session", headers=sent)).status_code == 204
        api.engine.tenants = {"": TenantLoad(waiting=2)}
        with pytest.raises(EOFError):
            await asyncio.wait_for(watcher.next(), 5)
    await at_rest(lambda: api.engine.num_asked)


async def test_draining_ends_the_streams(api: Api, url: str) -> None:
    async with watching(url) as watcher:
        await watcher.snapshot()
        api.services.drain.is_draining = True
        with pytest.raises(EOFError):
            await asyncio.wait_for(watcher.next(), 5)
    api.services.drain.is_draining = False


async def test_tenants_are_told_by_name_and_pages_by_adapter_slot(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.tenant("acme")
    await api.tenant("rival")
    refused = (await api.services.registry.tenants.get_tenant("rival")).id
    acme = (await api.services.registry.tenants.get_tenant("acme")).id
    load = TenantLoad(weight=3.0, running=2, paused=1, waiting=2, reasons={"NEW": 2}, rate=7.5)
    api.engine.tenants = {acme: load, "": TenantLoad(waiting=1), "ten_gone": TenantLoad(waiting=4)}
    gate = {
        acme: {"wait_s": 2.5, "refused": {"limit.queue": 3}},
        refused: {"wait_s": 0.0, "refused": {}},
    }
    monkeypatch.setattr(api.services.limits.gate, "snapshot", lambda: gate)
    api.engine.residents = [
        ResidentAdapter(digest="sha256:a", tier="device", pages=2, running=1, slot=3, loads=2)
    ]
    api.engine.page_map = PageMap(
        pages_per_cell=1,
        uses=[PageUse(kind="adapter", owner=3), PageUse(kind="free")],
        runs=[(2, 0), (8, 1)],
    )
    api.engine.batches = StepBatches(adapters=["sha256:a"], steps=[[1, 0, 1, 0]])
    body = (await api.admin.get("/v1/engine")).json()
    assert waiting_in(body) == {"acme": 2, "(admin)": 1, "ten_gone": 4}
    assert body["tenants"]["acme"] == asdict(load)
    assert body["admission"] == {"acme": gate[acme], "rival": gate[refused]}
    assert (body["residents"][0]["slot"], body["residents"][0]["loads"]) == (3, 2)
    assert body["page_map"]["uses"] == [
        {"kind": "adapter", "owner": 3},
        {"kind": "free", "owner": -1},
    ]
    assert body["page_map"]["runs"] == [[2, 0], [8, 1]]
    assert body["batches"] == {
        "adapters": [{"digest": "sha256:a", "adapters": []}],
        "steps": [[1, 0, 1, 0]],
    }
    assert body["load_p95_s"] == {"stored>device": 0.25}
