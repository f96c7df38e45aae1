"""uvicorn's HTTP/1.1 protocol, with the limits that it lacks on everything but bodies.

Nobody is authenticated before a head is complete, so its size and the time it may take are limited here, and the number
of connections: anybody can open some, and one over which no valid key has come gives way first. Knows no routes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Protocol

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from manylora.errors import (
    InvalidRequestError,
    ManyloraError,
    PayloadTooLargeError,
    TimeoutExceededError,
)
from manylora.server.errors import error_response

log = structlog.get_logger("manylora.server")
MAX_HEAD_BYTES = 16 * 1024
"""Most bytes of a request line with its headers; trailers count too."""
MAX_UNASKED_BYTES = 64 * 1024
"""Most bytes of a body that are still read, and dropped, after its request was answered."""
READ_BYTES = 64 * 1024
"""Most bytes of one read. It bounds how much of a body is buffered before the key is checked."""
LINGER_S = 1.0
"""Seconds that a refused client has to read why, before the connection is closed."""
HEAD_S = 10.0
"""Seconds that a head may take, from the start of the connection or its first byte."""
MOST_STRANGERS = 4096
"""Connections without a valid key, for their memory."""
WARN_S = 60.0
"""Seconds between two lines of the log about connections that had to give way."""
IS_CLOSING = "is_closing"
"""Key in a request's state of a function that says whether the connection is closing. The ASGI message about it comes
some turns of the event loop later."""
TRUST = "trust_connection"
"""Key in a request's state of a function to call once its key was found valid."""


class BoundedReads(asyncio.BufferedProtocol):
    """Between a connection and its protocol: bounds one read to a quarter of what event loops read.

    Args:
        room: Where the connection takes a place.
        args: As uvicorn's protocol takes them.
        kwargs: The same.
    """

    def __init__(self, room: ConnectionRoom, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own
        self._protocol = protocol = BoundedProtocol(room, *args, **kwargs)
        self._buffer = bytearray()
        self.connection_made = protocol.connection_made  # type: ignore[assignment,method-assign]
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]
        self.eof_received = protocol.eof_received  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> bytearray:
        """Room for the next read."""
        del sizehint
        self._buffer = bytearray(READ_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what was read."""
        data, self._buffer = bytes(memoryview(self._buffer)[:nbytes]), bytearray()
        self._protocol.data_received(data)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Thread: the event loop's."""

    head_s = HEAD_S
    _head_bytes = 0
    """Bytes of the head being read that the parser has reported."""
    _untold_bytes = 0
    """Bytes received since the parser last reported the end of a head or a piece of a body."""
    _unasked_bytes = 0
    """Bytes of the body being read that came after the answer."""
    _has_head = False
    _is_refused = False
    """`_refuse` has answered: nothing more is parsed."""
    _clock: asyncio.TimerHandle | None = None

    def __init__(self, room: ConnectionRoom, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*args, **kwargs)
        self._room = room

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, and start the clock of its first head."""
        super().connection_made(transport)
        self._start_clock()
        self._room.enter(self, self.loop.time())

    def give_way(self) -> None:
        """Close at once, for a connection that came later."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._room.leave(self)
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; a head that has grown too long ends the connection."""
        if self._is_refused:
            self._unasked_bytes += len(data)
            if self._unasked_bytes > MAX_UNASKED_BYTES:
                self.transport.close()
            return
        self._untold_bytes += len(data)
        had_head = self._has_head
        if not had_head:
            self._start_clock()
        super().data_received(data)
        if self._has_head and not had_head and not self.transport.is_closing():
            self.flow.pause_reading()  # a route that wants the body resumes, once the key is checked
        if self._untold_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_long())

    def on_message_begin(self) -> None:
        """Begin a request, and give it the function that says whether the connection is closing."""
        super().on_message_begin()
        self.scope["state"][IS_CLOSING] = self.transport.is_closing
        self.scope["state"][TRUST] = self._trust
        self._head_bytes = 0
        self._start_clock()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hand the request on; its body may take its time."""
        self._stop_clock()
        self._room.begin(self)
        self._has_head = True
        self._untold_bytes = 0
        self._unasked_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._untold_bytes = 0
        super().on_body(body)
        if self.cycle.response_complete:
            self._unasked_bytes += len(body)
            if self._unasked_bytes > MAX_UNASKED_BYTES:
                self.transport.close()

    def on_response_complete(self) -> None:
        """End an answer."""
        if not self.pipeline:
            self._room.rest(self)
        super().on_response_complete()

    def on_message_complete(self) -> None:
        """End the request; whatever comes next is a head."""
        self._has_head = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refused."""
        del msg
        is_too_long = self._head_bytes > MAX_HEAD_BYTES
        self._refuse(
            _too_long()
            if is_too_long
            else InvalidRequestError("This is not HTTP.", code="invalid_http")
        )

    def _trust(self) -> None:
        self._room.trust(self)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError(
                "the head is too long"
            )  # the parser turns it into a call of send_400_response

    def _start_clock(self) -> None:
        if self._clock is None:
            self._clock = self.loop.call_later(self.head_s, self._give_up)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _give_up(self) -> None:
        if self._untold_bytes:
            self._refuse(
                TimeoutExceededError(
                    f"The request's headers did not come within {self.head_s:g} seconds."
                )
            )
        else:
            self.transport.close()

    def _refuse(self, error: ManyloraError) -> None:
        """Answer, unless the answer to an earlier request is under way, and close the connection."""
        if self._is_refused or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            response = error_response(error)
            headers = [
                (name, value) for name, value in response.raw_headers if name != b"connection"
            ]
            lines = [b"%b: %b\r\n" % header for header in (*headers, (b"connection", b"close"))]
            self.transport.write(
                b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)])
            )
        # Closed with bytes unread, the connection would be reset, and the answer perhaps lost on its way.
        self._is_refused = True
        self._unasked_bytes = 0
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


class Connection(Protocol):
    """A transport that can be asked to close."""

    def give_way(self) -> None:
        """Close at once."""


class ConnectionRoom:
    """The connections of one server. Thread: the event loop's.

    Args:
        most: How many may be open at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._strangers: OrderedDict[Connection, None] = OrderedDict()
        """Without a valid key so far, those that last sent a request longest ago at the front."""
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        """With one, and without a request; the longest idle at the front."""
        self._busy: set[Connection] = set()
        self._warned_s = float("-inf")

    def enter(self, connection: Connection, now_s: float) -> None:
        """Take a new connection in; it or another one is closed where there is no room."""
        self._strangers[connection] = None
        if len(self._strangers) > min(self._most, MOST_STRANGERS):
            self._send_away(self._strangers, now_s)
        elif len(self._strangers) + len(self._idle) + len(self._busy) > self._most:
            others = len(self._strangers) > 1 or not self._idle
            self._send_away(self._strangers if others else self._idle, now_s)

    def begin(self, connection: Connection) -> None:
        """Note that a request came."""
        if connection in self._strangers:
            self._strangers.move_to_end(connection)
        elif connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def trust(self, connection: Connection) -> None:
        """Note that the request has a valid key."""
        if connection in self._strangers:
            del self._strangers[connection]
            self._busy.add(connection)

    def rest(self, connection: Connection) -> None:
        """Note that the request was answered."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None

    def leave(self, connection: Connection) -> None:
        """Forget a connection that was closed."""
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.discard(connection)

    def _send_away(self, connections: OrderedDict[Connection, None], now_s: float) -> None:
        connections.popitem(last=False)[0].give_way()
        if now_s - self._warned_s >= WARN_S:
            self._warned_s = now_s
            log.warning(
                "connections_give_way",
                most=self._most,
                hint="Raise the limit of open files (ulimit -n).",
            )


def _too_long() -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"The request line and the headers exceed {MAX_HEAD_BYTES} bytes.", code="headers_too_large"
    )
