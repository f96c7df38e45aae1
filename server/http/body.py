"""Reading request bodies: counted while they arrive, and not slower than a minimum pace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from manylora.errors import InvalidRequestError, PayloadTooLargeError, TimeoutExceededError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How slowly a client may send."""

    stall_s: float = 10.0
    """Longest gap between two pieces, in seconds."""
    grace_s: float = 30.0
    """Seconds before the average counts."""
    bytes_per_s: float = 4096.0
    """Least average after the grace."""
    clock: Callable[[], float] = time.monotonic


async def read_chunks(
    request: Request, limit: int, pace: Pace, code: str = "payload_too_large"
) -> AsyncIterator[bytes]:
    """Yield the body piece by piece.

    Args:
        request: The request; nothing of its body was read before.
        limit: Most bytes; a larger Content-Length is refused unread.
        pace: The slowest pace allowed.
        code: Error code of a body that is too large.

    Raises:
        InvalidRequestError: The body is compressed, or Content-Length is not a number.
        PayloadTooLargeError: The body exceeds `limit`.
        TimeoutExceededError: The client stalls or is too slow.
        ClientDisconnect: The client is gone.
    """
    _check_headers(request, limit, code)
    started, received, more = pace.clock(), 0, True
    while more:
        try:
            async with asyncio.timeout(pace.stall_s):
                message = await request.receive()
        except TimeoutError as error:
            raise TimeoutExceededError(f"No byte of the body came for {pace.stall_s:g} seconds.") from error
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        received += len(chunk)
        if received > limit:
            raise _too_large(limit, code)
        elapsed = pace.clock() - started
        if more and elapsed > pace.grace_s and received < elapsed * pace.bytes_per_s:
            raise TimeoutExceededError(f"The body came at less than {pace.bytes_per_s:g} bytes per second.")
        if chunk:
            yield chunk


def content_length(request: Request) -> int | None:
    """Bytes of the body by its header; None where that does not say.

    Raises:
        InvalidRequestError: It is not a number.
    """
    length = request.headers.get("content-length")
    if length is None:
        return None
    if not (length.isascii() and length.isdigit()):
        raise InvalidRequestError("Content-Length must be a number of bytes.")
    return int(length.lstrip("0")[:19] or 0)  # more digits are too large all the same


def _check_headers(request: Request, limit: int, code: str) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"Manylora takes no compressed bodies: send it without Content-Encoding: {encoding[:40]}."
        raise InvalidRequestError(message, code="unsupported_encoding")
    if (content_length(request) or 0) > limit:
        raise _too_large(limit, code)


def _too_large(limit: int, code: str) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The body exceeds the limit of {limit} bytes.", code=code)
