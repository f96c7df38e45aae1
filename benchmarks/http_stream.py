"""A small HTTP/1.1 client for server-sent events on plain asyncio streams.

The load generator shares its machine with the server it measures, so every microsecond here is taken from there. It
speaks what OpenAI-compatible servers send: keep-alive, chunked or sized bodies. It does not know what events mean.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from weft.errors import ConfigError

LINE_LIMIT = 1 << 22
"""Longest header or event line in bytes."""


class HttpStatusError(Exception):
    """The server answered with something other than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body[:500].decode(errors='replace')}")
        self.status = status


class EventClient:
    """Posts JSON and tells the `data:` lines of the answer. Idle connections are kept for the next call.

    Args:
        url: Base such as `http://127.0.0.1:8000/v1`.
        key: API key; empty sends none.
    """

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url must start with http:// or https:// and name a host, got {url!r}", param="url")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        fixed = {"Host": parts.netloc, "Content-Type": "application/json", "Accept": "text/event-stream"}
        if key:
            fixed["Authorization"] = f"Bearer {key}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())

    def close(self) -> None:
        """Close the idle connections."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def post(
        self,
        path: str,
        body: bytes,
        on_event: Callable[[bytes], None],
        on_head: Callable[[int, dict[bytes, bytes]], None],
    ) -> None:
        """Post `body` and read the answer to its end.

        Args:
            path: Route below the base URL.
            body: JSON.
            on_event: Told each event's data as soon as it arrives.
            on_head: Told the status and the headers as soon as they are there.

        Raises:
            HttpStatusError: The status is not 200.
            ConnectionError: The server cannot be reached, or closed before the answer's end.
        """
        async with self._answer(path, body) as (reader, status, headers):
            on_head(status, headers)
            pieces = _read_body(reader, headers)
            if status != 200:
                refusal = b"".join([piece async for piece in pieces])
            else:
                await _tell_events(pieces, on_event)
        if status != 200:
            raise HttpStatusError(status, refusal)  # not before all of it is read: the connection stays

    @asynccontextmanager
    async def _answer(
        self, path: str, body: bytes
    ) -> AsyncIterator[tuple[asyncio.StreamReader, int, dict[bytes, bytes]]]:
        reader, writer = await self._send(path, body)
        complete = False
        try:
            status, headers = await _read_head(reader)
            yield reader, status, headers
            complete = headers.get(b"connection", b"").lower() != b"close"
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the server closed the connection before the end of the answer") from error
        finally:
            if complete:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _send(self, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                break
            writer.close()
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=LINE_LIMIT)
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    return int(first.split(b" ", 2)[1]), headers


async def _tell_events(pieces: AsyncIterator[bytes], on_event: Callable[[bytes], None]) -> None:
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                on_event(line[5:].strip())


async def _read_body(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        async for piece in _read_chunks(reader):
            yield piece
    elif b"content-length" in headers:
        yield await reader.readexactly(int(headers[b"content-length"]))
    else:
        headers[b"connection"] = b"close"
        while piece := await reader.read(1 << 16):
            yield piece


async def _read_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """What each read brings: hundreds of streams are too many for a wait on every chunk."""
    rest = b""
    while True:
        if not (data := await reader.read(1 << 16)):
            raise asyncio.IncompleteReadError(rest, None)
        rest += data
        chunks = []
        while (start := rest.find(b"\r\n") + 2) > 1:
            size = int(rest[: start - 2].split(b";")[0], 16)
            if len(rest) < start + size + 2:
                break
            chunks.append(rest[start : start + size])
            rest = rest[start + size + 2 :]
            if not size:
                yield b"".join(chunks)
                return
        yield b"".join(chunks)
