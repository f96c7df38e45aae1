"""Clients that keep streams open without pause, in a process of their own.

The clients whose times are measured beside the flood must not wait while its tokens are counted, so the flood has an
event loop and an interpreter of its own. Both processes read the same clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from weft.benchmarks.http.generator import Call, Calls, LoadSettings, Reply, closed_loop, watch_delay
from weft.benchmarks.http.http_stream import EventClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Streams of one tenant."""

    url: str
    """With /v1."""
    key: str
    models: tuple[str, ...]
    """Asked in turn."""
    count: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int
    seed: int
    """Of the prompts."""

    def calls(self) -> Iterator[Call]:
        """Requests without end."""
        calls = Calls(EventClient(self.url, self.key), LoadSettings(vocab_size=self.vocab_size, seed=self.seed))
        return calls.without_end(self.models, self.prompt_tokens, self.output_tokens)


@dataclass(frozen=True, slots=True)
class FloodReport:
    """The replies of a flood; complete when its block has ended."""

    replies: list[list[Reply]]
    """Per group of streams, in the order in which they were sent; those of the end are cut short."""
    delays_s: list[float]
    """How late the flood's own event loop was."""


@contextlib.contextmanager
def flood(groups: Sequence[Stream]) -> Iterator[FloodReport]:
    """Keep streams open until the block is left, and then close them all."""
    report = FloodReport([], [])
    if not groups:
        yield report
        return
    spawn = multiprocessing.get_context("spawn")
    pipe, other = spawn.Pipe()
    process = spawn.Process(target=run_clients, args=(other, groups), daemon=True)
    process.start()
    other.close()  # the pipe ends when the process dies
    pipe.recv()
    try:
        yield report
    finally:
        pipe.send(None)
        found = pipe.recv()
        report.replies.extend(found.replies)
        report.delays_s.extend(found.delays_s)
        process.join()


def run_clients(pipe: Connection, groups: Sequence[Stream]) -> None:
    """What the flood's own process does."""
    uvloop.run(_keep_open(pipe, groups))


async def _keep_open(pipe: Connection, groups: Sequence[Stream]) -> None:
    report = FloodReport([[] for _ in groups], [])
    loops = [
        closed_loop(group.calls(), group.count, found) for group, found in zip(groups, report.replies, strict=True)
    ]
    tasks = [asyncio.create_task(each) for each in (*loops, watch_delay(report.delays_s))]
    pipe.send(None)
    await asyncio.to_thread(pipe.recv)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    pipe.send(report)
