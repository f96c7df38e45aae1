from __future__ import annotations

import asyncio

import pytest

from api_adapters import upload
from api_server import Api
from weft.errors import DrainingError
from weft.server.drain import Drain

pytestmark = pytest.mark.anyio


async def test_an_idle_server_drains_at_once() -> None:
    assert await Drain().drain(1_000_000) == 0


async def test_nothing_new_starts_while_draining() -> None:
    drain = Drain()
    drain.check()
    await drain.drain(0)
    with pytest.raises(DrainingError):
        drain.check()
    with pytest.raises(DrainingError), drain.running(lambda _: None):
        pass


async def test_work_that_ends_in_time_is_not_cut() -> None:
    drain = Drain()
    cuts: list[DrainingError] = []

    async def work() -> None:
        with drain.running(cuts.append):
            await asyncio.sleep(0.05)

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    assert drain.num_running == 1
    assert await drain.drain(30) == 0
    await working
    assert cuts == []


async def test_work_is_cut_when_the_time_is_over_or_somebody_hurries() -> None:
    for limit_s in (0.02, 30.0):
        drain, ended = Drain(), asyncio.Event()

        async def work(drain: Drain, ended: asyncio.Event) -> None:
            with drain.running(lambda _: ended.set()):
                await ended.wait()

        working = asyncio.create_task(work(drain, ended))
        await asyncio.sleep(0)
        draining = asyncio.create_task(drain.drain(limit_s))
        await asyncio.sleep(0)
        if limit_s > 1:
            drain.hurry()
        assert await asyncio.wait_for(draining, 25) == 1
        await working


async def test_an_upload_while_draining_is_refused_unread_with_a_time(api: Api) -> None:
    client = await api.tenant("acme")
    api.services.drain.is_draining = True
    answer = await upload(client, "late")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server.draining")
    assert int(answer.headers["retry-after"]) >= 1
    assert api.files() == []
    api.services.drain.is_draining = False
    assert (await upload(client, "late")).status_code == 201
