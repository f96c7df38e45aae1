"""Writes requests for an OpenAI-compatible server, sends them, and records what comes back.

Every answer is checked for its end, its usage and its token counts; a wrong one is an error, never a sample.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import orjson

from manylora.benchmarks.http.http_stream import EventClient, HttpStatusError
from manylora.benchmarks.http.runner import play, sleep_until
from manylora.benchmarks.metrics import Reply
from manylora.benchmarks.workloads import draw_adapters
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
    vocab_size: int = 512
    """Prompt ids are drawn below this."""


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

        def note_head(status: int, headers: dict[bytes, bytes]) -> None:
            reply.status = status
            reply.headers = headers
            reply.head_s = time.perf_counter()

        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self.client.post(self.path, self.body, partial(_take, reply), note_head)
            reply.error = reply.error or self._fault(reply)
        except TimeoutError:
            reply.error = f"no answer within {TIMEOUT_S:g} s"
        except (HttpStatusError, OSError, ValueError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        finally:
            reply.done_s = time.perf_counter()
        return reply

    def _fault(self, reply: Reply) -> str | None:
        """Say what is wrong with a finished answer."""
        if not reply.is_whole or reply.finish_reason is None:
            return "the stream ended without finish_reason and [DONE]"
        if not reply.prompt_tokens:
            return "no usage came, although stream_options asked for it"
        for asked, counted, name in (
            (self.output_tokens, reply.completion_tokens, "tokens came"),
            (self.prompt_tokens, reply.prompt_tokens, "prompt tokens came"),
        ):
            if asked is not None and counted != asked:
                return f"usage says {counted} {name}, {asked} were asked for"
        return None


def _take(reply: Reply, data: bytes) -> None:
    """Read an event of the stream."""
    now_s = time.perf_counter()
    if data == b"[DONE]":
        reply.is_whole = True
        return
    event = orjson.loads(data)
    if "error" in event:
        reply.error = f"error event: {event['error']}"
        return
    for choice in event.get("choices", ()):
        reply.token_times_s.append(now_s)
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    if usage := event.get("usage"):
        reply.prompt_tokens = int(usage["prompt_tokens"])
        reply.completion_tokens = int(usage["completion_tokens"])


class Generator:
    """Makes requests, and keeps the connections on which they are sent until its block is left.

    Args:
        seed: Determines all prompts, by the order in which they are made.
    """

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._clients: dict[tuple[str, str], EventClient] = {}

    def call(self, target: Target, prompt_tokens: int, output_tokens: int) -> Call:
        """Make a streamed request for exactly this many tokens, with a prompt of its own."""
        last = target.vocab_size - 1
        ids = range(min(_LOWEST_PROMPT_ID, last), last + 1)
        body = {
            "model": target.model,
            "prompt": self._draw.choices(ids, k=prompt_tokens),
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

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of a number of clients: whom they ask, for texts of which length, and when."""

    targets: Sequence[Target]
    at_once: int
    """Clients, each with one request in flight at a time."""
    prompt_tokens: int | range = 0
    """Lengths in tokens; from a range they are drawn."""
    output_tokens: int | range = 0
    popularity: str | None = None
    """Draws targets, as `draw_adapters`; None asks them in turn."""
    count: int | None = None
    """Requests in all; None has no end."""
    arrivals_s: Sequence[float] | None = None
    """Seconds after the start at which requests are due; None sends one as soon as a client is free."""
    every_s: float = 0.0
    """Least time between the begins of two requests of one client."""
    seed: int = 0

    def calls(self, made: Generator) -> Iterator[Call]:
        """Make the requests."""
        draw = random.Random(self.seed)
        num_targets = len(self.targets)
        chosen = (
            itertools.cycle(range(num_targets))
            if self.popularity is None
            else draw_adapters(self.popularity, num_targets, self.seed)
        )
        for index in itertools.islice(chosen, self.count):
            lengths = (
                draw.choice(each) if isinstance(each, range) else each
                for each in (self.prompt_tokens, self.output_tokens)
            )
            yield made.call(self.targets[index], *lengths)

    async def send(
        self, replies: list[Reply] | None = None, until_s: float = math.inf
    ) -> list[Reply]:
        """Send the requests and wait for all answers.

        Args:
            replies: Get each reply from the moment when its request is sent.
            until_s: No request is begun from this time of `time.perf_counter` on.
        """
        sent = [] if replies is None else replies

        async def ask(call: Call, due_s: float) -> None:
            if (await call.send(sent, due_s)).is_refused:
                await asyncio.sleep(REFUSED_PAUSE_S)
            await sleep_until(due_s + self.every_s)

        with Generator(self.seed) as made:
            calls = self.calls(made)
            await play(
                calls if self.count is None else list(calls),
                ask,
                at_once=self.at_once,
                arrivals_s=self.arrivals_s,
                until_s=until_s,
            )
        return sent


def check_replies(replies: Iterable[Reply]) -> None:
    """Check that all requests were answered or refused.

    Raises:
        ManyloraError: One failed.
    """
    for reply in replies:
        if reply.error and not reply.is_refused:
            raise ManyloraError(f"A request failed: {reply.error}")
