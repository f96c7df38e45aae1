"""Server-sent events as bytes, ready to be written."""

from __future__ import annotations

import orjson

DONE = b"data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def event(content: object, name: str = "") -> bytes:
    """One event that carries JSON; without a name it is a message."""
    kind = f"event: {name}\n".encode() if name else b""
    return kind + b"data: " + orjson.dumps(content) + b"\n\n"
