"""Time from a push to the first token of its version, and the size of a server while a trainer pushes.

    manylora bench push [--pushes 20] [--in-flight 32] [--versions 200] [--json benchmarks/results/push-cpu.json]

A push is one request with the bytes of an adapter of rank 16 on all linear layers, for a base of Qwen2-0.5B's shape.
Each has weights of its own, and is validated as any upload. The time counts from the start of the push to the first
token of a request that follows it; one more request finds the adapter on the device. First there is nothing else to do,
then there are requests for the same adapter. Then come more pushes, and the memory and open files of the server's
processes are read at the beginning and at the end. Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from argparse import Namespace
from pathlib import Path

from manylora.benchmarks.http.generator import (
    Generator,
    Load,
    check_replies,
    flood,
)
from manylora.benchmarks.http.own_server import OwnServer, plain_server, variant
from manylora.benchmarks.metrics import Reply
from manylora.benchmarks.qwen_shape import make_checkpoints
from manylora.benchmarks.report import SETTINGS, Figures, Options, goal, spread_rows, spreads
from manylora.client.checkpoint import checkpoint_bytes
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


def measure(options: Namespace) -> Figures:
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
        options.model, (_, options.adapter, *_) = make_checkpoints()
    with plain_server(options.model, options.set) as server:
        phases, sizes, num_load = _measure(options, server)
    figures = spreads(phases)
    before, after = sizes
    goals = [
        goal(f"{name}: push to first token, ms", found["total_ms"]["median"], MAX_MS[name])
        for name, found in figures.items()
    ]
    for name, key, limit in (
        ("growth over the last pushes, MiB", "rss_mib", MAX_GROWTH_MIB),
        ("open files more than before", "open_files", MAX_MORE_FILES),
    ):
        goals.append(goal(name, after[key] - before[key], limit))
    found = {"phases": figures, "sizes": sizes, "load_requests": num_load}
    return {**found, "table": spread_rows(figures), "goals": goals}


def _measure(
    options: Namespace, server: OwnServer
) -> tuple[dict[str, list[dict[str, float]]], list[dict[str, float]], int]:
    """Push; returns the times by phase, the sizes at the begin and at the end, and the requests of the load."""
    config, weights = checkpoint_bytes(options.adapter, None)
    target = server.target("trainer", ADAPTER)
    numbers = itertools.count()
    load = Load(
        targets=[target],
        at_once=options.in_flight,
        prompt_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
    )
    with server.client("trainer") as client, asyncio.Runner() as runner, Generator(SEED) as made:

        def push() -> dict[str, float]:
            """Push a version and ask for it, then ask again, when the adapter is on the device."""
            own = variant(weights, next(numbers))
            start_s = time.perf_counter()
            pushed = client.push_ephemeral(ADAPTER, own, config, keep=KEEP)
            pushed_s = time.perf_counter()
            replies: list[Reply] = []
            for _ in range(2):
                call = made.call(target, options.input_tokens, 2)
                runner.run(call.send(replies, time.perf_counter()))
            check_replies(replies)
            digests = {reply.headers.get(b"x-manylora-adapter-digest") for reply in replies}
            if digests != {pushed["digest"].encode()}:
                raise ManyloraError("a request after a push was answered by another version")
            first, again = replies
            return {
                "push_ms": 1e3 * (pushed_s - start_s),
                "ttft_ms": 1e3 * first.ttft_s,
                "total_ms": 1e3 * (first.token_times_s[0] - start_s),
                "ttft_again_ms": 1e3 * again.ttft_s,
            }

        def times(count: int) -> list[dict[str, float]]:
            return [push() for _ in range(count)]

        times(WARM_UP)
        phases = {"idle": times(options.pushes)}
        with flood([load]) as replies:
            time.sleep(options.settle_s)
            phases["loaded"] = times(options.pushes)
        check_replies(replies[0])
        server.wait_idle()
        times(SETTLE)
        before = server.usage(has_children=True)
        times(max(options.versions - SETTLE, 0))
        return phases, [before, server.usage(has_children=True)], len(replies[0])


OPTIONS: Options = {
    "pushes": (20, "timed pushes, idle and again beside the load"),
    "in_flight": (32, ""),
    "input_tokens": (32, ""),
    "output_tokens": (64, ""),
    "settle_s": (5.0, "seconds of load before its first push"),
    "versions": (200, f"pushes that memory is read over, the first {SETTLE} not"),
    "model": (None, "folder of the base; Qwen2-0.5B's shape by default", Path),
    "adapter": (None, "folder of its adapter", Path),
    **SETTINGS,
}
