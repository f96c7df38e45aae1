"""Time from a push to the first token of its version, and the size of a server while a trainer pushes.

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

from manylora.benchmarks.http.flood import Streams, flood
from manylora.benchmarks.http.generator import Generator, Target, check_replies
from manylora.benchmarks.http.own_server import OwnServer, plain_server, read_adapter, variant
from manylora.benchmarks.http.processes import usage
from manylora.benchmarks.qwen_shape import make_checkpoints
from manylora.benchmarks.report import (
    DEFAULT_CACHE,
    AddOption,
    add_positive,
    add_settings_option,
    goal,
    spread_rows,
    spreads,
)
from manylora.client import Client
from manylora.errors import ConfigError, ManyloraError

MAX_MS = {"idle": 300.0, "loaded": 1000.0}
MAX_GROWTH_MIB = 64.0
"""Largest growth of all processes of the server, over the last pushes."""
MAX_MORE_FILES = 8
KEEP = 4
SEED = 1
"""Seed of the prompts behind pushes; the load has another."""
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
        options.model = base
        options.adapter = adapters[1]
    with plain_server(options.model, options.set) as server:
        phases, sizes, num_load = _measure(options, server)
    figures = spreads(phases)
    goals = [
        goal(f"{name}: push to first token, ms", figures[name]["total_ms"]["median"], MAX_MS[name])
        for name in figures
    ]
    growth = {name: sizes[1][name] - sizes[0][name] for name in sizes[0]}
    goals.append(goal("growth over the last pushes, MiB", growth["rss_mib"], MAX_GROWTH_MIB))
    goals.append(goal("open files more than before", growth["open_files"], MAX_MORE_FILES))
    found = {"phases": figures, "sizes": sizes, "load_requests": num_load}
    return {**found, "table": spread_rows(figures), "goals": goals}


def _measure(
    options: argparse.Namespace, server: OwnServer
) -> tuple[dict[str, list[dict[str, float]]], list[dict[str, float]], int]:
    """Push; returns the times by phase, the sizes at the begin and at the end, and the requests of the load."""
    key = server.add_tenant("trainer")
    files = read_adapter(options.adapter)
    target = Target(server.url, key, ADAPTER)
    numbers = itertools.count()
    load = Streams(
        targets=[target],
        count=options.in_flight,
        prompt_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        vocab_size=server.vocab_size,
    )
    made = Generator(server.vocab_size, SEED)
    with server.client(key) as client, asyncio.Runner() as runner, contextlib.closing(made):

        def times(count: int) -> list[dict[str, float]]:
            return [
                runner.run(_one(options, client, made, target, variant(files, number)))
                for number in itertools.islice(numbers, count)
            ]

        times(WARM_UP)
        phases = {"idle": times(options.pushes)}
        with flood([load]) as replies:
            time.sleep(options.settle_s)
            phases["loaded"] = times(options.pushes)
        check_replies(replies[0])
        server.wait_idle()
        times(SETTLE)
        before = usage(server.pid)
        times(max(options.versions - SETTLE, 0))
        after = usage(server.pid)
    sizes = [{"rss_mib": each.mib, "open_files": each.files} for each in (before, after)]
    return phases, sizes, len(replies[0])


async def _one(
    options: argparse.Namespace,
    client: Client,
    made: Generator,
    target: Target,
    files: dict[str, bytes],
) -> dict[str, float]:
    """Push a version and ask for it, then ask again: what the same takes with an adapter that is on the device."""
    start_s = time.perf_counter()
    pushed = client.push_ephemeral(ADAPTER, files["weights"], files["config"], keep=KEEP)
    push_s = time.perf_counter() - start_s
    replies = [
        await made.call(target, options.input_tokens, 2).send([], time.perf_counter())
        for _ in range(2)
    ]
    check_replies(replies)
    digests = {reply.headers.get(b"x-manylora-adapter-digest") for reply in replies}
    if digests != {pushed["digest"].encode()}:
        raise ManyloraError("a request after a push was answered by another version")
    first, again = replies
    total_s = first.token_times_s[0] - start_s
    times_s = {"push": push_s, "ttft": first.ttft_s, "total": total_s, "ttft_again": again.ttft_s}
    return {f"{part}_ms": 1000 * seconds for part, seconds in times_s.items()}


def add_options(add: AddOption) -> None:
    """Add the options."""
    add_positive(
        add,
        pushes=(20, "timed pushes, idle and again beside the load"),
        in_flight=(32, ""),
        input_tokens=(32, ""),
        output_tokens=(64, ""),
    )
    add("--settle-s", type=float, default=5.0, help="seconds of load before its first push")
    add_positive(add, versions=(200, f"pushes that memory is read over, the first {SETTLE} not"))
    add(
        "--model", type=Path, default=None, help="folder of the base; Qwen2-0.5B's shape by default"
    )
    add("--adapter", type=Path, default=None, help="folder of its adapter")
    add("--cache", type=Path, default=DEFAULT_CACHE)
    add_settings_option(add)
