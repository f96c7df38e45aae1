from __future__ import annotations

import asyncio

import pytest

from api_adapters import upload
from api_server import Api, Client, eventually
from manylora.errors import DrainingError
from manylora.server.http.listen import ApiServer, Shutdown
from manylora.server.process.drain import Drain

pytestmark = pytest.mark.anyio


async def test_an_idle_server_drains_at_once_and_nothing_new_starts() -> None:
    drain = Drain()
    drain.check()
    assert await drain.drain(1_000_000) == 0
    with pytest.raises(DrainingError):
        drain.check()
    with pytest.raises(DrainingError), drain.running(lambda _: None):
        pass


async def test_work_is_cut_at_once_if_somebody_hurries() -> None:
    drain, ended = Drain(), asyncio.Event()
    with drain.running(lambda _: ended.set()):
        draining = asyncio.create_task(drain.drain(1_000_000))
        await asyncio.sleep(0)
        drain.hurry()
        await asyncio.wait_for(ended.wait(), 25)
    assert await draining == 1


async def test_work_is_taken_until_others_have_noticed_the_drain_or_somebody_hurries() -> None:
    shutdown = Shutdown(1_000_000)
    shutdown.server, shutdown.before_drain = ApiServer(None), lambda: 1_000_000.0
    shutdown.ask()
    await asyncio.sleep(0.1)
    shutdown.drain.check()
    with pytest.raises(DrainingError):
        shutdown.drain.check(or_near=True)
    shutdown.ask()
    await eventually(lambda: shutdown.server is not None and shutdown.server.should_exit)
    assert shutdown.drain.is_draining


async def test_an_upload_while_draining_is_refused_unread_with_a_time(
    api: Api, acme: Client
) -> None:
    api.services.drain.is_draining = True
    answer = await upload(acme, "late")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server.draining")
    assert int(answer.headers["retry-after"]) >= 1
    assert api.files() == []
    api.services.drain.is_draining = False
    assert (await upload(acme, "late")).status_code == 201
