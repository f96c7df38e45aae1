"""What clients get through a gateway is what they would get of the replica, and it is billed once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from api_adapters import sound, upload
from api_server import ADMIN_KEY, connect, eventually
from fake_cluster import FakeCluster, FakeGateway, FakeReplica
from manylora.engine.status import EngineReady
from raw_http import chunked, form, head_of, upload_head

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
ASK = {"model": "demo", "prompt": "x"}
STREAM = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
LONG = {**STREAM, "max_tokens": 200, "ignore_eos": True}
LIMIT = 64 * 1024
KEPT = (
    "content-type",
    "content-length",
    "www-authenticate",
    "allow",
    "retry-after",
    "cache-control",
    "vary",
)


@pytest.fixture
async def replica(cluster: FakeCluster) -> FakeReplica:
    return await cluster.replica("one", max_body_bytes=LIMIT)


@pytest.fixture
async def gateway(cluster: FakeCluster, replica: FakeReplica) -> FakeGateway:
    gateway = await cluster.gateway(max_body_bytes=LIMIT)
    await gateway.sees(one="ready")
    return gateway


class RawClient:
    """One connection, over which a test writes what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> tuple[int, dict[str, list[str]], bytes]:
        """Status, headers and body of the next answer."""
        line, *lines = (
            (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        )
        headers: dict[str, list[str]] = {}
        for each in lines:
            name, _, value = each.partition(": ")
            headers.setdefault(name.lower(), []).append(value)
        status, body = int(line.split()[1]), b""
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"][0]))
        return status, headers, body


async def raw_client(url: str) -> RawClient:
    return RawClient(*await connect(url))


async def said(url: str, sent: Iterable[bytes]) -> bytes:
    """What comes back until the connection is closed."""
    reader, writer = await connect(url)
    try:
        for piece in sent:
            writer.write(piece)
            await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def post(body: bytes, key: str | None, path: str = COMPLETIONS, **headers: str) -> bytes:
    given = {"Content_Type": "application/json", "Content_Length": str(len(body)), **headers}
    return head_of("POST", path, key, **given) + body


REFUSED: dict[str, Any] = {
    "no key": lambda _: post(b"{}", None),
    "a wrong key": lambda _: post(b"{}", "manylora_wrong"),
    "malformed JSON": lambda key: post(b'{"model": ', key),
    "no object": lambda key: post(b"[]", key),
    "not UTF-8": lambda key: post(b'{"model": "\xff"}', key),
    "duplicate keys": lambda key: post(b'{"model": "demo", "model": "demo", "prompt": "x"}', key),
    "a deep body": lambda key: post(
        b'{"model":"demo","prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}", key
    ),
    "a lone surrogate": lambda key: post(
        b'{"model": "demo", "prompt": "x", "user": "\\ud800"}', key
    ),
    "a model that is no text": lambda key: post(b'{"model": 5, "prompt": "x"}', key),
    "an unknown model": lambda key: post(b'{"model": "none", "prompt": "x"}', key),
    "an unknown field": lambda key: post(b'{"model": "demo", "prompt": "x", "odd": 1}', key),
    "a compressed body": lambda key: post(b"{}", key, Content_Encoding="gzip"),
    "another content type": lambda key: post(b"{}", key, Content_Type="text/plain"),
    "a huge body": lambda key: head_of("POST", COMPLETIONS, key, Content_Length=str(LIMIT + 1)),
    "an unknown route": lambda key: post(b"{}", key, "/v1/nothing"),
    "another method": lambda key: head_of("GET", COMPLETIONS, key),
    "an anthropic error": lambda key: post(b"{}", key, "/v1/messages"),
    "a responses error": lambda key: post(b"{}", key, "/v1/responses"),
    "a tenant of others": lambda key: post(
        json.dumps(ASK).encode(), key, COMPLETIONS + "?tenant=other"
    ),
    "no HTTP": lambda _: b"\0\0\0\0\r\n\r\n",
    "a long head": lambda key: head_of("GET", "/v1/models", key, Long="x" * 20_000),
    "two lengths": lambda key: post(b"{}", key)[:-4] + b"\r\ncontent-length: 3\r\n\r\n{}",
    "a length and chunks": lambda key: post(b"{}", key, Transfer_Encoding="chunked"),
    "a folded header": lambda key: head_of(
        "GET", "/v1/models", key, Odd="a\r\n x-manylora-cluster: b"
    ),
    "a header without a name": lambda key: head_of("GET", "/v1/models", key)[:-2] + b": x\r\n\r\n",
    "a space in a name": lambda key: (
        head_of("GET", "/v1/models", key)[:-2] + b"x-manylora-cluster : x\r\n\r\n"
    ),
    "HEAD": lambda key: head_of("HEAD", "/v1/models", key),
    "HEAD of health": lambda _: head_of("HEAD", "/health", None),
    "OPTIONS": lambda key: head_of("OPTIONS", COMPLETIONS, key),
    "a page": lambda _: head_of("GET", "/", None),
    "a page that is fresh": lambda _: head_of(
        "GET", "/static/manylora.svg", None, If_None_Match="*"
    ),
    "a redirect": lambda key: head_of("GET", "/static", key),
    "a path that goes up": lambda _: head_of("GET", "/static/../../v1/engine", None),
}


def parsed(answer: bytes) -> tuple[str, dict[str, list[str]], Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    headers: dict[str, list[str]] = {}
    for each in lines:
        name, _, value = each.partition(": ")
        headers.setdefault(name.lower(), []).append(value)
    content: Any = body
    if body[:1] == b"{":
        content = json.loads(body)
        assert headers["content-length"] == [str(len(body))]
    return line, headers, content


@pytest.mark.parametrize("case", REFUSED)
async def test_an_answer_is_that_of_the_replica(
    replica: FakeReplica, gateway: FakeGateway, key: str, case: str
) -> None:
    request = REFUSED[case](key)
    direct, passed = [parsed(await said(server.url, [request])) for server in (replica, gateway)]
    assert passed[0] == direct[0]
    assert passed[2] == direct[2]
    for name in KEPT:
        assert passed[1].get(name) == direct[1].get(name), name
    for headers in (direct[1], passed[1]):
        assert (
            len(headers.get("x-request-id", [""])) == len(headers.get("content-length", [""])) == 1
        )
    assert not gateway.drain.num_running


async def test_a_connection_stays_good_after_errors(gateway: FakeGateway, key: str) -> None:
    raw = await raw_client(gateway.url)
    bodies = [b"{", b'{"model": "none", "prompt": "x"}', json.dumps(ASK).encode()] * 2
    for body in bodies:
        raw.writer.write(post(body, key).replace(b"Connection: close", b"Connection: keep-alive"))
    statuses = [(await raw.answer())[0] for _ in bodies]
    assert statuses == [400, 404, 200] * 2
    raw.writer.close()


async def test_expect_is_answered_by_the_gateway_itself(gateway: FakeGateway, key: str) -> None:
    raw, body = await raw_client(gateway.url), json.dumps(ASK).encode()
    head = head_of("POST", COMPLETIONS, key, Content_Length=str(len(body)), Expect="100-continue")
    raw.writer.write(head)
    assert (await raw.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    raw.writer.write(body)
    assert (await raw.answer())[0] == 200
    raw.writer.close()
    raw = await raw_client(gateway.url)
    raw.writer.write(
        head_of("POST", COMPLETIONS, key, Content_Length=str(LIMIT + 1), Expect="100-continue")
    )
    status, headers, _ = await raw.answer()
    assert (status, headers["connection"]) == (413, ["close"])
    raw.writer.close()


@pytest.mark.parametrize("in_chunks", [False, True])
async def test_uploads_pass_through(
    gateway: FakeGateway, client: httpx.AsyncClient, key: str, in_chunks: bool
) -> None:
    files = sound()
    body = form(("name", b"sql"), ("config", files.config), ("weights", files.weights))
    pieces = [body[at : at + 5000] for at in range(0, len(body), 5000)]
    sent = [*chunked(pieces), b"0\r\n\r\n"] if in_chunks else pieces
    answer = parsed(
        await said(gateway.url, [upload_head(key, None if in_chunks else len(body)), *sent])
    )
    assert answer[0].split()[1] == "201", answer
    assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == [
        "demo",
        "sql",
    ]


async def test_uploads_that_are_refused_early_end_and_harm_nothing(
    gateway: FakeGateway, client: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    no_scope = await cluster.key("acme", "infer")
    for key, length, status in (
        (None, 1 << 30, 401),
        (no_scope, 1 << 30, 403),
        (no_scope, None, 403),
    ):
        reader, writer = await connect(gateway.url)
        writer.write(upload_head(key, length))
        piece = b"x" * 65536 if length else b"10000\r\n" + b"x" * 65536 + b"\r\n"

        async def send(writer: asyncio.StreamWriter = writer, piece: bytes = piece) -> None:
            for _ in range(1 << 14):
                writer.write(piece)
                await writer.drain()

        sending = asyncio.create_task(send())
        assert (await reader.readuntil(b"\r\n")).split()[1] == str(status).encode()
        async with asyncio.timeout(60):
            with pytest.raises(ConnectionError):
                await sending
        writer.close()
        assert (await upload(client, "sql")).status_code in (200, 201)
    await eventually(lambda: not gateway.drain.num_running)


async def test_a_client_that_leaves_within_an_upload_ends_it(
    gateway: FakeGateway, key: str
) -> None:
    _, writer = await connect(gateway.url)
    writer.write(upload_head(key, 1 << 20) + b"--b\r\n")
    await eventually(lambda: gateway.drain.num_running)
    writer.close()
    await eventually(lambda: not gateway.drain.num_running)


async def test_the_dashboards_session_passes_through(gateway: FakeGateway) -> None:
    async with gateway.client(ADMIN_KEY) as admin:
        begun = await admin.post("/v1/session")
        assert begun.status_code == 201, begun.text
        cookies = begun.headers.get_list("set-cookie")
    assert len(cookies) == 1
    cookie = {"cookie": cookies[0].partition(";")[0]}
    async with gateway.client(None) as browser:
        own = {**cookie, "sec-fetch-site": "same-origin", "origin": gateway.url}
        assert (await browser.get("/v1/tenants", headers=own)).status_code == 200
        made = await browser.post("/v1/tenants", headers=own, json={"name": "new"})
        assert made.status_code == 201, made.text
        foreign = {**cookie, "sec-fetch-site": "cross-site", "origin": "http://elsewhere.example"}
        refused = await browser.post("/v1/tenants", headers=foreign, json={"name": "other"})
        assert refused.status_code in (401, 403)


async def test_pages_of_other_origins_are_answered_as_the_gateways_settings_say(
    cluster: FakeCluster,
) -> None:
    await cluster.replica("one")
    origin = "https://chat.example.org"
    gateway = await cluster.gateway("cors", cors_origins=origin)
    await gateway.sees(one="ready")
    asks = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    async with gateway.client(await cluster.key("acme")) as client:
        preflight = await client.options(COMPLETIONS, headers=asks)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (
            200,
            origin,
        )
        answer = await client.post(COMPLETIONS, json=STREAM, headers={"origin": origin})
        assert answer.headers.get_list("access-control-allow-origin") == [origin]


async def test_the_live_feed_ends_with_its_client_and_with_the_gateway(
    gateway: FakeGateway, replica: FakeReplica
) -> None:
    def num_open() -> int:
        return len(replica.http.server.server_state.tasks)

    before = num_open()
    async with gateway.client(ADMIN_KEY) as admin:
        async with admin.stream("GET", "/v1/engine/events") as feed:
            assert await anext(feed.aiter_lines())
            assert num_open() == before + 1
        await eventually(lambda: num_open() == before)
        async with admin.stream("GET", "/v1/engine/events") as feed:
            lines = feed.aiter_lines()
            assert await anext(lines)
            draining = asyncio.create_task(gateway.drain.drain(3600))
            async with asyncio.timeout(60):
                async for _ in lines:
                    pass
        await draining


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["x", "y z", "w"], "n": 2}])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_client_got_is_billed_once(
    cluster: FakeCluster, client: httpx.AsyncClient, fields: dict[str, Any], stream: bool
) -> None:
    body = {**(STREAM if stream else ASK), "max_tokens": 3, **fields}
    answer = await client.post(COMPLETIONS, json=body)
    usage = answer.json()["usage"] if not stream else usage_of(answer.text)
    (billed,) = await cluster.events()
    assert (billed.prompt_tokens, billed.completion_tokens) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert billed.status == "length"


def usage_of(text: str) -> dict[str, int]:
    *_, last, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert done == "[DONE]"
    return dict(json.loads(last)["usage"])


async def test_an_answer_that_breaks_is_billed_once_whoever_writes_first(
    cluster: FakeCluster, gateway: FakeGateway, replica: FakeReplica, client: httpx.AsyncClient
) -> None:
    """The replica lives on, and takes the end of the connection for its client's."""
    replica.api.engine.token_s = 0.02
    for is_gateway_first in (True, False):
        async with client.stream("POST", COMPLETIONS, json=LONG) as answer:
            pieces = answer.aiter_text()
            text = await anext(pieces) + await anext(pieces)
            replica.http.drop()
            text += "".join([piece async for piece in pieces])
        assert '"replica_lost"' in text
        got = len(re.findall(r'"text":"[^"]', text))
        await eventually(lambda: not replica.api.engine.running)
        order = [gateway.registry, replica.api.services.registry]
        for registry in order if is_gateway_first else reversed(order):
            await registry.usage.flush()
        events = await cluster.events(gateway.registry)
        assert len(events) == (1 if is_gateway_first else 2)
        assert (events[-1].status, events[-1].completion_tokens) == ("error", got)
        await gateway.sees(one="ready")


@pytest.mark.parametrize("is_gateway_first", [True, False])
async def test_an_answer_after_a_broken_connection_is_billed_alone_and_once(
    cluster: FakeCluster,
    gateway: FakeGateway,
    replica: FakeReplica,
    client: httpx.AsyncClient,
    is_gateway_first: bool,
) -> None:
    """The replica that was asked first lives on, and bills what it has computed as if its client had left."""
    both = [replica, await cluster.replica("two", max_body_bytes=LIMIT)]
    await gateway.sees(one="ready", two="ready")
    for each in both:
        each.api.engine.token_s = 0.02
    asking = asyncio.create_task(
        client.post(COMPLETIONS, json={**ASK, "max_tokens": 50, "ignore_eos": True})
    )
    await eventually(lambda: any(len(each.api.engine.requests) for each in both))
    first = next(each for each in both if each.api.engine.requests)
    await asyncio.sleep(0.3)
    first.http.drop()
    answer = await asking
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 50)
    await eventually(lambda: not first.api.services.drain.num_running)
    order = [gateway.registry, first.api.services.registry]
    for registry in order if is_gateway_first else reversed(order):
        await registry.usage.flush()
    events = await cluster.events(gateway.registry)
    assert sorted((event.status, event.completion_tokens) for event in events) == [
        ("length", 50),
        ("retried", 0),
    ]
    assert sum(event.prompt_tokens for event in events) == answer.json()["usage"]["prompt_tokens"]
    usage = (await client.get("/v1/usage")).json()["totals"]
    assert (usage["requests"], usage["completion_tokens"]) == (1, 50)


async def test_a_client_that_leaves_is_billed_by_the_replica(
    cluster: FakeCluster, gateway: FakeGateway, replica: FakeReplica, client: httpx.AsyncClient
) -> None:
    replica.api.engine.token_s = 0.02
    async with client.stream("POST", COMPLETIONS, json=LONG) as answer:
        assert await anext(answer.aiter_text())
    await eventually(lambda: not replica.api.engine.running and not gateway.drain.num_running)
    await eventually(lambda: not replica.api.services.drain.num_running)
    (billed,) = await cluster.events(gateway.registry)
    assert billed.status == "aborted"
    assert billed.completion_tokens >= 1


async def test_another_replica_answers_for_one_whose_engine_is_away_and_that_counts_as_one_request(
    cluster: FakeCluster,
    gateway: FakeGateway,
    replica: FakeReplica,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("manylora.server.cluster.router.FREE_RETRIES", 100)
    other = await cluster.replica("two", max_body_bytes=LIMIT)
    await gateway.sees(one="ready", two="ready")
    for stream in (False, True):
        for away, serves in ((replica, other), (other, replica)):
            num_served, before = len(serves.api.engine.requests), len(await cluster.events())
            away.api.engine.failure_after, serves.api.engine.failure_after = 0, None
            for number in range(4):
                answer = await client.post(
                    COMPLETIONS, json={**(STREAM if stream else ASK), "user": f"u{number}"}
                )
                assert answer.status_code == 200
            assert len(await cluster.events()) == before + 4
            assert len(serves.api.engine.requests) == num_served + 4
    both = [len(each.api.engine.requests) for each in (replica, other)]
    assert sum(both) > 16, "some requests were asked of two"
    assert {event.status for event in await cluster.events()} == {"stop"}


async def test_replicas_that_all_refuse_bill_nothing(
    cluster: FakeCluster,
    replica: FakeReplica,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica.api.engine.failure_after = 0
    answer = await client.post(COMPLETIONS, json=ASK)
    assert answer.status_code == 503
    assert (
        sum(event.completion_tokens + event.prompt_tokens for event in await cluster.events()) == 0
    )
    ready: EngineReady | None = replica.api.engine.ready
    monkeypatch.setattr(replica.api.engine, "ready", None)
    assert ready is not None
    assert (await client.post(COMPLETIONS, json=ASK)).status_code == 503


async def test_gateway_and_replica_choose_one_version_of_an_alias(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    for alpha in (16, 32):
        answer = await upload(client, "sql", sound(alpha=alpha))
        assert answer.status_code == 201, answer.text
    split = await client.patch("/v1/adapters/sql", json={"aliases": {"live": {"1": 50, "2": 50}}})
    assert split.status_code == 200, split.text
    chosen = []
    resolve = gateway.registry.adapters.resolve

    async def kept(*args: Any) -> Any:
        found = await resolve(*args)
        chosen.append(found[1].digest)
        return found

    gateway.registry.adapters.resolve = kept  # type: ignore[method-assign,assignment]
    answered = []
    for number in range(12):
        for headers, fields in (
            ({}, {"user": f"\u00e9{number}"}),
            ({"x-session-id": f"s{number}"}, {}),
            ({}, {}),
        ):
            body = {**ASK, "model": "sql@live", **fields}
            answered.append(
                (await client.post(COMPLETIONS, json=body, headers=headers)).headers[
                    "x-manylora-adapter-digest"
                ]
            )
    assert answered == chosen
    assert len(set(chosen)) == 2


async def test_internal_headers_of_clients_mean_nothing_to_replicas(
    cluster: FakeCluster, replica: FakeReplica, key: str
) -> None:
    headers = {
        "x-manylora-cluster": "0" * 64,
        "x-manylora-ledger-id": "use_" + "0" * 30,
        "x-manylora-weight-share": "0.001",
        "x-manylora-sticky": "x",
    }
    async with replica.client(key) as client:
        answer = await client.post(COMPLETIONS, json=ASK, headers=headers)
        assert answer.json()["choices"]
        assert (await client.get("/internal/state", headers=headers)).status_code in (401, 404)
    (billed,) = await cluster.events()
    assert billed.id != "use_" + "0" * 30
    assert replica.api.engine.requests[0].flow.weight == 1.0


@pytest.mark.parametrize(
    "path", ["/internal/state", "/internal%2Fstate", "/%69nternal/state?x=1", "/internal/x"]
)
@pytest.mark.parametrize("who", ["a tenant", "an admin"])
async def test_what_replicas_tell_gateways_is_told_to_nobody_else(
    gateway: FakeGateway, replica: FakeReplica, key: str, path: str, who: str
) -> None:
    line = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head = f"{line}authorization: Bearer {key if who == 'a tenant' else ADMIN_KEY}\r\n\r\n".encode()
    answers = [await said(each.url, [head]) for each in (gateway, replica)]
    assert [answer.split()[1] for answer in answers] == [b"404", b"404"]
    assert [b"boot_id" in answer for answer in answers] == [False, False]
    assert [answer.count(b'"code":"not_found"') for answer in answers] == [1, 1]


async def test_without_authentication_requests_count_for_the_default_tenant(
    cluster: FakeCluster,
) -> None:
    replica = await cluster.replica("one", auth="off")
    gateway = await cluster.gateway(auth="off")
    async with gateway.client(None) as client:
        await gateway.sees(one="ready")
        assert (await upload(client, "sql")).status_code == 201
        answer = await client.post(COMPLETIONS, json={**ASK, "model": "sql"})
        assert answer.status_code == 200, answer.text
        foreign = await client.get("/v1/models", headers={"origin": "http://elsewhere.example"})
        assert foreign.status_code == 403
    (billed,) = await cluster.events()
    assert (billed.tenant, billed.adapter) == ("default", "sql")
    assert replica.api.engine.requests[0].adapter is not None


async def test_a_pause_is_for_all_replicas(
    cluster: FakeCluster, gateway: FakeGateway, replica: FakeReplica, client: httpx.AsyncClient
) -> None:
    other = await cluster.replica("two", max_body_bytes=LIMIT)
    await gateway.sees(one="ready", two="ready")
    refused = await client.post("/pause", params={"mode": "keep"})
    assert refused.status_code == 403, "the key of a tenant"
    async with gateway.client(ADMIN_KEY) as admin:
        paused = await admin.post("/pause", params={"mode": "keep"})
        assert (paused.status_code, paused.json()) == (200, {"status": "paused"})
        assert [each.api.engine.paused for each in (replica, other)] == ["keep", "keep"]
        assert (await admin.post("/resume", params={"server": "two"})).json() == {
            "status": "resumed"
        }
        assert [each.api.engine.paused for each in (replica, other)] == ["keep", None]
        assert (await admin.post("/resume", json={})).status_code == 200
        assert [each.api.engine.paused for each in (replica, other)] == [None, None]


async def test_a_link_signs_in_through_a_gateway_once(
    cluster: FakeCluster, gateway: FakeGateway
) -> None:
    async with gateway.client(ADMIN_KEY) as admin:
        link = (await admin.post("/v1/session/links")).json()["link"]
    async with gateway.client(link) as browser:
        begun = await browser.post("/v1/session")
        assert (begun.status_code, begun.json()["role"]) == (201, "admin")
        browser.cookies.clear()
        again = await browser.post("/v1/session")
        assert (again.status_code, again.json()["error"]["code"]) == (401, "session.link_used")
    cookie = begun.headers["set-cookie"].partition(";")[0]
    async with gateway.client(None) as browser:
        headers = {"cookie": cookie, "sec-fetch-site": "same-origin"}
        assert (await browser.get("/v1/me", headers=headers)).json()["role"] == "admin"
