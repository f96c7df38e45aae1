"""Loads that a process of its own sends.

The clients whose times are measured beside a flood must not wait while its tokens are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import uvloop

from manylora.benchmarks.http.generator import Load
from manylora.benchmarks.metrics import Reply


@contextlib.contextmanager
def flood(loads: Sequence[Load]) -> Iterator[list[list[Reply]]]:
    """Send loads without end until the block is left, and then close all their streams.

    The replies of each load are there when the block has ended, in the order in which they were sent; the last ones
    are cut short. Both processes read the same clock.

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
    pipe.send(uvloop.run(_send(pipe, loads)))


async def _send(pipe: Connection, loads: Sequence[Load]) -> list[list[Reply]]:
    replies: list[list[Reply]] = [[] for _ in loads]
    tasks = [
        asyncio.create_task(load.send(into)) for load, into in zip(loads, replies, strict=True)
    ]
    pipe.send(None)
    await asyncio.to_thread(pipe.recv)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return replies
