"""An API that generates is one folder and one line: what servers and gateways do with it follows from its facts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, get_args

import httpx
import pytest
from fastapi import APIRouter

from api_server import BASE
from fake_cluster import FakeCluster, FakeGateway
from manylora.server.apis import FACTS as FACTS_OF_ALL
from manylora.server.batches.schemas import BatchBody
from manylora.server.generation import routes
from manylora.server.generation.routes import post
from manylora.server.generation.run import GenerationRun
from manylora.server.generation.schemas import CompletionBody, CompletionView
from manylora.server.http.route_facts import OPENAI, ROUTES, RouteFacts, declare
from scripted_replica import LAST_CHUNK, SSE_HEAD, Got, framed, scripted

pytestmark = pytest.mark.anyio
NEW = "/v1/continuations"
UNDECLARED = "/v1/elsewhere"
FACTS: dict[str, Any] = {
    "generates": True,
    "is_for_all_replicas": False,
    "in_batches": True,
    "errors": OPENAI,
}


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test end with it."""
    for table in (ROUTES, routes.endpoints):
        monkeypatch.setitem(table, NEW, None)
        del table[NEW]


def facts_with(**changed: Any) -> RouteFacts:
    return RouteFacts(path=NEW, **{**FACTS, **changed})


def serve(facts: RouteFacts) -> APIRouter:
    """The routes of a new API."""
    router = APIRouter()

    @post(router, facts, CompletionBody, CompletionView)
    async def proceed(run: GenerationRun, body: CompletionBody) -> None:
        """Go on."""
        await run.prepare(body)

    return router


def dying_once(answer: bytes) -> Callable[..., Any]:
    """A script: the replica that is asked first dies, and the next one answers."""
    answers = [b"", answer]

    async def script(_: Got, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))

    return script


@pytest.mark.parametrize("forgotten", FACTS)
def test_a_route_that_forgets_a_fact_has_none(forgotten: str) -> None:
    known = {name: value for name, value in FACTS.items() if name != forgotten}
    with pytest.raises(TypeError, match=forgotten):
        RouteFacts(path=NEW, **known)


def test_a_route_that_generates_cannot_be_registered_without_declared_facts() -> None:
    with pytest.raises(ValueError, match=NEW):
        serve(facts_with())
    silent = declare(facts_with(generates=False, in_batches=False))
    with pytest.raises(ValueError, match="generates=True"):
        serve(silent)
    assert NEW not in routes.endpoints


def test_facts_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="in_batches=False"):
        declare(facts_with(generates=False))
    declare(facts_with())
    with pytest.raises(ValueError, match="twice"):
        declare(facts_with())


def test_batches_may_name_what_facts_say() -> None:
    named = get_args(BatchBody.model_fields["endpoint"].annotation)
    assert set(named) == {path for path, facts in FACTS_OF_ALL.items() if facts.in_batches}
    assert set(named) <= routes.endpoints.keys()


async def test_a_gateway_tries_another_replica_for_a_new_api_and_bills_what_was_lost(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    declare(facts_with())
    event = b"data: {}\n\n"
    good = SSE_HEAD + framed(event, prompt=7, cached=2, completion=1) + LAST_CHUNK
    async with scripted(cluster, dying_once(good), "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        answer = await client.post(NEW, json={"model": "demo", "stream": True})
        assert (answer.status_code, answer.content) == (200, event)
        assert [len(each.got) for each in replicas.values()] == [1, 1]
    assert await gateway.counts() == {"retries": 1, "lost_answers": 0}
    (lost,) = await cluster.events(gateway.registry)
    assert (lost.status, lost.endpoint, lost.tenant) == ("retried", NEW, "acme")


async def test_a_gateway_does_not_try_again_what_no_facts_say_of(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    async with scripted(cluster, dying_once(b""), "one", "two"):
        await gateway.sees(one="ready", two="ready")
        answer = await client.post(UNDECLARED, json={"model": "demo"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert await gateway.counts() == {"retries": 0, "lost_answers": 0}
    assert await cluster.events(gateway.registry) == []


async def test_a_replica_serves_and_bills_a_new_api_behind_a_gateway(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    router = serve(declare(facts_with()))
    replica = await cluster.replica("one")
    replica.api.app.router.routes.extend(router.routes)
    await gateway.sees(one="ready")
    answer = await client.post(NEW, json={"model": BASE, "prompt": "x", "max_tokens": 3})
    usage = answer.json()["usage"]
    (billed,) = await cluster.events(gateway.registry)
    assert (billed.endpoint, billed.status) == (NEW, "length")
    assert (billed.prompt_tokens, billed.completion_tokens) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert usage["completion_tokens"] == 3
