"""Gateways and replicas in one process, over one database; and replicas of which a test writes every byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp

import weft
from api_server import ADMIN_KEY, Api, Client, api, new_client
from weft.config import GatewayConfig, RegistryConfig, ServerConfig
from weft.errors import ConflictError
from weft.registry.records import UsageEvent, UsageQuery
from weft.registry.registry import Registry
from weft.registry.servers import Server
from weft.server.cluster.app import open_gateway
from weft.server.cluster.duties import Duties
from weft.server.cluster.membership import Membership
from weft.server.cluster.replica import join
from weft.server.cluster.wire import STATE_PATH, Report, cluster_token, frame
from weft.server.drain import Drain
from weft.server.hop import Counts
from weft.server.listen import ApiServer, bind, url_of

PEPPER = "pepper-of-the-tests-0123456789"
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
"""Ends an answer in chunks."""


@dataclass(eq=False)
class Listening:
    """An app on a real port."""

    url: str
    server: ApiServer
    serving: asyncio.Task[None]

    def drop(self) -> None:
        """Close all connections without a word, as a kernel does for a killed process."""
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()

    async def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        await self.serving


@asynccontextmanager
async def listening(make: Callable[[str], Awaitable[ASGIApp]]) -> AsyncIterator[Listening]:
    """Serve on a free port what `make` returns for the address."""
    with bind("127.0.0.1", 0) as listener:
        url = url_of("127.0.0.1", listener)
        server = ApiServer(await make(url))
        running = Listening(url, server, asyncio.create_task(server.serve([listener])))
        try:
            yield running
        finally:
            await running.stop()
            for task in list(server.server_state.tasks):
                task.cancel()


@dataclass(eq=False)
class FakeReplica:
    """A whole server with a fake engine."""

    name: str
    api: Api
    http: Listening
    membership: Membership
    stack: AsyncExitStack

    @property
    def url(self) -> str:
        return self.http.url

    def client(self, key: str | None) -> Client:
        return new_client(key, self.url)


@dataclass(eq=False)
class FakeGateway:
    """A gateway, with the drain of its process."""

    http: Listening
    registry: Registry
    drain: Drain

    @property
    def url(self) -> str:
        return self.http.url

    def client(self, key: str | None) -> Client:
        return new_client(key, self.url)

    async def servers(self) -> dict[str, dict[str, Any]]:
        """What it says of all servers, by name."""
        async with self.client(ADMIN_KEY) as admin:
            return {each["name"]: each for each in (await admin.get("/v1/servers")).json()["data"]}

    async def sees(self, **states: str) -> None:
        """Wait until it sees these replicas, and no others, in these states."""
        async with asyncio.timeout(60):
            while (await self._seen()) != states:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)

    async def _seen(self) -> dict[str, str]:
        return {name: str(seen["state"]) for name, seen in (await self.servers()).items() if "running" in seen}

    async def counts(self) -> dict[str, float]:
        """Its counts of retries and of answers that ended early."""
        async with self.client(ADMIN_KEY) as admin:
            page = (await admin.get("/metrics")).text
        return {
            name: float(value) for name, value in re.findall(r"^weft_gateway_(\w+?)_total (\S+)", page, re.MULTILINE)
        }


@dataclass(eq=False)
class FakeCluster:
    """Servers over one database, which end with the stack."""

    root: Path
    stack: AsyncExitStack
    database_url: str
    registry: Registry
    """A registry of the test's own."""
    replicas: dict[str, FakeReplica] = field(default_factory=dict)

    async def replica(self, name: str, **server_fields: Any) -> FakeReplica:
        """Start a replica."""
        stack = await self.stack.enter_async_context(AsyncExitStack())
        opened = await stack.enter_async_context(
            api(
                self.root / name,
                blob_url=str(self.root / "blobs"),
                database_url=self.database_url,
                pepper=PEPPER,
                name=name,
                **server_fields,
            )
        )
        memberships: list[Membership] = []

        async def joined(url: str) -> ASGIApp:
            app, membership = await join(opened.app, opened.services, url, stack, Duties())
            memberships.append(membership)
            return app

        http = await stack.enter_async_context(listening(joined))
        self.replicas[name] = replica = FakeReplica(name, opened, http, memberships[0], stack)
        return replica

    async def gateway(self, folder: str = "gateway", **server_fields: Any) -> FakeGateway:
        """Start a gateway."""
        server = ServerConfig(data_dir=self.root / folder, role="gateway", **server_fields)
        config, drain = GatewayConfig(server=server, registry=RegistryConfig()), Drain()
        registry = await Registry.open(self.database_url, server.data_dir, ADMIN_KEY, pepper=PEPPER)
        self.stack.push_async_callback(registry.close)

        async def opened(_: str) -> ASGIApp:
            return (await open_gateway(config, registry, drain, self.stack)).main

        return FakeGateway(await self.stack.enter_async_context(listening(opened)), registry, drain)

    async def key(self, tenant: str, *scopes: str) -> str:
        """A new key of the tenant, which is made on first use."""
        with suppress(ConflictError):
            await self.registry.tenants.create_tenant(tenant)
        return (await self.registry.keys.create_key(tenant, None, scopes or ("infer", "adapters", "usage")))[1]

    async def events(self, *more: Registry) -> list[UsageEvent]:
        """All that was billed, once the replicas and `more` have moved theirs to SQL."""
        for registry in (*(each.api.services.registry for each in self.replicas.values()), *more):
            await registry.usage.flush()
        century = UsageQuery(start=datetime(2000, 1, 1, tzinfo=UTC), end=datetime(2100, 1, 1, tzinfo=UTC))
        return list((await self.registry.usage.events(century)).items)


@asynccontextmanager
async def fake_cluster(root: Path, database_url: str | None = None) -> AsyncIterator[FakeCluster]:
    """An empty cluster over SQLite below `root`, or over another database."""
    async with AsyncExitStack() as stack:
        url = database_url or f"sqlite:///{root}/shared.sqlite"
        registry = await Registry.open(url, root / "test", ADMIN_KEY, pepper=PEPPER)
        stack.push_async_callback(registry.close)
        yield FakeCluster(root, stack, url, registry)


def chunk(data: bytes) -> bytes:
    """A piece of an answer in chunks."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def framed(payload: bytes, prompt: int = 0, cached: int = 0, completion: int = 0) -> bytes:
    """A frame as a chunk."""
    return chunk(frame(payload, Counts(prompt, cached, completion)))


def json_answer(status: int, body: bytes, *headers: tuple[str, str]) -> bytes:
    """A whole framed answer."""
    lines = [f"HTTP/1.1 {status} x", "content-type: application/json", f"x-weft-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (*headers, ("transfer-encoding", "chunked"))]
    return "\r\n".join([*lines, "", ""]).encode() + framed(body) + LAST_CHUNK


@dataclass(frozen=True)
class Got:
    """A request that a scripted replica got."""

    by: str
    """The replica's name."""
    line: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for given, value in self.headers if given == name]


Script = Callable[[Got, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ScriptedReplica:
    """Reports like a replica, and answers requests as a script says. When that returns, the connection is closed.

    Args:
        name: In the registry.
        token: The cluster's.
        script: Answers a request; its body was read.
    """

    def __init__(self, name: str, token: str, script: Script) -> None:
        self.name = name
        self.script = script
        self.got: list[Got] = []
        self.state = "ready"
        self.boot_id = f"boot-of-{name}"
        self.is_silent = False
        """Whether it says nothing more of its state, over connections that stay open."""
        self.ends_reports = False
        """Whether it ends what it says of its state in order."""
        self.url = ""
        self._token = token
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self, registry: Registry, **facts: Any) -> None:
        """Listen, and be listed with these facts instead of the usual ones."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        await registry.servers.announce(self.row(**facts))

    def row(self, **facts: Any) -> Server:
        usual: dict[str, Any] = {
            "name": self.name,
            "role": "replica",
            "boot_id": self.boot_id,
            "url": self.url,
            "state": "ready",
            "model": "demo",
            "base": "sha256:0",
            "version": weft.__version__,
        }
        return Server(**usual | facts)

    def die(self) -> None:
        """Close everything, as a killed process does."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._answer(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        headers = [(name.lower(), value) for name, _, value in (each.partition(": ") for each in lines)]
        named = dict(headers)
        if line.split()[1] == STATE_PATH:
            await self._report(named, writer)
            return
        body = b""
        if "content-length" in named:
            body = await reader.readexactly(int(named["content-length"]))
        while "transfer-encoding" in named:
            size = int((await reader.readuntil(b"\r\n")).strip(), 16)
            body += (await reader.readexactly(size + 2))[:-2]
            if not size:
                break
        self.got.append(Got(self.name, line, headers, body))
        await self.script(self.got[-1], reader, writer)
        await writer.drain()
        return

    async def _report(self, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        if headers.get("x-weft-cluster") != self._token:
            writer.write(b"HTTP/1.1 401 x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            return
        writer.write(SSE_HEAD)
        while not self.ends_reports:
            if not self.is_silent:
                report = Report(
                    boot_id=self.boot_id,
                    state=self.state,  # type: ignore[arg-type]
                    backlog_s=0.0,
                    rate=1000.0,
                    running=0,
                    waiting=0,
                    tiers={},
                )
                writer.write(chunk(msgspec.json.encode(report) + b"\n"))
                await writer.drain()
            await asyncio.sleep(0.02)
        writer.write(LAST_CHUNK)


@asynccontextmanager
async def scripted(cluster: FakeCluster, script: Script, *names: str) -> AsyncIterator[dict[str, ScriptedReplica]]:
    """Listed replicas that answer by this script."""
    token = cluster_token(cluster.registry.key_ring)
    replicas = {name: ScriptedReplica(name, token, script) for name in names}
    try:
        for each in replicas.values():
            await each.start(cluster.registry)
        yield replicas
    finally:
        for each in replicas.values():
            each.die()
