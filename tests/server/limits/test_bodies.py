"""Bodies that are refused before a byte of them is read, and how many bytes of bodies a tenant may have in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_server import BASE, Api, eventually
from api_server import api as open_api
from fake_cluster import behind_a_gateway
from manylora.errors import CapacityError, RateLimitError
from manylora.server.auth import middleware
from manylora.server.http.body import BodyBudget

pytestmark = pytest.mark.anyio
SHORT = {"model": BASE, "prompt": [5, 6], "max_tokens": 2}
JSON = {"content-type": "application/json"}
LONG = 100_000
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize")


class Body:
    """A body that says how much of it was read, and ends when it may."""

    def __init__(self, num_bytes: int = LONG) -> None:
        self.num_read = 0
        self.may_end = asyncio.Event()
        self._num_bytes = num_bytes

    async def send(
        self, client: httpx.AsyncClient, path: str = PATHS[0], *, is_announced: bool = True
    ) -> Any:
        length = (
            {"content-length": str(self._num_bytes)}
            if is_announced
            else {"transfer-encoding": "chunked"}
        )
        return await client.post(path, content=self._bytes(), headers={**JSON, **length})

    async def _bytes(self) -> AsyncIterator[bytes]:
        self.num_read += self._num_bytes - 1
        yield b" " * (self._num_bytes - 1)
        await self.may_end.wait()
        self.num_read += 1
        yield b"x"


async def limit(api: Api, **limits: int) -> httpx.AsyncClient:
    client = await api.tenant("acme")
    async with api.admin as admin:
        assert (await admin.patch("/v1/tenants/acme", json={"limits": limits})).status_code == 200
    return client


@pytest.mark.parametrize("is_announced", [True, False])
@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"requests_per_minute": 1}, "rate_limit_exceeded"),
        ({"tokens_per_minute": 4}, "rate_limit_exceeded"),
        ({"tokens_per_month": 4}, "insufficient_quota"),
        ({"concurrent_requests": 0}, "rate_limit_exceeded"),
    ],
)
async def test_a_body_that_a_limit_refuses_is_not_read(
    api: Api, limits: dict[str, int], code: str, is_announced: bool
) -> None:
    client = await limit(api)
    answer = await client.post(PATHS[0], json=SHORT)
    assert answer.status_code == 200
    await limit(api, **limits)
    for path in PATHS[: -1 if "tokens" in next(iter(limits)) else None]:
        body = Body()
        refused = await body.send(client, path, is_announced=is_announced)
        assert (refused.status_code, body.num_read) == (429, 0)
        error = refused.json()["error"]
        assert path == "/v1/messages" or error["code"] == code
        assert next(iter(limits)) in error["message"]


async def test_what_a_key_may_not_do_is_refused_before_its_body_is_read(api: Api) -> None:
    body = Body()
    refused = await body.send(await api.tenant("acme", "usage"))
    assert (refused.status_code, body.num_read) == (403, 0)


async def test_a_request_that_is_let_in_counts_once(api: Api) -> None:
    client = await limit(api, requests_per_minute=3)
    answers = [
        await client.post(PATHS[0], json={**SHORT, "prompt": "x " * 20_000}) for _ in range(4)
    ]
    assert [answer.status_code for answer in answers] == [400, 400, 400, 429]


async def test_bodies_beyond_those_that_may_run_are_not_read(api: Api) -> None:
    client = await limit(api, concurrent_requests=2)
    first = [Body() for _ in range(2)]
    sending = [asyncio.create_task(body.send(client)) for body in first]
    await eventually(lambda: all(body.num_read for body in first))
    more = [Body() for _ in range(20)]
    answers = await asyncio.gather(*(body.send(client) for body in more))
    assert {(answer.status_code, answer.headers["retry-after"]) for answer in answers} == {
        (429, "1")
    }
    assert sum(body.num_read for body in more) == 0
    for body in first:
        body.may_end.set()
    assert {(await each).status_code for each in sending} == {400}
    assert (await client.post(PATHS[0], json=SHORT)).status_code == 200


async def test_one_of_whom_a_stream_has_begun_waits_for_nobody_at_the_front(api: Api) -> None:
    """An answer that has begun is counted where it is computed, so its end is seen at once."""
    client = await limit(api, concurrent_requests=1)
    for _ in range(20):
        answer = await client.post(PATHS[0], json={**SHORT, "stream": True})
        assert (answer.status_code, "[DONE]" in answer.text) == (200, True)


@pytest.fixture(params=["all", "gateway"])
async def small(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Api]:
    """An API with room for 400,000 bytes of bodies."""
    monkeypatch.setattr(middleware, "MOST_BYTES", 400_000)
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_api(tmp_path, max_body_bytes=LONG))
        if request.param == "gateway":
            await stack.enter_async_context(behind_a_gateway(opened))
        yield opened


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_tenants_bodies_leave_room_for_those_of_others(
    small: Api, is_announced: bool
) -> None:
    flood, quiet = await small.tenant("flood"), await small.tenant("quiet")
    bodies = [Body() for _ in range(10)]
    sending = [asyncio.create_task(body.send(flood, is_announced=is_announced)) for body in bodies]
    refused = [answer async for answer in _ended(sending, 8)]
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {
        (429, "limit.bodies")
    }
    assert {answer.headers["retry-after"] for answer in refused} == {"1"}
    if is_announced:
        assert sum(body.num_read > 0 for body in bodies) == 2
    beside = Body()
    beside.may_end.set()
    assert (await beside.send(quiet)).status_code == 400
    for body in bodies:
        body.may_end.set()
    assert [answer.status_code async for answer in _ended(sending, 2)] == [400, 400]
    for _ in range(10):
        assert (await beside.send(flood)).status_code == 400


async def _ended(tasks: list[asyncio.Task[Any]], count: int) -> AsyncIterator[Any]:
    """The answers of so many tasks, which are no longer in the list."""
    for _ in range(count):
        await eventually(lambda: any(task.done() for task in tasks))
        task = next(task for task in tasks if task.done())
        tasks.remove(task)
        yield task.result()


async def test_a_client_that_leaves_gives_its_room_back(small: Api) -> None:
    client = await small.tenant("acme")
    for _ in range(10):
        body = Body()
        sending = asyncio.create_task(body.send(client))
        await eventually(partial(getattr, body, "num_read"))
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    assert (await client.post(PATHS[0], json=SHORT)).status_code == 200


def test_who_is_within_its_part_is_told_that_the_server_is_full() -> None:
    budget = BodyBudget(900)
    for tenant in ("a", "b", "c"):
        budget.take(tenant, 280)
    with pytest.raises(CapacityError) as full:
        budget.take("d", 100)
    assert full.value.code == "server.overloaded"
    with pytest.raises(RateLimitError):
        budget.take("a", 100)
    budget.give_back("a", 280)
    budget.take("d", 100)
    for tenant, num_bytes in (("b", 280), ("c", 280), ("d", 100)):
        budget.give_back(tenant, num_bytes)
    assert not budget.held
    budget.take("a", 600)
    with pytest.raises(RateLimitError):
        budget.take("a", 10)
