"""Requests that generate nothing: what replicas get of them, and what clients get when something is wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import httpx
import pytest

from api_server import ADMIN_KEY, connect, eventually
from fake_cluster import FakeCluster, FakeGateway
from manylora.server.cluster import links
from manylora.server.cluster.router import Router
from manylora.server.http.body import Pace
from raw_http import head_of, upload_head
from scripted_replica import Got, ScriptedReplica, chunk, scripted

pytestmark = pytest.mark.anyio
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
NEVER = 3600


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> list[Router]:
    """The routers of gateways that start from now on."""
    made: list[Router] = []
    init = Router.__init__

    def kept(self: Router, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(Router, "__init__", kept)
    return made


async def plain(_: Got, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(PLAIN)


async def raw(url: str, *sent: bytes) -> bytes:
    """What comes back until the connection is closed; nothing after the pieces is sent."""
    reader, writer = await connect(url)
    try:
        writer.write(b"".join(sent))
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


async def first_asked(replicas: dict[str, ScriptedReplica], client: httpx.AsyncClient) -> str:
    """The replica that is asked first for what this client asks."""
    assert (await client.get("/v1/models")).status_code == 200
    (name,) = [name for name, each in replicas.items() if each.got]
    return name


async def test_a_body_that_never_comes_holds_no_connection_to_a_replica(
    cluster: FakeCluster, gateway: FakeGateway
) -> None:
    await cluster.replica("one")
    await gateway.sees(one="ready")
    sent = head_of("GET", "/", None, Content_Length="5")
    assert (await raw(gateway.url, sent)).startswith(b"HTTP/1.1 200 "), (
        "the page needs neither a key nor a body"
    )
    await eventually(lambda: not gateway.drain.num_running)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/engine/events"])
async def test_what_clients_send_as_the_body_of_a_get_is_not_passed_on(
    cluster: FakeCluster, gateway: FakeGateway, key: str, path: str
) -> None:
    async with scripted(cluster, plain, "one") as replicas:
        await gateway.sees(one="ready")
        assert b"200 OK" in await raw(
            gateway.url, head_of("GET", path, key, Content_Length="3") + b"abc"
        )
        (got,) = replicas["one"].got
    assert got.body == b""
    assert got.header("content-length") == got.header("transfer-encoding") == []


async def test_a_client_that_leaves_a_feed_is_seen_also_if_it_owes_a_body(
    cluster: FakeCluster, gateway: FakeGateway
) -> None:
    replica = await cluster.replica("one")
    await gateway.sees(one="ready")
    before = len(replica.http.server.server_state.tasks)
    reader, writer = await connect(gateway.url)
    writer.write(head_of("GET", "/v1/engine/events", ADMIN_KEY, Content_Length="10"))
    await reader.readuntil(b"data: ")
    writer.close()
    await eventually(lambda: len(replica.http.server.server_state.tasks) == before)
    assert not gateway.drain.num_running


@pytest.mark.parametrize("part", [b"", b"--b\r\n"])
async def test_a_replica_refuses_a_body_before_it_is_sent_or_while_it_is(
    cluster: FakeCluster, gateway: FakeGateway, key: str, part: bytes
) -> None:
    """Also where the client waits with its body until the answer."""
    await cluster.replica("one", max_upload_bytes=4096, pace=Pace(stall_s=0.2))
    await gateway.sees(one="ready")
    too_large = await raw(gateway.url, upload_head(key, 1 << 30), part)
    assert too_large.startswith(b"HTTP/1.1 413 "), too_large
    stalled = await raw(gateway.url, upload_head(key, 2048), part)
    assert stalled.startswith(b"HTTP/1.1 408 "), stalled
    assert (await gateway.servers())["one"]["state"] == "ready"


async def test_a_client_that_leaves_its_upload_is_no_failure_of_the_replica(
    cluster: FakeCluster, gateway: FakeGateway, key: str
) -> None:
    async with scripted(cluster, plain, "one") as replicas:
        await gateway.sees(one="ready")
        for sent in (b"", b"half"):
            _, writer = await connect(gateway.url)
            writer.write(
                head_of("PUT", "/v1/uploads/u/files/weights", key, Content_Length="100") + sent
            )
            await eventually(lambda: gateway.drain.num_running)
            writer.close()
            await eventually(lambda: not gateway.drain.num_running)
        assert (await gateway.servers())["one"]["state"] == "ready"
        assert replicas["one"].got == []


async def test_a_client_that_leaves_after_its_upload_ends_the_exchange(
    cluster: FakeCluster, gateway: FakeGateway, key: str
) -> None:
    is_over = asyncio.Event()

    async def hang(_: Got, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""
        is_over.set()

    async with scripted(cluster, hang, "one") as replicas:
        await gateway.sees(one="ready")
        _, writer = await connect(gateway.url)
        writer.write(
            head_of("PUT", "/v1/uploads/u/files/weights", key, Content_Length="4") + b"body"
        )
        await eventually(lambda: replicas["one"].got)
        writer.close()
        async with asyncio.timeout(60):
            await is_over.wait()
        await eventually(lambda: not gateway.drain.num_running)
        assert [got.body for got in replicas["one"].got] == [b"body"]


async def test_a_replica_that_breaks_is_ejected_and_another_one_answers_what_changes_nothing(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    broken = ""

    async def script(got: Got, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"" if got.by == broken else PLAIN.removesuffix(b"{}") if "HEAD" in got.line else PLAIN
        )

    async with scripted(cluster, script, "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        broken = await first_asked(replicas, client)
        for method in ("GET", "HEAD"):
            assert (await client.request(method, "/v1/models")).status_code == 200
        states = {name: each["state"] for name, each in (await gateway.servers()).items()}
        assert [states.pop(broken), *states.values()] == ["ejected", "ready"]
        async with gateway.client(ADMIN_KEY) as admin:
            page = (await admin.get("/metrics")).text
        url = replicas[broken].url
        assert f'manylora_replica_ready{{replica="{broken}",url="{url}"}} 0.0' in page
        assert not [got for got in replicas[broken].got if "HEAD" in got.line], "it was left out"


async def test_a_change_is_not_tried_again_once_it_may_have_been_made(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient
) -> None:
    async def breaks(_: Got, __: asyncio.StreamReader, ___: asyncio.StreamWriter) -> None:
        pass

    async with scripted(cluster, breaks, "one", "two", "three") as replicas:
        await gateway.sees(one="ready", two="ready", three="ready")
        answer = await client.delete("/v1/adapters/sql")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "replica_lost")
        assert "whether the change was made" in error["message"]
        assert sorted(len(each.got) for each in replicas.values()) == [0, 0, 1], (
            "one replica got it, once"
        )
        answer = await client.get("/v1/models")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "replica_lost")
        assert "change" not in error["message"]
        assert all(each.got for each in replicas.values())


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_another_replica_answers_for_one_that_cannot_be_reached(
    cluster: FakeCluster,
    client: httpx.AsyncClient,
    gateway: FakeGateway,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """A machine that vanished: nobody refuses the connection, and its reports have not been missed yet."""
    async with scripted(cluster, plain, "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        vanished = await first_asked(replicas, client)
        connect_to = aiohttp.TCPConnector._create_connection

        async def hang(
            self: aiohttp.TCPConnector, request: aiohttp.ClientRequest, *arguments: Any
        ) -> Any:
            if request.port == httpx.URL(replicas[vanished].url).port:
                await asyncio.sleep(NEVER)
            return await connect_to(self, request, *arguments)

        monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", hang)
        answer = await client.request(
            method, "/v1/models", content=b"body" if method == "PUT" else None
        )
        assert answer.status_code == 200
        assert (await gateway.servers())[vanished]["state"] == "ejected"
        (other,) = replicas.keys() - {vanished}
        assert [got.body for got in replicas[other].got] == [b"body" if method == "PUT" else b""]


async def test_a_pause_is_also_for_replicas_that_are_left_out_for_now(
    routers: list[Router], cluster: FakeCluster, gateway: FakeGateway
) -> None:
    replicas = [await cluster.replica(name) for name in ("one", "two")]
    await gateway.sees(one="ready", two="ready")
    routers[-1].failed("two")
    async with gateway.client(ADMIN_KEY) as admin:
        paused = await admin.post("/pause", params={"mode": "keep"})
        assert (paused.status_code, paused.json()) == (200, {"status": "paused"})
        assert [each.api.engine.paused for each in replicas] == ["keep", "keep"]
        routers[-1].failed("two")
        assert (await admin.get("/v1/engine", params={"server": "two"})).status_code == 200


async def test_a_pause_is_refused_while_a_listed_replica_is_away(
    cluster: FakeCluster, gateway: FakeGateway
) -> None:
    async with scripted(cluster, plain, "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        replicas["two"].die()
        await gateway.sees(one="ready")
        async with gateway.client(ADMIN_KEY) as admin:
            for method, path in (("POST", "/pause"), ("GET", "/v1/engine?server=two")):
                answer = await admin.request(method, path)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (503, "no_replica")
                assert "two" in error["message"]
                assert answer.headers["retry-after"] == "1"
        assert replicas["one"].got == []
    await cluster.registry.servers.leave(replicas["one"].row())
    await cluster.registry.servers.leave(replicas["two"].row())
    await gateway.lists("one", is_listed=False)
    async with gateway.client(ADMIN_KEY) as admin:
        assert (await admin.post("/pause")).json()["error"]["code"] == "no_replica"


@pytest.mark.parametrize("end", ["link", "client", "drain"])
async def test_a_pause_ends_with_the_replica_the_client_and_the_gateway(
    cluster: FakeCluster, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(links, "SILENT_S", 0.5)

    async def script(got: Got, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if got.by == "one":
            await asyncio.sleep(NEVER)
        writer.write(PLAIN)

    async with scripted(cluster, script, "one", "two") as replicas:
        await gateway.sees(one="ready", two="ready")
        reader, writer = await connect(gateway.url)
        writer.write(head_of("POST", "/pause", ADMIN_KEY, Content_Length="0"))
        await eventually(lambda: replicas["one"].got and replicas["two"].got)
        if end == "client":
            writer.close()
        if end == "drain":
            assert await gateway.drain.drain(0.1) == 1
        replicas["one"].is_silent = end == "link"
        if end != "client":
            async with asyncio.timeout(60):
                code = b"replica_lost" if end == "link" else b"server.draining"
                assert code in await reader.read()
        await eventually(lambda: not gateway.drain.num_running)
        writer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/pause"])
async def test_redirects_of_replicas_are_for_the_client(
    cluster: FakeCluster, gateway: FakeGateway, path: str
) -> None:
    """Followed, one would carry the cluster's token elsewhere."""
    strangers: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        strangers.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(PLAIN)
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as stranger:
        location = f"http://localhost:{stranger.sockets[0].getsockname()[1]}/x"

        async def redirect(_: Got, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(
                b"HTTP/1.1 308 x\r\nlocation: %b\r\ncontent-length: 0\r\n\r\n" % location.encode()
            )

        async with scripted(cluster, redirect, "one"), gateway.client(ADMIN_KEY) as admin:
            await gateway.sees(one="ready")
            method = "GET" if path == "/v1/models" else "POST"
            answer = await admin.request(
                method, path, json=None if method == "GET" else {"model": "demo"}
            )
            assert (answer.status_code, answer.headers["location"]) == (308, location)
    assert strangers == []


async def test_a_link_follows_no_redirect(cluster: FakeCluster, gateway: FakeGateway) -> None:
    asked: list[bytes] = []

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        writer.write(b"HTTP/1.1 307 x\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(redirect, "127.0.0.1", 0) as server:
        row = ScriptedReplica("one", "", plain).row(
            url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        )
        await cluster.registry.servers.announce(row)
        await eventually(lambda: len(asked) > 1)
    assert set(asked) == {b"/internal/state"}


@pytest.mark.parametrize(
    "sent",
    [b"content-length: 100\r\n\r\na,b\n", b"transfer-encoding: chunked\r\n\r\n" + chunk(b"a,b\n")],
)
async def test_a_download_that_a_drain_cuts_does_not_look_whole(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient, sent: bytes
) -> None:
    async def half(_: Got, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/csv\r\n" + sent)
        await asyncio.sleep(NEVER)

    async with scripted(cluster, half, "one"):
        await gateway.sees(one="ready")
        async with client.stream("GET", "/v1/usage/events") as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == b"a,b\n"
            draining = asyncio.create_task(gateway.drain.drain(0.1))
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(pieces)
        assert await draining == 1


NO_PATHS = [
    *(("GET", "*"), ("POST", "*"), ("OPTIONS", "*")),
    *(("CONNECT", "/v1/models"), ("CONNECT", "http://elsewhere.example/")),
]


async def test_targets_that_are_no_paths_are_refused(
    cluster: FakeCluster, gateway: FakeGateway, key: str
) -> None:
    async with scripted(cluster, plain, "one") as replicas:
        await gateway.sees(one="ready")
        for method, target in NO_PATHS:
            answer = await raw(gateway.url, head_of(method, target, key))
            assert answer.startswith(b"HTTP/1.1 404 "), (method, target, answer)
        assert replicas["one"].got == []


async def test_headers_of_one_hop_end_there_and_no_others(
    cluster: FakeCluster, gateway: FakeGateway, key: str
) -> None:
    given = head_of("GET", "/v1/models", key, X_Drop="1", X_Also="2", X_Kept="3", Keep_Alive="4")
    more = given[:-2] + b"connection: X-Drop , x-nothing\r\nConnection:x-also\r\n\r\n"
    async with scripted(cluster, plain, "one") as replicas:
        await gateway.sees(one="ready")
        assert b"200 OK" in await raw(gateway.url, more)
        (got,) = replicas["one"].got
    assert [
        got.header(name) for name in ("x-drop", "x-also", "x-kept", "keep-alive", "connection")
    ] == [
        ["1"],
        ["2"],
        ["3"],
        [],
        [],
    ]


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
async def test_long_headers_of_an_answer_are_passed_on(
    cluster: FakeCluster, gateway: FakeGateway, client: httpx.AsyncClient, method: str
) -> None:
    """As those of a replica that repeats the headers that a preflight of CORS asks for."""
    names = "a" * 15_000

    async def repeats(_: Got, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            PLAIN.replace(
                b"\r\n\r\n", f"\r\naccess-control-allow-headers: {names}\r\n\r\n".encode()
            )
        )

    async with scripted(cluster, repeats, "one"):
        await gateway.sees(one="ready")
        answer = await client.request(
            method, "/v1/models", headers={"access-control-request-headers": names}
        )
        assert (answer.status_code, answer.headers.get("access-control-allow-headers")) == (
            200,
            names,
        )
        assert (await gateway.servers())["one"]["state"] == "ready"


@pytest.mark.parametrize(
    ("given", "passed"),
    [("\u4e2d\u00e9".encode(), "\u4e2d\u00e9"), (b"a\tb", "a\tb"), (b"caf\xe9", "caf\u00e9")],
)
async def test_values_of_headers_are_passed_on_as_utf8(
    cluster: FakeCluster, gateway: FakeGateway, key: str, given: bytes, passed: str
) -> None:
    async with scripted(cluster, plain, "one") as replicas:
        await gateway.sees(one="ready")
        assert b"200 OK" in await raw(
            gateway.url, head_of("GET", "/v1/models", key)[:-2] + b"x-title: " + given + b"\r\n\r\n"
        )
        (got,) = replicas["one"].got
    assert got.header("x-title") == [passed.encode().decode("latin-1")]
