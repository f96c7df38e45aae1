"""How soon does a pushed version answer, and does a server keep its size while a trainer pushes?

    manylora bench push [--pushes 20] [--in-flight 32] [--versions 200] [--json benchmarks/results/push-cpu.json]

A push is one request with the bytes of an adapter of rank 16 on all linear layers, for a base of Qwen2-0.5B's shape.
Each has weights of its own, and is validated as any upload. The time counts from the start of the push to the first
token of a request that follows it; one more request finds the adapter on the device. First there is nothing else to do,
then there are requests for the same adapter. Then come more pushes, and the memory and open files of the server's
processes are read at the beginning and at the end. Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import time
from pathlib import Path
from typing import Any

from manylora.benchmarks.http.generator import Calls, Reply, check_replies, closed_loop
from manylora.benchmarks.http.own_server import OwnServer, plain_server, read_adapter, variant
from manylora.benchmarks.qwen_shape import make_checkpoints
from manylora.benchmarks.report import DEFAULT_CACHE, AddOption, goal, positive, spread, spread_rows
from manylora.client import Client
from manylora.errors import ConfigError, ManyloraError

MAX_MS = {"idle": 300.0, "loaded": 1000.0}
MAX_GROWTH_MIB = 64.0
"""Of all processes of the server, over the last pushes."""
MAX_MORE_FILES = 8
KEEP = 4
FIRST_PROMPT = 1 << 21
"""Number of the first prompt behind a push; the load does not use it."""
ADAPTER = "policy"
WARM_UP = 3
SETTLE = 20
"""Pushes before memory is read for the first time."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Idle, loaded, then the pushes that the memory is read over.

    Raises:
        ConfigError: A base without an adapter, or an adapter without its base.
        ManyloraError: A push or a request failed.
    """
    if (options.model is None) != (options.adapter is None):
        raise ConfigError(
            "--model and --adapter go together: a base, and the adapter to push for it",
            param="adapter",
        )
    if options.model is None:
        base, adapters = make_checkpoints(options.cache)
        options.model, options.adapter = base, adapters[1]
    with plain_server(options.model, options.set) as server:
        phases, sizes, num_load = asyncio.run(_measure(options, server))
    figures = {
        name: {part: spread([run[part] for run in runs]) for part in runs[0]}
        for name, runs in phases.items()
    }
    goals = [
        goal(f"{name}: push to first token, ms", figures[name]["total_ms"]["median"], MAX_MS[name])
        for name in figures
    ]
    growth = {name: sizes[1][name] - sizes[0][name] for name in sizes[0]}
    goals.append(goal("growth over the last pushes, MiB", growth["rss_mib"], MAX_GROWTH_MIB))
    goals.append(goal("open files more than before", growth["open_files"], MAX_MORE_FILES))
    found = {"phases": figures, "sizes": sizes, "load_requests": num_load}
    return {**found, "table": spread_rows(figures), "goals": goals}


async def _measure(
    options: argparse.Namespace, server: OwnServer
) -> tuple[dict[str, list[dict[str, float]]], list[dict[str, float]], int]:
    """The times of the pushes of each phase, the sizes at the begin and at the end, and the requests of the load."""
    key, files = server.add_tenant("trainer"), read_adapter(options.adapter)
    calls, numbers, replies = server.calls(key, 0), itertools.count(), list[Reply]()
    with server.client(key) as client, contextlib.closing(calls.client):

        async def times(count: int) -> list[dict[str, float]]:
            return [
                await _one(options, client, calls, variant(files, number), number)
                for number in itertools.islice(numbers, count)
            ]

        await times(WARM_UP)
        phases = {"idle": await times(options.pushes)}
        load = (
            calls.make(ADAPTER, options.input_tokens, options.output_tokens, index)
            for index in itertools.count()
        )
        loading = asyncio.create_task(closed_loop(load, options.in_flight, replies))
        try:
            await asyncio.sleep(options.settle_s)
            phases["loaded"] = await times(options.pushes)
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        check_replies(replies)
        await asyncio.to_thread(server.wait_idle)
        await times(SETTLE)
        sizes = [_size(server.pid)]
        await times(max(options.versions - SETTLE, 0))
        return phases, [*sizes, _size(server.pid)], len(replies)


async def _one(
    options: argparse.Namespace, client: Client, calls: Calls, files: dict[str, bytes], number: int
) -> dict[str, float]:
    """Push a version and ask for it, then ask again: what the same takes with an adapter that is on the device."""
    start_s = time.perf_counter()
    pushed = await asyncio.to_thread(
        client.push_ephemeral, ADAPTER, files["weights"], files["config"], keep=KEEP
    )
    push_s, replies = time.perf_counter() - start_s, []
    for prompt in (FIRST_PROMPT + 2 * number, FIRST_PROMPT + 2 * number + 1):
        replies.append(reply := Reply(ADAPTER, due_s=time.perf_counter()))
        await calls.make(ADAPTER, options.input_tokens, 2, prompt).send(reply)
        check_replies([reply])
        if reply.headers.get(b"x-manylora-adapter-digest") != pushed["digest"].encode():
            raise ManyloraError("a request after a push was answered by another version")
    first, again = replies
    total_s = first.token_times_s[0] - start_s
    times_s = {"push": push_s, "ttft": first.ttft_s, "total": total_s, "ttft_again": again.ttft_s}
    return {f"{part}_ms": 1000 * seconds for part, seconds in times_s.items()}


def _size(pid: int) -> dict[str, float]:
    """Memory and open files of a process and all below it."""
    pids, memory_kib, files = [pid], 0, 0
    for each in pids:
        with contextlib.suppress(OSError):  # a child that has just ended
            folder = Path(f"/proc/{each}")
            for thread in (folder / "task").iterdir():
                pids += map(int, (thread / "children").read_text().split())
            files += len(list((folder / "fd").iterdir()))
            status = dict(
                line.split(":", 1) for line in (folder / "status").read_text().splitlines()
            )
            memory_kib += int(status["VmRSS"].split()[0])
    return {"rss_mib": memory_kib / 1024, "open_files": files}


def add_options(add: AddOption) -> None:
    """Add the options."""
    add("--pushes", type=positive, default=20, help="timed pushes, idle and again beside the load")
    add("--in-flight", type=positive, default=32)
    add("--input-tokens", type=positive, default=32)
    add("--output-tokens", type=positive, default=64)
    add("--settle-s", type=float, default=5.0, help="seconds of load before its first push")
    add(
        "--versions",
        type=positive,
        default=200,
        help=f"pushes that memory is read over, the first {SETTLE} not",
    )
    add(
        "--model", type=Path, default=None, help="folder of the base; Qwen2-0.5B's shape by default"
    )
    add("--adapter", type=Path, default=None, help="folder of its adapter")
    add("--cache", type=Path, default=DEFAULT_CACHE)
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="setting of the server; may be repeated",
    )
