"""A small HTTP/1.1 client for server-sent events.

The load generator shares its machine with the server it measures, so every microsecond here is taken from there: what
arrives is parsed at once, in C, and no task is woken for it. It does not know what events mean.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from manylora.errors import ConfigError

OnEvent = Callable[[bytes], None]
OnHead = Callable[[int, dict[bytes, bytes]], None]
_CUT = "the server closed the connection before the end of the answer"


class HttpStatusError(Exception):
    """The server answered with something other than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body[:500].decode(errors='replace')}")


class EventClient:
    """Posts JSON and passes on the `data:` lines of the answer. Idle connections are kept for the next call.

    Args:
        url: Base such as `http://127.0.0.1:8000/v1`.
        key: API key; empty sends none.
    """

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"url must start with http:// or https:// and name a host, got {url!r}", param="url"
            )
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._idle: list[_Connection] = []
        fixed = {
            "Host": parts.netloc,
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
        }
        if key:
            fixed["Authorization"] = f"Bearer {key}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()

    async def post(self, path: str, body: bytes, on_event: OnEvent, on_head: OnHead) -> None:
        """Post `body` and read the answer to its end.

        Args:
            path: Route below the base URL.
            body: JSON.
            on_event: Called with each event's data as soon as it arrives.
            on_head: Called with the status and the headers as soon as they are there.

        Raises:
            HttpStatusError: The status is not 200.
            ConnectionError: The server cannot be reached, or closed before the answer's end.
        """
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        kept = self._kept()
        connection = kept or await self._connect()
        try:
            await connection.ask(request, on_event, on_head)
        except ConnectionError:
            if connection is not kept or connection.status:
                raise
            # Some servers close a connection just after an answer, while the next request is on its way.
            connection = await self._connect()
            await connection.ask(request, on_event, on_head)
        finally:
            if connection.can_be_kept:
                self._idle.append(connection)
            else:
                connection.transport.abort()
        if connection.status != 200:
            raise HttpStatusError(connection.status, connection.body)

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self) -> _Connection:
        connect = asyncio.get_running_loop().create_connection
        return (await connect(_Connection, self._host, self._port, ssl=self._tls))[1]


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time. Its `on_` methods are the parser's."""

    transport: asyncio.Transport
    can_be_kept = False
    """The last answer came to its end, and the server takes another request."""
    status = 0
    """Status of the answer; 0 before its head is there."""
    body = b""
    """Bytes of the answer so far; with status 200 only the line that has not ended."""
    _end: asyncio.Future[bool] | None = None
    """True if the connection can be used again; set once the answer has ended."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    async def ask(self, request: bytes, on_event: OnEvent, on_head: OnHead) -> None:
        """Send a request and wait for the end of its answer."""
        self._on_event = on_event
        self._on_head = on_head
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._keeps_alive: bool | None = None
        self._end = asyncio.get_running_loop().create_future()
        self.status = 0
        self.body = b""
        self.can_be_kept = False
        self.transport.write(request)
        self.can_be_kept = await self._end

    def data_received(self, data: bytes) -> None:
        """Take what arrived; errors end up in `ask`."""
        if self._end is None or self._end.done():
            self.transport.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
            if self.status == 200:
                *lines, self.body = self.body.split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        self._on_event(line[5:].strip())
            if self._keeps_alive is not None:
                self._end.set_result(self._keeps_alive)
        except httptools.HttpParserError as error:
            self._end.set_exception(ConnectionError(f"the server's answer is not HTTP: {error}"))
        except Exception as error:  # noqa: BLE001 - not lost: `ask` raises it to its caller
            self._end.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the closing as the end of an answer that does not say how long it is; else it is an error."""
        if self._end is None or self._end.done():
            return
        if (
            self.status
            and exc is None
            and not self._headers.keys() & {b"content-length", b"transfer-encoding"}
        ):
            self._end.set_result(False)
        else:
            self._end.set_exception(exc or ConnectionError(_CUT))

    def on_message_begin(self) -> None:
        if self._keeps_alive:
            self._keeps_alive = False  # nobody asked for another answer

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._on_head(self.status, self._headers)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self._keeps_alive = self._parser.should_keep_alive()
