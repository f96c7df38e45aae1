"""Sends a planned load to an OpenAI-compatible server and records what comes back.

Closed loop: a fixed number of requests in flight. Open loop: requests start when they are due, however slow the server.
Every answer is checked for its end, its usage and its token counts; a wrong one is an error, never a sample.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from weft.benchmarks.http_stream import EventClient, HttpStatusError
from weft.benchmarks.metrics import RequestRecord

_WORDS = ("warp", "weft", "loom", "thread", "shuttle", "wool", "silk", "bobbin", "heddle", "selvage")
_LOWEST_PROMPT_ID = 16
"""Ids below are often special tokens."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send."""

    model: str
    prompt_tokens: int
    """Ids, or words where the prompt is text."""
    output_tokens: int
    arrival_s: float = 0.0
    """Seconds after the start at which it is due; ignored in a closed loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How requests are written and sent."""

    api: Literal["completions", "chat"] = "completions"
    prompt: Literal["ids", "words"] = "ids"
    vocab_size: int = 512
    """Prompt ids are drawn below this."""
    ignore_eos: bool = True
    """Ask for exactly `output_tokens`; false for servers that lack the field."""
    concurrency: int | None = 32
    """Requests in flight in a closed loop; None is an open loop."""
    timeout_s: float = 600.0
    seed: int = 0

    @property
    def path(self) -> str:
        """Route below the base URL."""
        return "/chat/completions" if self.api == "chat" else "/completions"


async def run_load(client: EventClient, plan: Sequence[PlannedRequest], settings: LoadSettings) -> list[RequestRecord]:
    """Send all requests and wait for all answers; records are in the order of the plan."""
    bodies = [request_body(request, settings, index) for index, request in enumerate(plan)]
    records = [RequestRecord(request.model, due_s=0.0) for request in plan]
    jobs = list(zip(plan, bodies, records, strict=True))
    start = time.perf_counter()

    async def one(request: PlannedRequest, body: bytes, record: RequestRecord) -> None:
        if settings.concurrency is None:
            record.due_s = start + request.arrival_s
            await asyncio.sleep(max(0.0, record.due_s - time.perf_counter()))
        else:
            record.due_s = time.perf_counter()
        await _ask(client, request, body, record, settings)

    if settings.concurrency is None:
        await asyncio.gather(*(one(*job) for job in jobs))
    else:
        queue = iter(jobs)

        async def worker() -> None:
            for job in queue:
                await one(*job)

        await asyncio.gather(*(worker() for _ in range(settings.concurrency)))
    return records


def request_body(request: PlannedRequest, settings: LoadSettings, index: int) -> bytes:
    """The JSON of one request; the prompt depends on seed and index only."""
    draw = random.Random(f"{settings.seed}/{index}")
    body: dict[str, Any] = {
        "model": request.model,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    text = " ".join(draw.choice(_WORDS) for _ in range(request.prompt_tokens))
    if settings.api == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    elif settings.prompt == "words":
        body["prompt"] = text
    else:
        lowest = min(_LOWEST_PROMPT_ID, settings.vocab_size - 1)
        body["prompt"] = [draw.randrange(lowest, settings.vocab_size) for _ in range(request.prompt_tokens)]
    return orjson.dumps(body)


async def _ask(
    client: EventClient, request: PlannedRequest, body: bytes, record: RequestRecord, settings: LoadSettings
) -> None:
    answer = _Answer(record)
    try:
        async with asyncio.timeout(settings.timeout_s), aclosing(client.events(settings.path, body)) as events:
            async for data in events:
                answer.take(data, time.perf_counter())
        record.error = record.error or answer.fault(request, settings)
    except TimeoutError:
        record.error = f"no answer within {settings.timeout_s:g} s"
    except (HttpStatusError, OSError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.done_s = time.perf_counter()


class _Answer:
    """What the events of one stream said so far."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._usage: dict[str, Any] | None = None
        self._finish_reason: str | None = None
        self._is_done = False

    def take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        event = orjson.loads(data)
        if "error" in event:
            self._record.error = f"error event: {event['error']}"
            return
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta")
            is_role_only = delta is not None and not delta.get("content") and choice.get("finish_reason") is None
            if not is_role_only:
                self._record.token_times_s.append(now)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def fault(self, request: PlannedRequest, settings: LoadSettings) -> str | None:
        """What is wrong with the finished answer."""
        if not self._is_done or self._finish_reason is None:
            return "the stream ended without finish_reason and [DONE]"
        if self._usage is None:
            return "no usage came, although stream_options asked for it"
        self._record.prompt_tokens = int(self._usage["prompt_tokens"])
        self._record.completion_tokens = int(self._usage["completion_tokens"])
        if settings.ignore_eos and self._record.completion_tokens != request.output_tokens:
            return f"usage says {self._record.completion_tokens} tokens came, {request.output_tokens} were asked for"
        sends_ids = settings.api == "completions" and settings.prompt == "ids"
        if sends_ids and self._record.prompt_tokens != request.prompt_tokens:
            return f"usage says {self._record.prompt_tokens} prompt tokens, {request.prompt_tokens} were sent"
        return None
