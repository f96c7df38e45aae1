"""Requests that generate nothing: tenants share places for them, and each has only so many open."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send

from api_adapters import upload
from api_server import Api, Client, at_rest, eventually
from manylora.errors import RateLimitError
from manylora.server.app import LIMITED_ROUTERS, ROUTERS
from manylora.server.auth.admission import Admitted
from manylora.server.auth.middleware import LOCAL_ADMIN
from manylora.server.limits import turns as limit_turns
from manylora.server.limits.turns import CODE, PLACES, ManagementTurns

pytestmark = pytest.mark.anyio
COSTLY = ("/v1/usage", "/v1/usage/events", "/v1/usage/latency")
LOOPS = 50


class SlowUsage:
    """Holds up what reads usage."""

    def __init__(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_inside = 0
        self.num_begun = 0
        self.may_end = asyncio.Event()
        monkeypatch.setattr(api.services.registry.usage, "flush", self._flush)

    async def _flush(self) -> None:
        self.num_begun += 1
        self.num_inside += 1
        await self.may_end.wait()
        self.num_inside -= 1


@pytest.fixture
async def slow(api: Api, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SlowUsage]:
    monkeypatch.setattr(limit_turns, "LONGEST_S", 1000.0)
    made = SlowUsage(api, monkeypatch)
    yield made
    made.may_end.set()


def ask_often(client: Client, count: int = LOOPS) -> list[asyncio.Task[httpx.Response]]:
    """Ask for the costly routes as many clients do at once."""
    return [
        asyncio.create_task(client.get(COSTLY[number % len(COSTLY)])) for number in range(count)
    ]


async def statuses(asking: list[asyncio.Task[httpx.Response]]) -> Counter[int]:
    return Counter(answer.status_code for answer in await asyncio.gather(*asking))


async def test_a_change_of_one_tenant_waits_for_none_of_anothers_costly_requests(
    api: Api, rival: Client, slow: SlowUsage
) -> None:
    acme = await api.tenant("acme")
    assert (await upload(acme, "mine")).status_code == 201
    asking = ask_often(rival)
    await eventually(lambda: slow.num_inside == PLACES)
    await at_rest(lambda: slow.num_begun)
    for text in ("one", "two", "three"):
        answer = await acme.patch("/v1/adapters/mine", json={"description": text})
        assert (answer.status_code, answer.json()["description"]) == (200, text)
    assert (await api.ask("rival"))["total_tokens"], "generation needs no place"
    assert slow.num_begun == PLACES
    slow.may_end.set()
    assert await statuses(asking) == {200: LOOPS}


async def test_one_tenant_has_only_so_many_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_turns, "MOST_OPEN", 5)
    told, may_end = list[tuple[str, str | None]](), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await may_end.wait()

    async def nothing(*_: object) -> Message:
        raise AssertionError("nothing is read or sent")

    turns = ManagementTurns(app, frozenset(), lambda code, tenant: told.append((code, tenant)))
    scope = {"type": "http", "path": "/v1/usage", "state": {"identity": LOCAL_ADMIN}}
    asking = [asyncio.create_task(turns(dict(scope), nothing, nothing)) for _ in range(5)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    with pytest.raises(RateLimitError) as refused:
        await turns(dict(scope), nothing, nothing)  # type: ignore[arg-type]
    assert (refused.value.code, refused.value.retry_after_s, told) == (CODE, 1.0, [(CODE, None)])
    may_end.set()
    await asyncio.gather(*asking)
    await turns(dict(scope), nothing, nothing)  # type: ignore[arg-type]


async def test_health_and_metrics_wait_for_nobody(api: Api, slow: SlowUsage) -> None:
    asking = ask_often(api.admin)
    await eventually(lambda: slow.num_inside == PLACES)
    assert [(await api.client().get(path)).status_code for path in ("/health", "/ready")] == [
        200,
        200,
    ]
    assert "manylora_" in await api.metrics()
    slow.may_end.set()
    assert await statuses(asking) == {200: LOOPS}


async def test_a_body_that_is_still_coming_takes_no_place(api: Api, acme: Client) -> None:
    assert (await upload(acme, "mine")).status_code == 201
    num_read, may_end = Counter[str](), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"description": '
        num_read["pieces"] += 1
        await may_end.wait()
        yield b'"late"}'

    headers = {"content-type": "application/json"}
    sending = [
        asyncio.create_task(acme.patch("/v1/adapters/mine", content=body(), headers=headers))
        for _ in range(3 * PLACES)
    ]
    await eventually(lambda: num_read["pieces"] == len(sending))
    assert (await acme.get("/v1/adapters/mine")).status_code == 200
    may_end.set()
    assert await statuses(sending) == {200: len(sending)}


async def test_what_takes_long_goes_on_without_a_place(
    rival: Client, slow: SlowUsage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit_turns, "LONGEST_S", 0.0)
    asking = ask_often(rival)
    await eventually(lambda: slow.num_inside == LOOPS)
    slow.may_end.set()
    assert await statuses(asking) == {200: LOOPS}


async def test_an_answer_that_has_begun_takes_no_place() -> None:
    begun, may_end = list[str](), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.append(scope["path"])
        await may_end.wait()

    async def ignore(_: Message) -> None:
        pass

    turns = ManagementTurns(app, frozenset(), lambda *_: None)
    scope = {"type": "http", "path": "/v1/events", "state": {"identity": None}}
    receive: Any = asyncio.Event().wait
    streams = [asyncio.create_task(turns(dict(scope), receive, ignore)) for _ in range(3 * PLACES)]
    await eventually(lambda: len(begun) == len(streams))
    may_end.set()
    await asyncio.gather(*streams)


def test_each_route_counts_against_limits_or_takes_turns() -> None:
    """A route without turns has the dependency `Admitted`, and no other one has it."""
    limited = {id(route) for router in LIMITED_ROUTERS for route in router.routes}
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    assert {route.path for route in routes if id(route) in limited} == {
        route.path for route in routes if _is_admitted(route.dependant)
    }


def _is_admitted(dependant: Dependant) -> bool:
    return isinstance(dependant.call, Admitted) or any(map(_is_admitted, dependant.dependencies))


async def test_a_refusal_has_a_time_to_come_back_and_concerns_one_tenant(
    api: Api, rival: Client, slow: SlowUsage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit_turns, "MOST_OPEN", 20)
    acme = await api.tenant("acme")
    asking = ask_often(rival, 27)
    await eventually(lambda: sum(each.done() for each in asking) == 7, within_s=8)
    refused = [each.result() for each in asking if each.done()]
    answers = {
        (each.status_code, each.json()["error"]["code"], each.headers["retry-after"])
        for each in refused
    }
    assert answers == {(429, CODE, "1")}
    assert f'manylora_refused_total{{code="{CODE}",tenant="rival"}} 7.0' in await api.metrics()
    assert (await acme.get("/v1/adapters")).status_code == 200
    slow.may_end.set()
    assert await statuses(asking) == {200: 20, 429: 7}
