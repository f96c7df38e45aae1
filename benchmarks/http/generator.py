"""Sends requests to an OpenAI-compatible server and records what comes back.

Closed loop: a fixed number of requests in flight. Open loop: requests start when they are due, however slow the server.
Every answer is checked for its end, its usage and its token counts; a wrong one is an error, never a sample.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from manylora.benchmarks.http.http_stream import EventClient, HttpStatusError
from manylora.benchmarks.metrics import RequestRecord
from manylora.errors import ManyloraError

_TICK_S = 0.005
TIMEOUT_S = 600.0
"""Longest wait for a whole answer."""
REFUSED_PAUSE_S = 0.25
"""Pause of a closed loop after a refusal."""
PATH = "/completions"
"""Below the base URL."""
_LOWEST_PROMPT_ID = 16
"""Ids below are often special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How requests are written."""

    vocab_size: int = 512
    """Prompt ids are drawn below this."""
    seed: int = 0


@dataclass(slots=True)
class Reply(RequestRecord):
    """The answer to one request, with its times."""

    sent_s: float = math.nan
    head_s: float = math.nan
    """When status and headers were there."""
    status: int = 0
    """0 when no answer came."""
    headers: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def is_refused(self) -> bool:
        """The server refused the request for now (429 or 503)."""
        return self.status in (429, 503)

    @property
    def retry_after_s(self) -> float | None:
        """Retry-After in seconds; None without one."""
        told = self.headers.get(b"retry-after", b"")
        return float(told) if told.isdigit() else None


@dataclass(frozen=True, slots=True)
class Call:
    """A request, ready to be sent."""

    client: EventClient
    model: str
    prompt_tokens: int
    output_tokens: int
    body: bytes

    async def send(self, reply: Reply) -> None:
        """Send the request and fill in `reply`, with `error`. The connection is closed if this is cancelled."""
        answer = _Answer(reply)

        def note_head(status: int, headers: dict[bytes, bytes]) -> None:
            reply.status, reply.headers, reply.head_s = status, headers, time.perf_counter()

        reply.sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self.client.post(PATH, self.body, answer.take, note_head)
            reply.error = reply.error or answer.fault(self)
        except TimeoutError:
            reply.error = f"no answer within {TIMEOUT_S:g} s"
        except (HttpStatusError, OSError, ValueError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        finally:
            reply.done_s = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Calls:
    """Makes requests of one key; a prompt depends on the seed and the request's index only."""

    client: EventClient
    settings: LoadSettings

    def make(self, model: str, prompt_tokens: int, output_tokens: int, index: int) -> Call:
        """A request."""
        draw, vocab_size = random.Random(f"{self.settings.seed}/{index}"), self.settings.vocab_size
        lowest = min(_LOWEST_PROMPT_ID, vocab_size - 1)
        body = {
            "model": model,
            "prompt": [draw.randrange(lowest, vocab_size) for _ in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        return Call(self.client, model, prompt_tokens, output_tokens, orjson.dumps(body))


async def open_loop(
    calls: Sequence[Call], arrivals_s: Sequence[float], replies: list[Reply]
) -> None:
    """Send each request so many seconds after the start, and wait for all answers."""
    start_s = time.perf_counter()

    async def send_when_due(call: Call, arrival_s: float) -> None:
        replies.append(reply := Reply(call.model, due_s=start_s + arrival_s))
        await asyncio.sleep(max(0.0, reply.due_s - time.perf_counter()))
        await call.send(reply)

    await asyncio.gather(*map(send_when_due, calls, arrivals_s))


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


def check_replies(replies: Iterable[Reply]) -> None:
    """Check that all requests were answered or refused.

    Raises:
        ManyloraError: One failed.
    """
    if failed := next(
        (reply.error for reply in replies if reply.error and not reply.is_refused), None
    ):
        raise ManyloraError(f"A request failed: {failed}")


def tokens_per_s(replies: Sequence[Reply], start_s: float, end_s: float) -> float:
    """Tokens that came within a span, per second of it."""
    return sum(start_s <= at < end_s for reply in replies for at in reply.token_times_s) / (
        end_s - start_s
    )


async def watch_delay(delays_s: list[float]) -> None:
    """Every few milliseconds, note how late this event loop runs its timers. Never returns."""
    while True:
        due_s = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        delays_s.append(max(0.0, time.perf_counter() - due_s))


class _Answer:
    """Reads the events of one stream."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._usage: dict[str, Any] | None = None
        self._finish_reason: str | None = None
        self._is_done = False

    def take(self, data: bytes) -> None:
        now = time.perf_counter()
        if data == b"[DONE]":
            self._is_done = True
            return
        event = orjson.loads(data)
        if "error" in event:
            self._record.error = f"error event: {event['error']}"
            return
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            self._record.token_times_s.append(now)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def fault(self, call: Call) -> str | None:
        """What is wrong with the finished answer."""
        if not self._is_done or self._finish_reason is None:
            return "the stream ended without finish_reason and [DONE]"
        if self._usage is None:
            return "no usage came, although stream_options asked for it"
        self._record.prompt_tokens = int(self._usage["prompt_tokens"])
        self._record.completion_tokens = int(self._usage["completion_tokens"])
        if self._record.completion_tokens != call.output_tokens:
            return f"usage says {self._record.completion_tokens} tokens came, {call.output_tokens} were asked for"
        if self._record.prompt_tokens != call.prompt_tokens:
            return f"usage says {self._record.prompt_tokens} prompt tokens, {call.prompt_tokens} were sent"
        return None
