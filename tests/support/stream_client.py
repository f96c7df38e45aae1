"""A streaming client that leaves in the middle, on a bare socket, so that it knows what was sent and what it read."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

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
    error: str | None = None
    """Code of an error event."""
    is_done: bool = False
    """Whether the end arrived."""
    is_all: bool = False
    """Whether it read everything that the server sent."""


async def stream(url: str, key: str, request_id: str, body: dict[str, Any], cut: Cut) -> Seen:
    """Send a completions request whose `body` asks for continuous usage, and leave as `cut` says."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    seen = Seen()
    try:
        writer.write(_request(str(address.netloc), key, request_id, body))
        await writer.drain()
        try:
            async with asyncio.timeout(cut.after_s):
                await _read(reader, seen, cut.tokens)
        except TimeoutError:
            pass
        if not seen.is_done:
            await _leave(reader, writer, seen, cut.manner)
    finally:
        writer.transport.abort() if cut.manner == "reset" else writer.close()
    return seen


async def _leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Seen, manner: Manner) -> None:
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
        elif line.startswith(b"data: [DONE]"):
            seen.is_done = seen.is_all = True
            return
        elif line.startswith(b"data: "):
            _note(seen, json.loads(line.removeprefix(b"data: ")))


def _note(seen: Seen, event: dict[str, Any]) -> None:
    if "error" in event:
        seen.error = str(event["error"]["code"])
    elif event.get("usage"):
        seen.tokens = event["usage"]["completion_tokens"]
        seen.prompt_tokens = event["usage"]["prompt_tokens"]


def _request(host: str, key: str, request_id: str, body: dict[str, Any]) -> bytes:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    content = json.dumps(asked).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nX-Request-Id: {request_id}\r\n\r\n"
    )
    return head.encode() + content
