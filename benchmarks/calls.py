"""Requests whose answers are counted, not parsed, so that a load leaves the cores to the server beside it.

The tokens of an answer are checked at its end against the usage that the server sends.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weft.benchmarks.generator import LoadSettings, PlannedRequest, request_body
from weft.benchmarks.http_stream import EventClient
from weft.benchmarks.metrics import RequestRecord

ANSWER_WITHIN_S = 600.0
REFUSED_PAUSE_S = 0.25
"""Pause of a closed loop after a refusal, so that it does not spin."""
_TICK_S = 0.005
_TOKEN = b'"choices":[{'
"""In every event of a token, and not in the last one, which carries the usage."""
_USAGE = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(slots=True)
class Reply(RequestRecord):
    """What came of one request."""

    sent_s: float = math.nan
    head_s: float = math.nan
    """When status and headers were there."""
    status: int = 0
    """0 when no answer came."""
    headers: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def is_refused(self) -> bool:
        """The server told the client to come again later."""
        return self.status in (429, 503)

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which to come again; None where the server does not say."""
        told = self.headers.get(b"retry-after", b"")
        return float(told) if told.isdigit() else None


@dataclass(frozen=True, slots=True)
class Calls:
    """Makes requests of one key; no two have the same prompt."""

    client: EventClient
    vocab_size: int
    seed: int

    def make(self, model: str, prompt_tokens: int, output_tokens: int, index: int) -> Call:
        """A request; its prompt depends on seed and index only."""
        request = PlannedRequest(model, prompt_tokens, output_tokens)
        settings = LoadSettings(vocab_size=self.vocab_size, seed=self.seed)
        return Call(self.client, model, output_tokens, request_body(request, settings, index))


@dataclass(frozen=True, slots=True)
class Call:
    """A request, ready to be sent."""

    client: EventClient
    model: str
    output_tokens: int
    body: bytes

    async def send(self, reply: Reply) -> None:
        """Ask and fill in `reply`, `error` included; where this is cancelled, the connection is closed."""

        def note_head(status: int, headers: dict[bytes, bytes]) -> None:
            reply.status, reply.headers, reply.head_s = status, headers, time.perf_counter()

        reply.sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                last = await self.client.count("/completions", self.body, _TOKEN, reply.token_times_s, note_head)
            usage = _USAGE.search(last)
            reply.completion_tokens = int(usage[1]) if usage else 0
            if reply.completion_tokens != self.output_tokens:
                reply.error = f"HTTP {reply.status} without {self.output_tokens} tokens, at its end: {last[-500:]!r}"
        except OSError as error:
            reply.error = f"{type(error).__name__}: {error}"
        finally:
            reply.done_s = time.perf_counter()


async def closed_loop(
    calls: Iterator[Call], in_flight: int, replies: list[Reply], *, until_s: float = math.inf
) -> None:
    """Keep requests in flight until there are no more, or until a time of `time.perf_counter`; wait for the last.

    Replies are in the list from the moment when their request is sent.
    """

    async def work() -> None:
        for call in calls:
            reply = Reply(call.model, due_s=time.perf_counter())
            if reply.due_s >= until_s:
                return
            replies.append(reply)
            await call.send(reply)
            if reply.is_refused:
                await asyncio.sleep(REFUSED_PAUSE_S)

    await asyncio.gather(*(work() for _ in range(in_flight)))


def first_error(replies: Sequence[Reply]) -> str | None:
    """What went wrong, refusals apart."""
    return next((reply.error for reply in replies if reply.error and not reply.is_refused), None)


def tokens_per_s(replies: Sequence[Reply], start_s: float, end_s: float) -> float:
    """Tokens that came within a span, per second of it."""
    return sum(start_s <= at < end_s for reply in replies for at in reply.token_times_s) / (end_s - start_s)


async def watch_delay(delays_s: list[float]) -> None:
    """Note again and again how much later than asked for this event loop comes to a timer; never returns."""
    while True:
        due_s = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        delays_s.append(max(0.0, time.perf_counter() - due_s))
