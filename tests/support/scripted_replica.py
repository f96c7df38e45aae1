"""Replicas of which a test writes every byte: they report like others, and answer as a script says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

import manylora
from fake_cluster import FakeCluster
from manylora.registry.registry import Registry
from manylora.registry.servers import Server
from manylora.server.cluster.wire import PROBE, STATE_PATH, Report, cluster_token, frame
from manylora.server.hop import Counts

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
"""Ends an answer in chunks."""


def chunk(data: bytes) -> bytes:
    """A piece of an answer in chunks."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def framed(payload: bytes, prompt: int = 0, cached: int = 0, completion: int = 0) -> bytes:
    """A frame as a chunk."""
    return chunk(frame(payload, Counts(prompt, cached, completion)))


def json_answer(status: int, body: bytes, *headers: tuple[str, str]) -> bytes:
    """A whole framed answer."""
    lines = [
        f"HTTP/1.1 {status} x",
        "content-type: application/json",
        f"x-manylora-length: {len(body)}",
    ]
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
            "version": manylora.__version__,
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
        line, *lines = (
            (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        )
        headers = [
            (name.lower(), value) for name, _, value in (each.partition(": ") for each in lines)
        ]
        named = dict(headers)
        if line.split()[1] == STATE_PATH:
            await self._report(named, writer)
            return
        if PROBE in named:
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            await writer.drain()
            return
        body = b""
        if "expect" in named:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
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
        if headers.get("x-manylora-cluster") != self._token:
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
async def scripted(
    cluster: FakeCluster, script: Script, *names: str
) -> AsyncIterator[dict[str, ScriptedReplica]]:
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
