from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import aiohttp
import httpx
import orjson
import pytest

from api_server import ADMIN_KEY, connect, eventually
from fake_cluster import FakeCluster, FakeGateway
from manylora.adapters.blobs.local import CORRUPT
from manylora.errors import CapacityError
from manylora.registry.records import RETRIED, UsageQuery
from manylora.server.cluster import gateway as gateways
from manylora.server.cluster import links, loads
from manylora.server.cluster.forwarding import MAX_TRIES
from manylora.server.cluster.router import Router
from manylora.server.cluster.wire import LEDGER_ID
from manylora.server.errors import error_body
from manylora.server.http.body import json_bytes
from raw_http import head_of
from registry_samples import facts, publish_version
from scripted_replica import (
    LAST_CHUNK,
    SSE_HEAD,
    Got,
    Script,
    ScriptedReplica,
    chunk,
    framed,
    json_answer,
    scripted,
)

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
ASK = {"model": "demo", "prompt": "x"}
STREAM = {**ASK, "stream": True}
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
NEVER = 3600
EVER = UsageQuery(start=datetime(2000, 1, 1, tzinfo=UTC), end=datetime(2100, 1, 1, tzinfo=UTC))


def event(number: int) -> bytes:
    return b'data: {"n":%d}\n\n' % number


DONE = b"data: [DONE]\n\n"
FRAMES = [framed(event(number), prompt=7, cached=2, completion=number) for number in (1, 2, 3)]
GOOD = SSE_HEAD + b"".join(FRAMES) + framed(DONE, 7, 2, 3) + LAST_CHUNK
TEXT = event(1) + event(2) + event(3) + DONE
NOTHING_SEEN = {
    "before the head": b"",
    "in the head": SSE_HEAD[:20],
    "after the head": SSE_HEAD,
    "in the header of the first frame": SSE_HEAD + chunk(b"\0\0"),
    "in the first frame": SSE_HEAD + FRAMES[0][:-12],
    "in the body of a whole answer": json_answer(200, b"{}")[:-12],
}
SOMETHING_SEEN = {
    "between frames": (SSE_HEAD + FRAMES[0] + FRAMES[1], event(1) + event(2), 2),
    "in a frame": (SSE_HEAD + FRAMES[0] + FRAMES[1] + FRAMES[2][:-12], event(1) + event(2), 2),
    "before the end of the chunks": (GOOD[: -len(LAST_CHUNK)], TEXT, 3),
}


def says(*answers: bytes) -> Script:
    """The answers one after the other, by whichever replica is asked; then the connection is closed."""
    rest = list(answers)

    async def script(_: Got, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(rest.pop(0))

    return script


async def raw(url: str, sent: bytes) -> bytes:
    """What comes back until the connection is closed."""
    reader, writer = await connect(url)
    try:
        writer.write(sent)
        return await reader.read()
    finally:
        writer.close()


def ledger_ids(*replicas: ScriptedReplica) -> set[str]:
    return {
        value
        for each in replicas
        for got in each.got
        for value in got.header("x-manylora-ledger-id")
    }


def asked(replicas: dict[str, ScriptedReplica]) -> list[Got]:
    return [got for each in replicas.values() for got in each.got]


@pytest.fixture
async def client(cluster: FakeCluster, gateway: FakeGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway.client(await cluster.key("acme")) as opened:
        yield opened


async def num_requests(cluster: FakeCluster) -> int:
    """How many requests usage has."""
    return (await cluster.registry.usage.query(EVER)).totals.requests


def error_of(text: str) -> Any:
    """The last event, which is an error."""
    return json.loads(text.rstrip().rsplit("data: ", 1)[1])


@pytest.mark.parametrize("moment", NOTHING_SEEN)
async def test_a_replica_that_dies_before_the_client_sees_anything_is_replaced(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient, moment: str
) -> None:
    async with scripted(cluster, says(NOTHING_SEEN[moment], GOOD), "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        answer = await client.post(COMPLETIONS, json=STREAM)
        assert (answer.status_code, answer.content) == (200, TEXT)
        assert [len(each.got) for each in replicas.values()] == [1, 1]
        assert len({got.body for got in asked(replicas)}) == 1
        first, second = sorted(ledger_ids(*replicas.values()))
    assert await gateway.counts() == {"retries": 1, "lost_answers": 0}
    (lost,) = await cluster.events(gateway.registry)
    assert lost.id == first != second, "whatever the lost replica writes counts nothing"
    assert (lost.status, lost.prompt_tokens, lost.completion_tokens) == ("retried", 0, 0)
    assert await num_requests(cluster) == 0, "the replica that answers records the request"


async def test_a_replica_that_is_never_reached_has_nothing_to_bill(
    cluster: FakeCluster,
    gateway: FakeGateway,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    post, names = aiohttp.ClientSession.post, list[str]()

    def refuse_first(session: aiohttp.ClientSession, url: Any, **options: Any) -> Any:
        names.append(str(url))
        return post(session, "http://127.0.0.1:1" if len(names) == 1 else url, **options)

    monkeypatch.setattr(aiohttp.ClientSession, "post", refuse_first)
    async with scripted(cluster, says(GOOD), "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        assert (await client.post(COMPLETIONS, json=STREAM)).content == TEXT
        assert (len(names), len(asked(replicas))) == (2, 1)
    assert await cluster.events(gateway.registry) == []


@pytest.mark.parametrize("moment", SOMETHING_SEEN)
async def test_a_replica_that_dies_in_the_answer_ends_it_with_an_error_and_the_client_pays_what_it_got(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient, moment: str
) -> None:
    sent, seen, completion = SOMETHING_SEEN[moment]
    async with scripted(cluster, says(sent), "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        answer = await client.post(COMPLETIONS, json=STREAM, headers={"x-request-id": "mine"})
        assert answer.content.startswith(seen)
        assert error_of(answer.text[len(seen) :])["error"]["code"] == "replica_lost"
        assert len(asked(replicas)) == 1
        (billed,) = await cluster.events(gateway.registry)
        assert {billed.id} == ledger_ids(*replicas.values())
    assert (billed.prompt_tokens, billed.cached_tokens, billed.completion_tokens) == (
        7,
        2,
        completion,
    )
    assert (billed.tenant, billed.status, billed.endpoint, billed.request_id) == (
        "acme",
        "error",
        COMPLETIONS,
        "mine",
    )
    assert await gateway.counts() == {"retries": 0, "lost_answers": 1}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/messages", "overloaded_error"),
        ("/v1/responses", "error"),
        ("/v1/chat/completions", None),
    ],
)
async def test_the_error_in_an_answer_is_an_event_of_its_api(
    cluster: FakeCluster,
    gateway: FakeGateway,
    client: httpx.AsyncClient,
    path: str,
    kind: str | None,
) -> None:
    async with scripted(cluster, says(SSE_HEAD + FRAMES[0]), "one"):
        await gateway.sees(one="ready")
        answer = await client.post(path, json=STREAM)
    told = error_of(answer.text)
    if kind is None:
        assert "event:" not in answer.text
        assert told["error"]["code"] == "replica_lost"
    else:
        assert answer.text.count("event: error\n") == 1
        assert told["type"] == "error"
        assert (told["error"]["type"] if path == "/v1/messages" else told["type"]) == kind


async def test_a_request_whose_replicas_are_all_lost_is_an_error_that_costs_nothing(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    async with scripted(
        cluster, says(*[SSE_HEAD] * (MAX_TRIES + 1)), "one", "two", "three", "four"
    ) as replicas:
        await gateway.sees(**dict.fromkeys(replicas, "ready"))
        answer = await client.post(COMPLETIONS, json=STREAM)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
        assert answer.headers["retry-after"] == "1"
        assert (
            [len(each.got) for each in replicas.values()].count(1)
            == len(asked(replicas))
            == MAX_TRIES
        )
        billed = await cluster.events(gateway.registry)
        assert sorted(each.id for each in billed) == sorted(ledger_ids(*replicas.values()))
    assert sorted(each.status for each in billed) == ["error", *["retried"] * (MAX_TRIES - 1)]
    assert {(each.prompt_tokens, each.completion_tokens) for each in billed} == {(0, 0)}
    assert await num_requests(cluster) == 1


async def test_the_budget_of_retries_is_kept(
    cluster: FakeCluster,
    gateway: FakeGateway,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Router, "may_retry", lambda _: False)
    async with scripted(cluster, says(b"", GOOD), "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        answer = await client.post(COMPLETIONS, json=STREAM)
        assert (answer.status_code, len(asked(replicas))) == (503, 1)
    assert await gateway.counts() == {"retries": 0, "lost_answers": 0}


async def test_a_refusal_for_now_makes_another_replica_answer(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    async with scripted(cluster, says(json_answer(503, b"{}"), GOOD), "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        assert (await client.post(COMPLETIONS, json=STREAM)).content == TEXT
        assert len(asked(replicas)) == 2


@pytest.mark.parametrize(("status", "code"), [(507, "storage.full"), (503, "storage.unavailable")])
async def test_a_replica_that_cannot_record_usage_is_asked_no_more_for_a_while_and_bills_nothing(
    cluster: FakeCluster,
    gateway: FakeGateway,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
) -> None:
    monkeypatch.setattr(loads, "FIRST_EJECTION_S", 60.0)
    broken = json_answer(
        status, orjson.dumps(error_body(CapacityError("The disk is full.", code=code)))
    )
    async with scripted(cluster, says(broken, *[GOOD] * 6), "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        for number in range(6):
            assert (
                await client.post(COMPLETIONS, json={**STREAM, "prompt": f"{number}"})
            ).content == TEXT
        assert sorted(len(each.got) for each in replicas.values()) == [1, 6]
        (first,) = next(each.got for each in replicas.values() if len(each.got) == 1)
    (billed,) = await cluster.events(gateway.registry)  # overrules what the first may yet write
    assert (billed.id, billed.status, billed.completion_tokens) == (
        first.header(LEDGER_ID)[0],
        RETRIED,
        0,
    )
    assert await gateway.counts() == {"retries": 1, "lost_answers": 0}


@pytest.mark.parametrize(
    "code", ["adapter_load_failed", "adapter_blob_missing", CORRUPT, "db.unavailable", "db.lost"]
)
async def test_a_refusal_that_all_replicas_would_repeat_is_final(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient, code: str
) -> None:
    body = orjson.dumps(error_body(CapacityError("Not now.", code=code)))
    async with scripted(cluster, says(json_answer(503, body), GOOD), "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        answer = await client.post(COMPLETIONS, json=STREAM)
        assert (answer.status_code, answer.content, len(asked(replicas))) == (503, body, 1)
    assert await gateway.counts() == {"retries": 0, "lost_answers": 0}


async def test_a_body_is_not_kept_while_its_answer_streams(
    cluster: FakeCluster,
    gateway: FakeGateway,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies = list[bytes]()
    is_seen = asyncio.Event()

    async def kept(*args: Any) -> bytes:
        bodies.append(await json_bytes(*args))
        return bodies[0]

    async def wait(_: Got, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + FRAMES[0])
        await is_seen.wait()
        writer.write(FRAMES[1] + FRAMES[2] + framed(DONE, 7, 2, 3) + LAST_CHUNK)

    monkeypatch.setattr(gateways, "json_bytes", kept)
    async with scripted(cluster, wait, "one"):
        await gateway.sees(one="ready")
        async with client.stream(
            "POST", COMPLETIONS, json={**STREAM, "user": "x" * (1 << 16)}
        ) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == event(1)
            await eventually(
                lambda: sys.getrefcount(bodies[0]) == 2
            )  # the list's, and the argument
            is_seen.set()
            assert event(1) + b"".join([piece async for piece in pieces]) == TEXT


async def test_where_all_refuse_the_client_gets_a_refusal_as_it_came(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    body, headers = (
        b'{"error":{"code":"overloaded"}}',
        (("retry-after", "9"), ("x-manylora-other", "kept")),
    )
    async with scripted(cluster, says(*[json_answer(503, body, *headers)] * 2), "one", "two"):
        await gateway.sees(one="ready", two="ready")
        answer = await client.post(COMPLETIONS, json=STREAM)
    assert (answer.status_code, answer.content) == (503, body)
    assert (answer.headers["retry-after"], answer.headers["x-manylora-other"]) == ("9", "kept")
    assert answer.headers["content-length"] == str(len(body))
    assert "x-manylora-length" not in answer.headers


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500])
async def test_other_errors_are_final(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient, status: int
) -> None:
    async with scripted(cluster, says(json_answer(status, b"{}")), "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        answer = await client.post(COMPLETIONS, json=STREAM)
        assert (answer.status_code, answer.content, len(asked(replicas))) == (status, b"{}", 1)


async def test_an_answer_without_frames_is_passed_on(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    """The HTTP layer of a replica refuses heads that are too long before anything else sees them."""
    raw = b'HTTP/1.1 431 x\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n{"error":"no"}'
    async with scripted(cluster, says(raw), "one"):
        await gateway.sees(one="ready")
        answer = await client.post(COMPLETIONS, json=STREAM)
    assert (answer.status_code, answer.content) == (431, b'{"error":"no"}')


async def test_without_a_ready_replica_the_error_says_when_to_come_again(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    async with scripted(cluster, says(), "one") as replicas:
        await gateway.sees(one="ready")
        for state in ("draining", "down"):
            replicas["one"].state = state
            await gateway.sees(one=state)
            others = ("/v1/models", "/ready") if state == "draining" else ("/ready",)
            for path, method in ((COMPLETIONS, "POST"), *((other, "GET") for other in others)):
                answer = await client.request(method, path, json=ASK if method == "POST" else None)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
                assert answer.headers["retry-after"] == "1"
        assert asked(replicas) == []


async def test_a_replica_without_its_engine_answers_what_needs_none(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    async with scripted(cluster, says(raw), "one") as replicas:
        replicas["one"].state = "down"
        await gateway.sees(one="down")
        assert (await client.post(COMPLETIONS, json=ASK)).json()["error"]["code"] == "no_replica"
        assert (await client.get("/v1/models")).json() == {}
        assert [got.line for got in asked(replicas)] == ["GET /v1/models HTTP/1.1"]


@pytest.mark.parametrize("sent", [b"", SSE_HEAD, SSE_HEAD + FRAMES[0]])
async def test_a_replica_that_hangs_is_given_up_when_its_reports_stop(
    cluster: FakeCluster,
    client: httpx.AsyncClient,
    gateway: FakeGateway,
    monkeypatch: pytest.MonkeyPatch,
    sent: bytes,
) -> None:
    monkeypatch.setattr(links, "SILENT_S", 0.5)

    async def hang_once(got: Got, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(asked(replicas)) > 1:
            writer.write(GOOD)
            return
        writer.write(sent)
        replicas[got.by].is_silent = True
        await asyncio.sleep(NEVER)

    async with scripted(cluster, hang_once, "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        answer = await client.post(COMPLETIONS, json=STREAM)
        silent = next(name for name, each in replicas.items() if each.is_silent)
        await gateway.sees(**{name: "ready" for name in replicas if name != silent})
    if sent.endswith(FRAMES[0]):
        assert answer.content.startswith(event(1))
        assert error_of(answer.text)["error"]["code"] == "replica_lost"
    else:
        assert answer.content == TEXT


async def test_what_a_drained_replica_has_sent_still_reaches_its_client(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    """Its end is no loss: bytes are still on their way to a client that reads slowly."""
    is_over = asyncio.Event()

    async def on_its_way(_: Got, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + FRAMES[0])
        await is_over.wait()
        writer.write(GOOD[len(SSE_HEAD + FRAMES[0]) :])

    async with scripted(cluster, on_its_way, "one") as replicas:
        await gateway.sees(one="ready")
        async with client.stream("POST", COMPLETIONS, json=STREAM) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == event(1)
            replicas["one"].state = "draining"
            await gateway.sees(one="draining")
            replicas["one"].ends_reports = True
            await gateway.sees()
            is_over.set()
            assert event(1) + b"".join([piece async for piece in pieces]) == TEXT
    assert await gateway.counts() == {"retries": 0, "lost_answers": 0}


@pytest.mark.parametrize("sent", [b"", SSE_HEAD + FRAMES[0]])
async def test_a_client_that_leaves_ends_the_exchange(
    cluster: FakeCluster, gateway: FakeGateway, sent: bytes
) -> None:
    is_over = asyncio.Event()

    async def until_left(
        _: Got, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(sent)
        assert await reader.read() == b""
        is_over.set()

    key = await cluster.key("acme")
    async with scripted(cluster, until_left, "one") as replicas:
        await gateway.sees(one="ready")
        body = json.dumps(STREAM).encode()
        reader, writer = await connect(gateway.url)
        writer.write(head_of("POST", COMPLETIONS, key, Content_Length=str(len(body))) + body)
        await eventually(lambda: asked(replicas))
        if sent:
            await reader.readuntil(event(1))
        writer.close()
        async with asyncio.timeout(60):
            await is_over.wait()
        await eventually(lambda: not gateway.drain.num_running)
    assert await gateway.counts() == {"retries": 0, "lost_answers": 0}
    assert await cluster.events(gateway.registry) == [], "the replica bills what it computed"


async def test_a_client_that_leaves_within_its_body_is_never_passed_on(
    cluster: FakeCluster, gateway: FakeGateway
) -> None:
    key = await cluster.key("acme")
    async with scripted(cluster, says(GOOD), "one") as replicas:
        await gateway.sees(one="ready")
        _, writer = await connect(gateway.url)
        writer.write(head_of("POST", COMPLETIONS, key, Content_Length="100") + b'{"model":')
        await eventually(lambda: gateway.drain.num_running)
        writer.close()
        await eventually(lambda: not gateway.drain.num_running)
        assert asked(replicas) == []


def slow_socket(url: str) -> socket.socket:
    address = httpx.URL(url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((address.host, address.port))
    sock.setblocking(False)
    return sock


async def test_a_client_that_does_not_read_stops_the_replica_and_pays_what_it_reads_before_that_is_lost(
    cluster: FakeCluster, gateway: FakeGateway
) -> None:
    """64 KiB an event: the gateway holds few of them, and what it has taken reaches the client after all."""
    written, most = 0, 64 << 20
    is_blocked = asyncio.Event()

    async def flood(_: Got, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(SSE_HEAD)
        for number in range(1, 1024):
            payload = event(number)[:-2] + b" " * (65536 - len(event(number))) + b"\n\n"
            writer.write(framed(payload, 7, 0, number))
            written += len(payload)
            try:
                async with asyncio.timeout(1):
                    await writer.drain()
            except TimeoutError:
                is_blocked.set()
                return

    key = await cluster.key("acme")
    body = json.dumps(STREAM).encode()
    async with scripted(cluster, flood, "one") as replicas:
        await gateway.sees(one="ready")
        sock = slow_socket(gateway.url)
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 10)
        writer.write(head_of("POST", COMPLETIONS, key, Content_Length=str(len(body))) + body)
        async with asyncio.timeout(120):
            await is_blocked.wait()
            assert written < most / 2
            replicas["one"].die()
            got = await reader.read()
        writer.close()
    (billed,) = await cluster.events(gateway.registry)
    assert b"replica_lost" in got
    assert got.count(b'{"n":') == billed.completion_tokens > 1


async def test_a_gateway_that_drains_refuses_what_is_new_and_ends_streams_at_its_limit(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    async def slow(_: Got, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + FRAMES[0])
        await asyncio.sleep(NEVER)

    async with scripted(cluster, slow, "one"):
        await gateway.sees(one="ready")
        async with client.stream("POST", COMPLETIONS, json=STREAM) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == event(1)
            draining = asyncio.create_task(gateway.drain.drain(1.0))
            await eventually(lambda: gateway.drain.is_draining)
            for path in (COMPLETIONS, "/v1/models", "/ready"):
                method = "POST" if path == COMPLETIONS else "GET"
                refused = await client.request(method, path, json=ASK if method == "POST" else None)
                assert (refused.status_code, refused.json()["error"]["code"]) == (
                    503,
                    "server.draining",
                )
            assert (await client.get("/health")).status_code == 200
            rest = b"".join([piece async for piece in pieces])
        assert error_of(rest.decode())["error"]["code"] == "server.draining"
        assert await draining == 1
    (billed,) = await cluster.events(gateway.registry)
    assert (billed.status, billed.prompt_tokens, billed.completion_tokens) == ("error", 7, 1), (
        "what the client got"
    )


async def test_a_gateway_that_drains_finishes_what_runs(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    is_draining = asyncio.Event()

    async def slow(_: Got, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GOOD[:-100])
        await is_draining.wait()
        writer.write(GOOD[-100:])

    async with scripted(cluster, slow, "one") as replicas:
        await gateway.sees(one="ready")
        running = asyncio.create_task(client.post(COMPLETIONS, json=STREAM))
        await eventually(lambda: asked(replicas))
        draining = asyncio.create_task(gateway.drain.drain(NEVER))
        is_draining.set()
        assert (await running).content == TEXT
        assert await draining == 0


async def test_a_replica_gets_what_the_client_sent_without_what_is_between_the_servers(
    cluster: FakeCluster, gateway: FakeGateway
) -> None:
    key = await cluster.key("acme")
    body = b' {"model": "demo",  "prompt": "\xc3\xa9", "odd": [1e3] } '
    given = {
        "X-Manylora-Cluster": "forged",
        "X-Manylora-Ledger-Id": "use_forged",
        "X-Manylora-Weight-Share": "0.5",
        "X-Manylora-Sticky": "forged",
        "X-Manylora-Length": "3",
        "X-Request-Id": "mine",
        "Te": "trailers",
        "Proxy-Authorization": "Basic x",
        "X-Session-Id": "s",
        "X-Twice": "1",
        "Cookie": "a=b; c=d",
        "Accept": "text/event-stream",
        "User-Agent": "mine/1",
    }
    async with scripted(cluster, says(GOOD), "one") as replicas:
        await gateway.sees(one="ready")
        head = head_of(
            "POST", f"{COMPLETIONS}?a=%2F+%20&a=2", key, Content_Length=str(len(body)), **given
        )
        answer = await raw(gateway.url, head[:-2] + b"x-twice: 2\r\n\r\n" + body)
        (got,) = asked(replicas)
    assert got.line == f"POST {COMPLETIONS}?a=%2F+%20&a=2 HTTP/1.1"
    assert got.body == body
    for name in (
        "x-manylora-cluster",
        "x-manylora-ledger-id",
        "x-manylora-weight-share",
        "x-manylora-sticky",
    ):
        assert len(got.header(name)) == 1
        assert "forged" not in got.header(name)[0]
    assert got.header("x-manylora-weight-share") != ["0.5"]
    assert (
        got.header("x-manylora-length")
        == got.header("te")
        == got.header("proxy-authorization")
        == []
    )
    assert got.header("x-request-id") == ["mine"]
    assert got.header("x-twice") == ["1", "2"]
    assert got.header("host") == ["x"]
    assert (got.header("cookie"), got.header("user-agent"), got.header("accept-encoding")) == (
        ["a=b; c=d"],
        ["mine/1"],
        [],
    )
    assert got.header("authorization") == [f"Bearer {key}"]
    assert answer.lower().count(b"x-request-id: mine\r\n") == 1
    assert b"x-manylora-cluster" not in answer.lower()


@pytest.mark.parametrize(
    "target",
    [
        "/v1/adapters/a%2Fb/versions?x=%zz&y=a+b",
        "/v1/./../adapters//x",
        "/v1/%2e%2e/%41;p=1",
        "//elsewhere.example/v1/models",
        "/v1/models?server=one&next=http://elsewhere.example",
    ],
)
async def test_paths_and_queries_are_passed_on_as_they_came(
    cluster: FakeCluster, gateway: FakeGateway, target: str
) -> None:
    key = await cluster.key("acme")
    async with scripted(cluster, says(PLAIN), "one") as replicas:
        await gateway.sees(one="ready")
        await raw(gateway.url, head_of("GET", target, key))
        (got,) = asked(replicas)
    assert got.line == f"GET {target} HTTP/1.1"


@pytest.mark.parametrize(
    "user",
    ["a\r\nx-manylora-weight-share: 0.001\r\n\r\nGET /", "\u4e2d\u00e9", "x" * 100_000, "\0"],
)
async def test_a_user_is_no_way_into_the_head_of_a_request(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient, user: str
) -> None:
    async with scripted(cluster, says(GOOD, GOOD, GOOD), "one") as replicas:
        await gateway.sees(one="ready")
        for each in (user, user, user + "2"):
            assert (await client.post(COMPLETIONS, json={**STREAM, "user": each})).content == TEXT
        first, again, other = [got.header("x-manylora-sticky") for got in asked(replicas)]
    assert first == again != other
    assert len(first) == 1
    assert first[0].isascii()
    assert first[0].isalnum()
    assert len(first[0]) <= 64


@pytest.mark.parametrize(
    "selector", ["sql", "sql@1", "demo:sql", "sql@{digest}", "demo:sql@{digest}"]
)
async def test_the_adapter_of_a_lost_answer_is_billed(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient, selector: str
) -> None:
    tenant = await cluster.registry.tenants.get_tenant("acme")
    _, version, _ = await publish_version(cluster.registry, tenant.id, "sql", facts("weights"))
    async with scripted(cluster, says(SSE_HEAD + FRAMES[0]), "one"):
        await gateway.sees(one="ready")
        model = selector.format(digest=version.digest)
        await client.post(COMPLETIONS, json={**STREAM, "model": model})
    (billed,) = await cluster.events(gateway.registry)
    assert (billed.adapter, billed.adapter_version, billed.adapter_digest) == (
        "sql",
        1,
        version.digest,
    )


async def test_a_gateway_takes_no_more_for_a_name_than_a_replica_does(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    tenant = await cluster.registry.tenants.get_tenant("acme")
    await publish_version(cluster.registry, tenant.id, "sql", facts("weights"))
    async with scripted(cluster, says(SSE_HEAD + FRAMES[0]), "one"):
        await gateway.sees(one="ready")
        await client.post(COMPLETIONS, json={**STREAM, "model": "other:sql"})
    (billed,) = await cluster.events(gateway.registry)
    assert (billed.adapter, billed.adapter_digest) == (None, None)


@pytest.mark.parametrize(("query", "model"), [("?tenant=acme", "sql"), ("", "acme/sql")])
async def test_an_admin_acts_for_a_tenant(
    cluster: FakeCluster, gateway: FakeGateway, query: str, model: str
) -> None:
    tenant = await cluster.registry.tenants.create_tenant("acme")
    _, version, _ = await publish_version(cluster.registry, tenant.id, "sql", facts("weights"))
    async with (
        scripted(cluster, says(SSE_HEAD + FRAMES[0]), "one"),
        gateway.client(ADMIN_KEY) as admin,
    ):
        await gateway.sees(one="ready")
        await admin.post(COMPLETIONS + query, json={**STREAM, "model": model})
    (billed,) = await cluster.events(gateway.registry)
    assert (billed.tenant, billed.key_id) == (("acme" if query else None), None)
    assert billed.adapter_digest == version.digest


async def test_without_authentication_requests_are_routed_and_billed_as_the_default_tenants(
    cluster: FakeCluster,
) -> None:
    tenant = await cluster.registry.tenants.create_tenant("default")
    _, version, _ = await publish_version(cluster.registry, tenant.id, "sql", facts("weights"))
    gateway = await cluster.gateway("open", auth="off")
    broken = SSE_HEAD + FRAMES[0]
    async with (
        scripted(cluster, says(*[GOOD] * 8, broken), "one", "two") as replicas,
        gateway.client(None) as client,
    ):
        await gateway.sees(one="ready", two="ready")
        for number in range(9):
            await client.post(COMPLETIONS, json={**STREAM, "model": "sql", "prompt": f"{number}"})
        assert sorted(len(each.got) for each in replicas.values()) == [0, 9]
    (billed,) = await cluster.events(gateway.registry)
    assert (billed.tenant_id, billed.tenant) == (tenant.id, "default")
    assert (billed.adapter, billed.adapter_digest, billed.key_id) == ("sql", version.digest, None)


async def test_usage_that_cannot_be_recorded_still_ends_the_stream_with_its_error(
    cluster: FakeCluster,
    gateway: FakeGateway,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full(_: object) -> None:
        raise CapacityError("The disk is full.", code="storage.full")

    monkeypatch.setattr(gateway.registry.usage, "record", full)
    async with scripted(cluster, says(SSE_HEAD + FRAMES[0]), "one"):
        await gateway.sees(one="ready")
        answer = await client.post(COMPLETIONS, json=STREAM)
    assert error_of(answer.text)["error"]["code"] == "replica_lost"


async def test_an_ephemeral_adapter_is_asked_only_of_the_server_that_holds_it(
    cluster: FakeCluster,
    gateway: FakeGateway,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tenant = await cluster.registry.tenants.get_tenant("acme")
    await publish_version(cluster.registry, tenant.id, "sql", facts("weights"))
    resolve = gateway.registry.adapters.resolve

    async def held(*args: Any) -> Any:
        adapter, found = await resolve(*args)
        return adapter, replace(found, held_by="two")

    monkeypatch.setattr(gateway.registry.adapters, "resolve", held)
    async with scripted(cluster, says(*[GOOD] * 8), "one", "two", "three") as replicas:
        await gateway.sees(one="ready", two="ready", three="ready")
        for number in range(8):
            await client.post(COMPLETIONS, json={**STREAM, "model": "sql", "prompt": f"{number}"})
        assert [len(each.got) for each in replicas.values()] == [0, 8, 0]
        replicas["two"].state = "draining"
        await gateway.sees(one="ready", two="draining", three="ready")
        refused = await client.post(COMPLETIONS, json={**STREAM, "model": "sql"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")


@pytest.mark.parametrize(
    "server", ["http://elsewhere.example", "nobody", "", "one@elsewhere.example"]
)
async def test_a_server_can_be_named_only_if_it_is_listed(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient, server: str
) -> None:
    async with scripted(cluster, says(json_answer(200, b"{}")), "one") as replicas:
        await gateway.sees(one="ready")
        answer = await client.get("/v1/models", params={"server": server})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "server")
        assert asked(replicas) == []


async def test_an_answer_of_another_route_that_breaks_is_cut_off(
    cluster: FakeCluster,
    gateway: FakeGateway,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "SILENT_S", 0.5)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 100\r\n\r\nhalf"

    async def script(got: Got, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head if "half" in got.line else b"")
        if "hang" in got.line:
            replicas["one"].is_silent = True
            await asyncio.sleep(NEVER)

    async with scripted(cluster, script, "one") as replicas:
        for path in ("/v1/half", "/v1/half-hang"):
            await gateway.sees(one="ready")
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(path)
    async with scripted(cluster, script, "one") as replicas:
        for path in ("/v1/none", "/v1/none-hang"):
            await gateway.sees(one="ready")
            answer = await client.post(path, content=b"x")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
