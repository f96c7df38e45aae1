"""Writes requests for an OpenAI-compatible server, sends them, and records what comes back.

Every answer is checked for its end, its usage and its token counts; a wrong one is an error, never a sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson

from manylora.benchmarks.http.http_stream import EventClient, HttpStatusError
from manylora.benchmarks.http.runner import play
from manylora.benchmarks.metrics import Reply
from manylora.benchmarks.workloads import TimedRequest
from manylora.errors import ManyloraError

TIMEOUT_S = 600.0
"""Longest wait for a whole answer."""
REFUSED_PAUSE_S = 0.25
"""Pause of a client after a refusal."""
_LOWEST_PROMPT_ID = 16
"""Ids below are often special tokens."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a server, as one tenant asks it."""

    url: str
    """With /v1."""
    key: str
    model: str


@dataclass(frozen=True, slots=True)
class Call:
    """A request, ready to be sent."""

    client: EventClient
    model: str
    body: bytes
    prompt_tokens: int | None = None
    """Tokens that the server should count; None if this is not known. The next field is like it."""
    output_tokens: int | None = None
    path: str = "/completions"
    """Below the base URL."""

    async def send(self, replies: list[Reply], due_s: float) -> Reply:
        """Send the request and record what comes; the connection is closed if this is cancelled.

        Args:
            replies: Get the reply from the moment when the request is sent.
            due_s: When the request was due.

        Returns:
            The reply, with `error`.
        """
        reply = Reply(self.model, due_s, sent_s=time.perf_counter())
        replies.append(reply)
        answer = _Answer(reply)

        def note_head(status: int, headers: dict[bytes, bytes]) -> None:
            reply.status = status
            reply.headers = headers
            reply.head_s = time.perf_counter()

        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self.client.post(self.path, self.body, answer.take, note_head)
            reply.error = reply.error or answer.fault(self)
        except TimeoutError:
            reply.error = f"no answer within {TIMEOUT_S:g} s"
        except (HttpStatusError, OSError, ValueError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        finally:
            reply.done_s = time.perf_counter()
        return reply


class Generator:
    """Makes requests, and keeps the connections on which they are sent until it is closed.

    Args:
        vocab_size: Prompt ids are drawn below this.
        seed: Determines all prompts, by the order in which they are made.
    """

    def __init__(self, vocab_size: int = 512, seed: int = 0) -> None:
        self._ids = range(min(_LOWEST_PROMPT_ID, vocab_size - 1), vocab_size)
        self._draw = random.Random(seed)
        self._clients: dict[tuple[str, str], EventClient] = {}

    def call(self, target: Target, prompt_tokens: int, output_tokens: int) -> Call:
        """Make a streamed request for exactly this many tokens, with a prompt of its own."""
        body = {
            "model": target.model,
            "prompt": self._draw.choices(self._ids, k=prompt_tokens),
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        client = self.client(target)
        return Call(client, target.model, orjson.dumps(body), prompt_tokens, output_tokens)

    def client(self, target: Target) -> EventClient:
        """The connections to a server with a key."""
        at = (target.url, target.key)
        if at not in self._clients:
            self._clients[at] = EventClient(*at)
        return self._clients[at]

    def close(self) -> None:
        """Close the idle connections."""
        for client in self._clients.values():
            client.close()


async def ask(replies: list[Reply], call: Call, due_s: float) -> None:
    """Send a request, and pause after a refusal."""
    if (await call.send(replies, due_s)).is_refused:
        await asyncio.sleep(REFUSED_PAUSE_S)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in order of arrival."""

    plan: Sequence[TimedRequest]
    """`adapter` is the index of a target."""
    vocab_size: int = 512
    in_flight: int | None = None
    """Requests in flight in a closed loop; None is an open loop."""

    async def send(
        self, targets: Sequence[Target], seed: int = 0, num_warm_up: int = 0
    ) -> list[Reply]:
        """Send all requests and wait for all answers.

        Args:
            targets: Whom to ask.
            seed: Determines the prompts.
            num_warm_up: Requests sent before, all due at once, for each target at least one; 0 sends none.
        """
        each = list({request.adapter: request for request in self.plan}.values())
        warm_up = [*each, *self.plan][: max(num_warm_up, len(each))] if num_warm_up else []
        with contextlib.closing(Generator(self.vocab_size, seed)) as made:
            await self._send(made, targets, [replace(request, arrival_s=0) for request in warm_up])
            return await self._send(made, targets, self.plan)

    async def _send(
        self, made: Generator, targets: Sequence[Target], plan: Sequence[TimedRequest]
    ) -> list[Reply]:
        replies: list[Reply] = []
        calls = [
            made.call(targets[each.adapter], each.prompt_tokens, each.output_tokens)
            for each in plan
        ]
        is_open = self.in_flight is None
        await play(
            calls,
            partial(ask, replies),
            at_once=len(calls) if self.in_flight is None else self.in_flight,
            arrivals_s=[each.arrival_s for each in plan] if is_open else None,
        )
        return replies


def check_replies(replies: Iterable[Reply]) -> None:
    """Check that all requests were answered or refused.

    Raises:
        ManyloraError: One failed.
    """
    if failed := next(
        (reply.error for reply in replies if reply.error and not reply.is_refused), None
    ):
        raise ManyloraError(f"A request failed: {failed}")


class _Answer:
    """Reads the events of one stream."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
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
            self._reply.error = f"error event: {event['error']}"
            return
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            self._reply.token_times_s.append(now)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def fault(self, call: Call) -> str | None:
        """Say what is wrong with the finished answer."""
        if not self._is_done or self._finish_reason is None:
            return "the stream ended without finish_reason and [DONE]"
        if self._usage is None:
            return "no usage came, although stream_options asked for it"
        self._reply.prompt_tokens = int(self._usage["prompt_tokens"])
        self._reply.completion_tokens = int(self._usage["completion_tokens"])
        for asked, counted, name in (
            (call.output_tokens, self._reply.completion_tokens, "tokens came"),
            (call.prompt_tokens, self._reply.prompt_tokens, "prompt tokens came"),
        ):
            if asked is not None and counted != asked:
                return f"usage says {counted} {name}, {asked} were asked for"
        return None
