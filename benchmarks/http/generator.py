"""Writes requests for an OpenAI-compatible server, sends them, and records what comes back.

Every answer is checked for its end, its usage and its token counts; a wrong one is an error, never a sample.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import orjson
import uvloop

from manylora.benchmarks.http.http_stream import EventClient, HttpStatusError
from manylora.benchmarks.http.runner import play, sleep_until
from manylora.benchmarks.metrics import Reply
from manylora.benchmarks.workloads import draw_adapters
from manylora.errors import ManyloraError

TIMEOUT_S = 600.0
"""Longest wait for a whole answer."""
REFUSED_PAUSE_S = 0.25
"""Pause of a client that gives up after a refusal."""
RETRY_AFTER_S = 1.0
"""Pause of a client that heeds Retry-After, where a refusal has none."""
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

    async def send(self, replies: list[Reply], due_s: float, attempt: int = 1) -> Reply:
        """Send the request and record what comes; the connection is closed if this is cancelled.

        Args:
            replies: Get the reply from the moment when the request is sent.
            due_s: When the request was due.
            attempt: Number of this sending, from 1.

        Returns:
            The reply, with `error`.
        """
        reply = Reply(self.model, due_s, sent_s=time.perf_counter(), attempt=attempt)
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
    at_once: int = 1
    """Clients of a closed loop, each with one request in flight at a time."""
    prompt_tokens: int | range = 0
    """Lengths in tokens; from a range they are drawn."""
    output_tokens: int | range = 0
    popularity: str | None = None
    """Draws targets, as `draw_adapters`; None asks them in turn."""
    count: int | None = None
    """Requests in all; None has no end, or that of the arrivals."""
    arrivals_s: Sequence[float] | None = None
    """Seconds after the start at which requests are due, each with a client of its own (open loop); None sends one as
    soon as a client is free."""
    every_s: float = 0.0
    """Least time between the begins of two requests of one client."""
    pause_s: float = 0.0
    """Mean of the random pause before each request."""
    tries: int = 1
    """Most sendings of a request that is refused."""
    heeds_retry_after: bool = False
    """True if a client waits as long as Retry-After says; else it tries again at once."""
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
        count = self.count if self.arrivals_s is None else len(self.arrivals_s)
        for index in itertools.islice(chosen, count):
            lengths = (
                draw.choice(each) if isinstance(each, range) else each
                for each in (self.prompt_tokens, self.output_tokens)
            )
            yield made.call(self.targets[index], *lengths)

    def run(self, until_s: float = math.inf) -> list[Reply]:
        """Send the requests and wait for all answers; none is begun from a time of `time.perf_counter` on."""
        replies: list[Reply] = []

        async def send() -> None:
            await send_all([(self, replies)], until_s)

        uvloop.run(send())
        return replies

    async def ask(self, replies: list[Reply], call: Call, due_s: float) -> None:
        """Act as a client: send a request when it is due, and again while it is refused and tries are left."""
        if self.pause_s:
            await asyncio.sleep(random.expovariate(1 / self.pause_s))
            due_s = time.perf_counter()
        begun_s = due_s
        for attempt in range(1, self.tries + 1):
            reply = await call.send(replies, due_s, attempt)
            if not reply.is_refused:
                break
            if self.heeds_retry_after:
                await asyncio.sleep(reply.retry_after_s or RETRY_AFTER_S)
            due_s = time.perf_counter()
        else:
            await asyncio.sleep(REFUSED_PAUSE_S)
        await sleep_until(begun_s + self.every_s)


def send_all(
    loads: Iterable[tuple[Load, list[Reply]]], until_s: float = math.inf
) -> asyncio.Task[None]:
    """Begin to send loads side by side; requests that have an end are made before the first is sent.

    Args:
        loads: With a list for each, which gets each reply from the moment when its request is sent.
        until_s: No request is begun from this time of `time.perf_counter` on.

    Returns:
        A task that ends with the last answer.
    """
    stack = ExitStack()
    clients = []
    for load, replies in loads:
        calls: Iterable[Call] = load.calls(stack.enter_context(Generator(load.seed)))
        at_once = load.at_once
        if load.arrivals_s is not None:
            at_once = len(load.arrivals_s)
        if load.count is not None or load.arrivals_s is not None:
            calls = list(calls)
        act = partial(load.ask, replies)
        clients.append(
            play(calls, act, at_once=at_once, arrivals_s=load.arrivals_s, until_s=until_s)
        )

    async def send() -> None:
        with stack:
            await asyncio.gather(*clients)

    return asyncio.create_task(send())


@contextmanager
def flood(loads: Sequence[Load]) -> Iterator[list[list[Reply]]]:
    """Send loads without end from a process of its own until the block is left, and then close all their streams.

    Clients whose times are measured beside a flood must not wait while its tokens are counted. The replies of each
    load are there when the block has ended, in the order in which they were sent; the last ones are cut short. Both
    processes read the same clock.

    Raises:
        EOFError: The process of the flood died.
    """
    replies: list[list[Reply]] = []
    if not loads:
        yield replies
        return
    spawn = multiprocessing.get_context("spawn")
    pipe, other = spawn.Pipe()
    process = spawn.Process(target=run_clients, args=(other, loads), daemon=True)
    process.start()
    other.close()  # the pipe ends when the process dies
    pipe.recv()
    try:
        yield replies
    finally:
        pipe.send(None)
        replies += pipe.recv()
        process.join()


def run_clients(pipe: Connection, loads: Sequence[Load]) -> None:
    """Run the flood's own process: send until something comes through the pipe, and answer with the replies."""
    sent = [(load, list[Reply]()) for load in loads]
    uvloop.run(_send(pipe, sent))
    pipe.send([replies for _, replies in sent])


async def _send(pipe: Connection, sent: Sequence[tuple[Load, list[Reply]]]) -> None:
    sending = send_all(sent)
    pipe.send(None)
    await asyncio.to_thread(pipe.recv)
    sending.cancel()
    await asyncio.wait([sending])


def check_replies(replies: Iterable[Reply]) -> None:
    """Check that all requests were answered or refused.

    Raises:
        ManyloraError: One failed.
    """
    for reply in replies:
        if reply.error and not reply.is_refused:
            raise ManyloraError(f"A request failed: {reply.error}")
