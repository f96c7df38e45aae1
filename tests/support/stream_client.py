"""A client on a bare socket: it can leave in the middle of a stream, knows what was sent and what it read, and is cheap
enough for thousands of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from raw_http import head_of

Manner = Literal["close", "reset", "half"]
"""How a connection is cut: closed; reset; or closed for writing only, after which what was sent is still read."""
RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """When a client leaves: after some seconds if it has not read enough by then, whichever comes first.

    `tokens` are completion tokens, 0 for the head alone; None of both is a client that stays.
    """

    manner: Manner = "close"
    after_s: float | None = None
    tokens: int | None = None


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a client saw of its stream."""

    status: int | None = None
    """Of the head; None when it left before it came."""
    tokens: int = 0
    """Completion tokens that arrived."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    """Code of an error event, or of a refusal."""
    is_done: bool = False
    """Whether the end arrived."""
    is_all: bool = False
    """Whether it read everything that the server sent."""


async def stream(
    url: str,
    key: str,
    request_id: str,
    body: dict[str, Any],
    cut: Cut,
    path: str = "/v1/completions",
) -> Seen:
    """Send a request that asks for continuous usage, and leave as `cut` says, or when the server does."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    seen = Seen()
    try:
        asked = {
            **body,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        writer.write(_request(key, f"POST {path}", asked, X_Request_Id=request_id))
        await writer.drain()
        with contextlib.suppress(TimeoutError, ConnectionError, EOFError):
            async with asyncio.timeout(cut.after_s):
                await _read(reader, seen, cut.tokens)
        if not seen.is_done:
            await _leave(reader, writer, seen, cut.manner)
    finally:
        await _close(writer)
    return seen


async def exchange(
    url: str, key: str, method_and_path: str, body: dict[str, Any] | None = None, **headers: str
) -> tuple[int, bytes]:
    """One request on a connection of its own; status and body of the answer.

    Raises:
        ConnectionError: The server went away before it answered.
    """
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(_request(key, method_and_path, body, **headers))
        await writer.drain()
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        await _close(writer)
    if not head:
        raise ConnectionResetError("closed without an answer")
    return int(head.split()[1]), answer


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _leave(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Seen, manner: Manner
) -> None:
    match manner:
        case "half":
            writer.write_eof()
            await _read(reader, seen, None)
            seen.is_all = True
        case "reset":
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        case "close":
            pass


async def _read(reader: asyncio.StreamReader, seen: Seen, until_tokens: int | None) -> None:
    """Read until so many tokens have come, or the end."""
    while until_tokens is None or seen.status is None or seen.tokens < until_tokens:
        line = await reader.readline()
        if not line:
            return
        if line.startswith(b"HTTP/1.1 "):
            seen.status = int(line.split()[1])
            if seen.status != 200:
                _note(seen, json.loads(await _body(reader)))
                return
        elif line.startswith(b"data: [DONE]"):
            seen.is_done = seen.is_all = True
            return
        elif line.startswith(b"data: "):
            _note(seen, json.loads(line.removeprefix(b"data: ")))


async def _body(reader: asyncio.StreamReader) -> bytes:
    """What follows a status line and is not streamed."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    return await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))


def _note(seen: Seen, event: dict[str, Any]) -> None:
    if "error" in event:
        seen.error = str(event["error"]["code"])
    elif event.get("usage"):
        note_usage(seen, event["usage"])


def note_usage(seen: Seen, usage: dict[str, Any]) -> None:
    """What the server says it has sent."""
    seen.tokens = usage["completion_tokens"]
    seen.prompt_tokens = usage["prompt_tokens"]
    seen.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


def _request(key: str, method_and_path: str, body: dict[str, Any] | None, **headers: str) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    method, path = method_and_path.split()
    size = str(len(content))
    return (
        head_of(method, path, key, Content_Type="application/json", Content_Length=size, **headers)
        + content
    )
