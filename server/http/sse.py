"""Server-sent events as bytes, ready to be written."""

from __future__ import annotations

from contextlib import aclosing

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Send

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def event(content: object, name: str = "") -> bytes:
    """One event that carries JSON; without a name it is a message."""
    kind = f"event: {name}\n".encode() if name else b""
    return kind + b"data: " + orjson.dumps(content) + b"\n\n"


class ClosingResponse(StreamingResponse):
    """Closes what it streams when the client leaves, instead of whenever that is collected as garbage."""

    async def stream_response(self, send: Send) -> None:
        """Send all of it."""
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)
