"""A server with little room: what can never be served is refused with the numbers, and what cannot now, with a time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from idleness import seconds_until_idle
from manylora_server import DEMO_MODEL, ManyloraServer, engines, manylora_server

PAGES = 70
PAGE_BYTES = 16 * 1024
SETTINGS = {
    "memory.gib": PAGES * PAGE_BYTES / (1 << 30),
    "scheduler.max_running": 1,
    "scheduler.max_waiting": 2,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    with manylora_server(
        tmp_path_factory.mktemp("limits"), "--dtype", "bfloat16", settings=SETTINGS
    ) as running:
        yield running


def completion(
    client: httpx.Client, model: str, prompt_tokens: int, max_tokens: int
) -> httpx.Response:
    body = {
        "model": model,
        "prompt": [7] * prompt_tokens,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return client.post("/v1/completions", json=body)


def test_a_request_that_no_empty_pool_could_hold_beside_its_adapter_is_refused_with_the_numbers(
    small: ManyloraServer,
) -> None:
    acme = small.publish("acme", "json")
    longest = min(small.engine()["ready"]["max_model_len"], 16 * (PAGES - 2))
    assert completion(acme, "json", 8, 8).status_code == 200
    assert completion(acme, DEMO_MODEL.name, longest - 8, 8).status_code == 200
    pages = acme.get("/v1/adapters/json").json()["pages"]
    if longest <= 16 * (PAGES - 1 - pages):
        pytest.fail("the pool is too roomy for this test")
    refused = completion(acme, "json", longest - 8, 8)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["code"] == "request_too_large"
    assert str(pages) in refused.json()["error"]["message"]
    assert completion(acme, "json", 8, 8).status_code == 200


LIMIT = 3000


def limited_key(server: ManyloraServer, name: str) -> str:
    server.tenant(name)
    answer = server.admin.patch(
        f"/v1/tenants/{name}", json={"limits": {"tokens_per_minute": LIMIT}}
    )
    assert answer.status_code == 200, answer.text
    return server.tenants[name]


def minutes_since(started: float) -> int:
    """Minutes that have begun: in each of them so many tokens may be computed."""
    return 1 + int((time.monotonic() - started) / 60)


async def hang_up(client: httpx.AsyncClient, rng: random.Random) -> int:
    """Ask for something long and leave at a random moment; the status, 0 where it left before there was one."""
    body = {
        "model": DEMO_MODEL.name,
        "prompt": [rng.randrange(10, 500) for _ in range(rng.choice([3, 3, 60, 500]))],
        "max_tokens": rng.choice([100, 400]),
        "ignore_eos": True,
    }
    with contextlib.suppress(httpx.TimeoutException):
        if rng.random() < 0.5:
            return (
                await client.post("/v1/completions", json=body, timeout=rng.uniform(0.001, 0.2))
            ).status_code
        return await read_some(client, "/v1/completions", body, rng.choice([0, 1, 1, 20]))
    return 0


async def read_some(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], num_lines: int
) -> int:
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        lines = answer.aiter_lines()
        for _ in range(num_lines):
            await anext(lines, None)
        return answer.status_code


async def until_refused(
    server: ManyloraServer,
    key: str,
    num_refusals: int,
    ask: Callable[[httpx.AsyncClient, random.Random], Awaitable[int]],
) -> Counter[int]:
    """Eight clients ask again and again; returns the statuses."""
    statuses: Counter[int] = Counter()

    async def worker(seed: int) -> None:
        rng = random.Random(seed)
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            base_url=server.url, headers=headers, timeout=60, trust_env=False
        ) as client:
            while statuses[429] < num_refusals:
                statuses[await ask(client, rng)] += 1

    await asyncio.gather(*(worker(seed) for seed in range(8)))
    return statuses


def test_a_tenant_that_hangs_up_has_no_more_computed_than_its_limit_and_pays_for_it(
    server: ManyloraServer,
) -> None:
    key, started = limited_key(server, "hurried"), time.monotonic()
    statuses = asyncio.run(until_refused(server, key, 300, hang_up))
    assert statuses[0] > 0 < statuses[200], statuses
    assert set(statuses) <= {0, 200, 429}
    seconds_until_idle(server)
    computed = server.engine()["service_tokens"]["hurried"]
    with server.client(key) as client:
        counted = client.get("/v1/me").json()["used"]["tenant"]["tokens_per_minute"]
        totals = client.get("/v1/usage").json()["totals"]
        aborted = client.get("/v1/usage?status=aborted").json()["totals"]
        events = client.get("/v1/usage/events?limit=1000").json()["data"]
    assert 0 < computed <= minutes_since(started) * LIMIT
    assert aborted["requests"] > 0
    billed = totals["prompt_tokens"] + totals["completion_tokens"]
    assert counted == billed or minutes_since(started) > 1
    # An answer's last token is sampled and never computed again. What is found in the prefix cache is not computed.
    worked = (
        billed - totals["cached_tokens"] - sum(event["completion_tokens"] > 0 for event in events)
    )
    assert len(events) == totals["requests"]
    assert computed == worked


async def chat_openly(client: httpx.AsyncClient, rng: random.Random) -> int:
    messages = [{"role": "user", "content": "hi"}]
    body = {
        "model": DEMO_MODEL.name,
        "messages": messages,
        "ignore_eos": True,
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.5:
        return await read_some(client, "/v1/chat/completions", body, rng.choice([1, 20, 500]))
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code == 200:
        assert '"finish_reason":"length"' in answer.text
    return answer.status_code


def test_chats_without_a_bound_have_no_more_computed_than_the_limit(server: ManyloraServer) -> None:
    key, started = limited_key(server, "talkative"), time.monotonic()
    statuses = asyncio.run(until_refused(server, key, 20, chat_openly))
    assert set(statuses) == {200, 429}, statuses
    seconds_until_idle(server)
    with server.client(key) as client:
        totals = client.get("/v1/usage").json()["totals"]
    most = minutes_since(started) * LIMIT
    assert LIMIT // 4 < totals["prompt_tokens"] + totals["completion_tokens"] <= most
    assert (
        server.engine()["service_tokens"]["talkative"] <= 1.1 * most
    )  # a few steps pass until the engine is told


def test_a_months_quota_knows_what_was_billed_before_the_server_and_the_engine_were_killed(
    tmp_path: Path,
) -> None:
    endless = {
        "model": DEMO_MODEL.name,
        "prompt": [5, 6, 7],
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": True,
    }

    def used(server: ManyloraServer, key: str) -> dict[str, int]:
        with server.client(key) as client:
            me = client.get("/v1/me").json()
        assert me["used"]["tenant"].items() >= me["used"]["key"].items()
        return dict(me["used"]["key"])

    with manylora_server(tmp_path) as server:
        server.tenant("acme")
        key = server.new_key("acme", limits={"tokens_per_month": 100_000, "concurrent_requests": 4})
        with server.client(key) as client:
            assert completion(client, DEMO_MODEL.name, 3, 5).status_code == 200
            with client.stream("POST", "/v1/completions", json=endless) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert used(server, key)["concurrent_requests"] == 1
                engines(server)[0].kill()
                assert any("error" in line for line in lines)
        now = used(server, key)
        totals = server.admin.get("/v1/usage").json()["totals"]
        assert now["concurrent_requests"] == 0
        assert now["tokens_per_month"] == totals["prompt_tokens"] + totals["completion_tokens"] >= 8
        server.process.kill()
        server.process.wait()
    with manylora_server(tmp_path) as server:
        assert used(server, key)["tokens_per_month"] == now["tokens_per_month"]
