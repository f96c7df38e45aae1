"""How soon does a pushed version answer, and does a server keep its size while a trainer pushes?

    weft bench push [--pushes 20] [--in-flight 32] [--versions 200] [--json benchmarks/results/push-cpu.json]

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
import struct
import time
from pathlib import Path
from typing import Any

from weft.benchmarks.http.generator import Calls, Reply, check_replies, closed_loop
from weft.benchmarks.http.own_server import OwnServer, plain_server, read_adapter
from weft.benchmarks.qwen_shape import make_checkpoints
from weft.benchmarks.report import DEFAULT_CACHE, AddOption, goal, positive, spread
from weft.client import Client
from weft.errors import WeftError

MAX_MS = {"idle": 300.0, "loaded": 1000.0}
MAX_GROWTH_MIB = 64.0
"""Of all processes of the server, over the last pushes."""
KEEP = 4
ADAPTER = "policy"
WARM_UP = 3
SETTLE = 20
"""Pushes before memory is read for the first time."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Idle, loaded, then the pushes that the memory is read over."""
    if options.model is None:
        base, adapters = make_checkpoints(options.cache)
        options.model, options.adapter = base, adapters[1]
    with plain_server(options.model, options.set) as server:
        key = server.add_tenant("trainer")
        with server.client(key) as client:
            trainer = Trainer(client, read_adapter(options.adapter))
            return asyncio.run(_measure(options, server, key, trainer))


class Trainer:
    """Pushes versions that differ in their last weights."""

    def __init__(self, client: Client, files: dict[str, bytes]) -> None:
        self._client = client
        self._files = files
        self._numbers = itertools.count()

    def push(self) -> tuple[float, str]:
        """Push the next version; returns the seconds it took, and its digest."""
        number = next(self._numbers)
        own = struct.pack("<HH", 0x3C00 | number >> 7, 0x3C00 | number & 127)  # finite in every dtype
        weights, config = self._files["weights"][:-4] + own, self._files["config"]
        start_s = time.perf_counter()
        body = self._client.push_ephemeral(ADAPTER, weights, config, keep=KEEP)
        return time.perf_counter() - start_s, body["digest"]


async def _measure(options: argparse.Namespace, server: OwnServer, key: str, trainer: Trainer) -> dict[str, Any]:
    calls = server.calls(key, 0)
    indices = itertools.count(1 << 20)
    for _ in range(WARM_UP):
        await _one(options, calls, trainer, next(indices))
    phases = {"idle": [await _one(options, calls, trainer, next(indices)) for _ in range(options.pushes)]}
    replies: list[Reply] = []
    load = (calls.make(ADAPTER, options.input_tokens, options.output_tokens, index) for index in itertools.count())
    loading = asyncio.create_task(closed_loop(load, options.in_flight, replies))
    try:
        await asyncio.sleep(options.settle_s)
        phases["loaded"] = [await _one(options, calls, trainer, next(indices)) for _ in range(options.pushes)]
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    check_replies(replies)
    await asyncio.to_thread(server.wait_idle)
    sizes = []
    for number in range(options.versions):
        if number == SETTLE:
            sizes.append(_size(server.pid))
        await _one(options, calls, trainer, next(indices))
    sizes.append(_size(server.pid))
    return _result(phases, sizes, len(replies))


async def _one(options: argparse.Namespace, calls: Calls, trainer: Trainer, index: int) -> dict[str, float]:
    """Push a version and ask for it, then ask again: what the same takes with an adapter that is on the device."""
    start_s = time.perf_counter()
    push_s, digest = await asyncio.to_thread(trainer.push)
    replies = []
    for prompt in (2 * index, 2 * index + 1):
        replies.append(reply := Reply(ADAPTER, due_s=time.perf_counter()))
        await calls.make(ADAPTER, options.input_tokens, 2, prompt).send(reply)
        check_replies([reply])
        if reply.headers.get(b"x-weft-adapter-digest") != digest.encode():
            raise WeftError("a request after a push was answered by another version")
    first, again = replies
    return {
        "push_ms": push_s * 1000,
        "ttft_ms": first.ttft_s * 1000,
        "total_ms": (first.token_times_s[0] - start_s) * 1000,
        "ttft_again_ms": again.ttft_s * 1000,
    }


def _result(phases: dict[str, list[dict[str, float]]], sizes: list[dict[str, float]], num_load: int) -> dict[str, Any]:
    figures = {name: {part: spread([run[part] for run in runs]) for part in runs[0]} for name, runs in phases.items()}
    table = [
        {"": name, "part": part, **{each: found[each] for each in ("median", "min", "max")}}
        for name, parts in figures.items()
        for part, found in parts.items()
    ]
    goals = [
        goal(f"{name}: push to first token, ms", figures[name]["total_ms"]["median"], MAX_MS[name]) for name in figures
    ]
    if len(sizes) == 2:
        first, last = sizes
        goals.append(goal("growth over the last pushes, MiB", last["rss_mib"] - first["rss_mib"], MAX_GROWTH_MIB))
        goals.append(goal("open files more than before", last["open_files"] - first["open_files"], 8))
    return {"phases": figures, "sizes": sizes, "load_requests": num_load, "table": table, "goals": goals}


def _size(pid: int) -> dict[str, float]:
    """Memory and open files of a process and all below it."""
    pids, memory_kib, files = [pid], 0, 0
    for each in pids:
        with contextlib.suppress(OSError):  # a child that has just ended
            folder = Path(f"/proc/{each}")
            for thread in (folder / "task").iterdir():
                pids += map(int, (thread / "children").read_text().split())
            files += len(list((folder / "fd").iterdir()))
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            memory_kib += int(status["VmRSS"].split()[0])
    return {"rss_mib": memory_kib / 1024, "open_files": files}


def add_options(add: AddOption) -> None:
    """Add the options."""
    add("--pushes", type=positive, default=20, help="timed pushes, idle and again beside the load")
    add("--in-flight", type=positive, default=32)
    add("--input-tokens", type=positive, default=32)
    add("--output-tokens", type=positive, default=64)
    add("--settle-s", type=float, default=5.0, help="seconds of load before its first push")
    add("--versions", type=positive, default=200, help="pushes that memory is read over")
    add("--model", type=Path, default=None, help="folder of the base; Qwen2-0.5B's shape by default")
    add("--adapter", type=Path, default=None, help="folder of its adapter")
    add("--cache", type=Path, default=DEFAULT_CACHE)
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of the server; may be repeated")
