"""Who gives way when there are more connections than descriptors: strangers first, and nobody with a request."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from api_server import BASE, Api, connect, eventually, new_client
from manylora.server.http import wire
from manylora.server.http.listen import ApiServer
from manylora.server.http.wire import ConnectionRoom
from manylora.server.process import descriptors
from manylora.server.process.descriptors import most_connections, raise_descriptor_limit
from raw_http import head_of

pytestmark = pytest.mark.anyio
MOST = 12


@dataclass(eq=False)
class Visitor:
    name: str
    room: ConnectionRoom
    closed: list[str] = field(default_factory=list)

    def give_way(self) -> None:
        self.closed.append(self.name)
        self.room.leave(self)


def visitors(room: ConnectionRoom, names: str, closed: list[str]) -> list[Visitor]:
    """Connections that come in this order."""
    found = [Visitor(name, room, closed) for name in names]
    for each in found:
        room.enter(each, 0.0)
    return found


def test_the_stranger_that_did_nothing_for_the_longest_time_gives_way() -> None:
    closed: list[str] = []
    room = ConnectionRoom(3)
    a, b, c = visitors(room, "abc", closed)
    room.begin(a)  # a request without a key
    visitors(room, "d", closed)
    assert closed == ["b"]
    room.leave(c)
    visitors(room, "e", closed)
    assert closed == ["b"]
    visitors(room, "f", closed)
    assert closed == ["b", "a"]
    room.begin(b)  # it is closed already


def test_callers_with_a_key_stay_and_of_them_the_idle_one_goes() -> None:
    closed: list[str] = []
    room = ConnectionRoom(3)
    known = visitors(room, "abc", closed)
    for each in known:
        room.begin(each)
        room.trust(each)
    visitors(room, "d", closed)
    assert closed == ["d"]  # all others are answered just now
    for each in (known[1], known[0]):
        room.rest(each)
    visitors(room, "e", closed)
    assert closed == ["d", "b"]
    room.begin(known[0])
    visitors(room, "f", closed)
    assert closed == ["d", "b", "e"]


def test_strangers_are_bounded_where_there_is_room_for_many_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MOST_STRANGERS", 2)
    closed: list[str] = []
    visitors(ConnectionRoom(1000), "abc", closed)
    assert closed == ["a"]


@pytest.mark.parametrize("soft", [64, 200, 1024])
def test_some_descriptors_are_left_to_others(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, 4096))
    most = most_connections()
    assert most == descriptors.LEAST_CONNECTIONS or most <= soft - descriptors.KEPT
    assert descriptors.LEAST_CONNECTIONS <= most_connections(descriptors_each=2) <= most


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((256, 4096), (4096, 4096)),
        ((256, resource.RLIM_INFINITY), (1 << 20, resource.RLIM_INFINITY)),
        ((4096, 4096), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: tuple[int, int] | None
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: asked.append(both))
    raise_descriptor_limit()
    assert asked == ([] if wanted is None else [wanted])


@pytest.fixture
async def narrow(api: Api, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The API on a port, with room for a few connections."""
    monkeypatch.setattr("manylora.server.http.listen.most_connections", lambda: MOST)
    async with api.listening() as url:
        yield url


@pytest.mark.parametrize(
    "head", [b"", head_of("GET", "/health", None)[:-2], head_of("GET", "/v1/models", "no-key")[:-2]]
)
async def test_idle_connections_of_strangers_keep_no_tenant_out(
    api: Api, narrow: str, head: bytes
) -> None:
    """They say nothing, or begin a request."""
    body = {"model": BASE, "prompt": "x", "max_tokens": 100, "ignore_eos": True}
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(new_client(await api.key("acme"), narrow))
        idle = await stack.enter_async_context(new_client(await api.key("acme"), narrow))
        assert (await idle.get("/v1/models")).status_code == 200
        api.engine.token_s = 0.01
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: api.engine.running)
        writers = []
        for _ in range(5 * MOST):
            _, writer = await connect(narrow)
            writer.write(head)
            writers.append(writer)
        assert (await idle.get("/v1/models")).status_code == 200
        async with new_client(await api.key("acme"), narrow) as late:
            assert (await late.get("/v1/models")).status_code == 200
        assert (await running).status_code == 200
        for writer in writers:
            writer.close()


async def test_a_server_does_not_let_more_wait_than_it_has_room_for(api: Api) -> None:
    assert ApiServer(api.app, MOST).config.backlog == MOST
