"""Reading request bodies: counted while they arrive, not slower than a minimum pace, and with bounded memory for all.

A tenant may have twice as many bytes in memory as are free, so two thirds of all if it is alone: however much it sends,
there is room for the bodies of others. What a body announces counts before a byte of it is read.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

from starlette.requests import ClientDisconnect, Request

from manylora.errors import (
    CapacityError,
    InvalidRequestError,
    PayloadTooLargeError,
    RateLimitError,
    TimeoutExceededError,
)
from manylora.server.http.bodies import BodyT, parsed
from manylora.server.process.threads import LongWork, acting

MOST_BYTES = 256 << 20
"""Bytes of all bodies in memory."""
MOST_BODIES = 4
"""Number of the largest bodies for which there is always room."""
FREE_FACTOR = 2
"""Bytes that a tenant may have, as a multiple of the free ones."""
STREAM_BYTES = 4 << 20
"""Bytes that a body counts for that goes to a file in pieces, whatever its size."""
AGAIN_S = 1.0
"""Retry-After in seconds: there is room when other requests have been read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Slowest pace at which a client may send."""

    stall_s: float = 10.0
    """Longest gap between two pieces, in seconds."""
    grace_s: float = 30.0
    """Seconds before the average counts."""
    bytes_per_s: float = 4096.0
    """Least average after the grace."""


class Turn(Protocol):
    """A request's place among others. `request.state.turn` has it where there is one."""

    def leave(self) -> None:
        """Give the place back, if it is held."""

    async def take(self) -> None:
        """Wait for a place."""


async def read_chunks(
    request: Request,
    limit: int,
    pace: Pace,
    code: str = "payload_too_large",
    keep: Callable[[int], None] = lambda _: None,
) -> AsyncIterator[bytes]:
    """Yield the body piece by piece. The request has no place among others while the client sends.

    Args:
        request: The request; nothing of its body was read before.
        limit: Most bytes; a larger Content-Length is refused unread.
        pace: The slowest pace allowed.
        code: Error code of a body that is too large.
        keep: Called with the bytes that the body announces, before one is read, and with those that came so far.

    Raises:
        ManyloraError: What `keep` raises.
        InvalidRequestError: The body is compressed, or Content-Length is not a number.
        PayloadTooLargeError: The body exceeds `limit`.
        TimeoutExceededError: The client stalls or is too slow.
        ClientDisconnect: The client is gone.
    """
    _check_headers(request, limit, code)
    keep(content_length(request) or 0)
    turn: Turn | None = getattr(request.state, "turn", None)
    if turn is not None:
        turn.leave()
    started = time.monotonic()
    received = 0
    more = True
    while more:
        try:
            async with asyncio.timeout(pace.stall_s):
                message = await request.receive()
        except TimeoutError as error:
            raise TimeoutExceededError(
                f"No byte of the body came for {pace.stall_s:g} seconds."
            ) from error
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        received += len(chunk)
        if received > limit:
            raise _too_large(limit, code)
        keep(received)
        elapsed = time.monotonic() - started
        if more and elapsed > pace.grace_s and received < elapsed * pace.bytes_per_s:
            raise TimeoutExceededError(
                f"The body came at less than {pace.bytes_per_s:g} bytes per second."
            )
        if chunk:
            yield chunk
    if turn is not None:
        await turn.take()


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


class BodyBudget:
    """Counts bytes of bodies by tenant. Thread: one event loop.

    Args:
        most_bytes: Most bytes of all tenants.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.held: Counter[str] = Counter()
        """Bytes in memory, by tenant."""
        self.most_bytes = most_bytes
        self._total = 0

    def take(self, tenant: str, num_bytes: int) -> None:
        """Count bytes that come in.

        Raises:
            RateLimitError: The tenant has its part of what there is room for; code limit.bodies.
            CapacityError: There is no room, by the doing of others; code server.overloaded.
        """
        free = self.most_bytes - self._total - num_bytes
        held = self.held[tenant]
        if free < 0 or (held and held + num_bytes > FREE_FACTOR * free):
            num_tenants = len(self.held | Counter({tenant: 1})) + 1  # and one that may come
            if (held + num_bytes) * num_tenants > self.most_bytes:
                message = (
                    f"The tenant's requests on their way have {held} bytes, "
                    "and there is no room for more of them."
                )
                raise RateLimitError(
                    f"{message} Try again in {AGAIN_S:g} s.",
                    retry_after_s=AGAIN_S,
                    code="limit.bodies",
                )
            message = (
                f"The server holds as many bytes of requests as it may. Try again in {AGAIN_S:g} s."
            )
            raise CapacityError(message, retry_after_s=AGAIN_S, code="server.overloaded")
        self.held[tenant] += num_bytes
        self._total += num_bytes

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Count bytes as gone."""
        self._total -= num_bytes
        self.held[tenant] -= num_bytes
        if not self.held[tenant]:
            del self.held[tenant]


class HeldBody:
    """The bytes of one request's body. Its owner must call `end`, whatever happens.

    Args:
        budget: Counts them, for the tenant that acts when the first of them is read.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._tenant = ""
        self.num_bytes = 0
        """Bytes of it that are kept: all of them once it was read."""

    def keep(self, num_bytes: int) -> None:
        """Have room for a number of bytes in all; raises like `BodyBudget.take`."""
        if num_bytes <= self.num_bytes:
            return
        if not self.num_bytes:
            self._tenant = acting.get().tenant
        self._budget.take(self._tenant, num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    def end(self) -> None:
        """Give back all of it: nobody needs the body any more. Later calls do nothing."""
        if self.num_bytes:
            self._budget.give_back(self._tenant, self.num_bytes)
            self.num_bytes = 0


def held_body(request: Request) -> HeldBody:
    """The request's body. `Boundary` makes it, and ends it with the request."""
    return cast(HeldBody, request.state.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyReader:
    """Reads JSON bodies, and parses long ones where they hold nobody up."""

    most_bytes: int
    pace: Pace = field(default_factory=Pace)
    """Slowest pace at which clients may send, files as well."""
    long_work: LongWork = field(default_factory=LongWork)
    """Parses and tokenizes what is long."""

    async def json(self, request: Request, model: type[BodyT]) -> BodyT:
        """Read, parse and validate a body; raises like `json_bytes` and `parsed`."""
        raw = await self.raw(request)
        identity = request.state.identity
        return await self.long_work.run(
            partial(parsed, model, raw), len(raw), identity.tenant_id, identity.tenant_weight
        )

    async def raw(self, request: Request) -> bytes:
        """Read a body whose Content-Type is JSON; raises like `json_bytes`."""
        return await json_bytes(request, self.most_bytes, self.pace)


async def json_bytes(request: Request, limit: int, pace: Pace) -> bytes:
    """Read a body whose Content-Type is JSON.

    Raises:
        RateLimitError, CapacityError: There is no room for it among the bodies in memory.
        InvalidRequestError: Content-Type is something else.
        PayloadTooLargeError: More than `limit` bytes.
        TimeoutExceededError: The client is too slow.
    """
    media_type = (
        request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    )
    if media_type != "application/json":
        raise InvalidRequestError(
            "The body must be JSON: send Content-Type application/json.", code="invalid_json"
        )
    keep = held_body(request).keep
    return b"".join([chunk async for chunk in read_chunks(request, limit, pace, keep=keep)])
