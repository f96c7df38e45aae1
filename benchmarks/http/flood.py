"""Streams that tenants keep open from a process of its own.

The clients whose times are measured beside a flood must not wait while its tokens are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from manylora.benchmarks.http.generator import Call, Generator, Target, ask
from manylora.benchmarks.http.runner import play, sleep_until
from manylora.benchmarks.metrics import Reply


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Requests of which some are open at any time."""

    targets: Sequence[Target]
    """They are asked in turn."""
    count: int
    """Requests that are open at a time."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    vocab_size: int = 512
    seed: int = 0
    every_s: float = 0.0
    """Least time between the begins of two requests of one client."""

    def calls(self, made: Generator) -> Iterator[Call]:
        """Make requests without end."""
        for target in itertools.cycle(self.targets):
            yield made.call(target, self.prompt_tokens, self.output_tokens)

    async def keep_open(self, replies: list[Reply]) -> None:
        """Send requests until this is cancelled."""

        async def send(call: Call, due_s: float) -> None:
            await ask(replies, call, due_s)
            await sleep_until(due_s + self.every_s)

        with contextlib.closing(Generator(self.vocab_size, self.seed)) as made:
            await play(self.calls(made), send, at_once=self.count)


@contextlib.contextmanager
def flood(groups: Sequence[Streams]) -> Iterator[list[list[Reply]]]:
    """Keep streams open until the block is left, and then close them all.

    The replies of each group are there when the block has ended, in the order in which they were sent; the last ones
    are cut short. Both processes read the same clock.

    Raises:
        EOFError: The process of the flood died.
    """
    replies: list[list[Reply]] = []
    if not groups:
        yield replies
        return
    spawn = multiprocessing.get_context("spawn")
    pipe, other = spawn.Pipe()
    process = spawn.Process(target=run_clients, args=(other, groups), daemon=True)
    process.start()
    other.close()  # the pipe ends when the process dies
    pipe.recv()
    try:
        yield replies
    finally:
        pipe.send(None)
        replies += pipe.recv()
        process.join()


def run_clients(pipe: Connection, groups: Sequence[Streams]) -> None:
    """Run the flood's own process: send until something comes through the pipe, and answer with the replies."""
    pipe.send(uvloop.run(_keep_open(pipe, groups)))


async def _keep_open(pipe: Connection, groups: Sequence[Streams]) -> list[list[Reply]]:
    replies: list[list[Reply]] = [[] for _ in groups]
    tasks = [asyncio.create_task(each) for each in map(Streams.keep_open, groups, replies)]
    pipe.send(None)
    await asyncio.to_thread(pipe.recv)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return replies
