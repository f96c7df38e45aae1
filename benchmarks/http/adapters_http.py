"""What do many adapters, few of them popular, cost a server over HTTP?

    manylora bench adapters-http [--counts 5,100,2000] [--shape demo] [--json benchmarks/results/adapters-http-cpu.json]

32 requests are in flight, for adapters drawn by Zipf's law with exponent 1. The server has just started: every adapter
is loaded from the store. The control is a second server that gets the same requests with all adapters on the device
already. Both are loaded in turns of a few seconds: a slow minute of the machine hits both. Cold is the first part of a
server's load, warm the last. One more arm, tight, has a pool for half of its adapters beside the KV cache. Prints
tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from manylora.benchmarks.http.generator import (
    Calls,
    Reply,
    check_replies,
    closed_loop,
    tokens_per_s,
)
from manylora.benchmarks.http.own_server import BASE_NAME, OwnServer, add_demo_options, plain_server
from manylora.benchmarks.metrics import percentile
from manylora.benchmarks.qwen_shape import make_checkpoints, make_small_adapters
from manylora.benchmarks.report import (
    DEFAULT_CACHE,
    AddOption,
    counts,
    goal,
    positive,
    ratios,
    spread,
    take_turns,
)
from manylora.benchmarks.workloads import zipf_adapters
from manylora.errors import ManyloraError

MIN_RATIO = {"cold": 0.85, "warm": 0.95}
"""Of the control's tokens/s."""
MIN_TIGHT_RATIO = 0.8
MAX_TTFT_RATIO = 2.0
"""Warm TTFT p99 in the control's."""
MAX_COLD_TTFT_MS = 300.0
"""Demo model."""
TURN_S = 5.0
"""Of the load of one server, then it is the other one's turn."""
Spans = dict[str, list[dict[str, Any]]]
"""What each turn of the cold and of the warm span came to."""
_PASS_IN_FLIGHT = 8
_SAMPLE = 40
"""Adapters to ask for their number of pages; the copies repeat after a few."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of adapters, then the pool that is too small."""
    if options.shape == "0.5b":
        options.model, options.adapters = (
            make_checkpoints(options.cache)[0],
            make_small_adapters(options.cache),
        )
    arms = {str(count): measure_arm(options, count, is_tight=False) for count in options.counts}
    if options.tight:
        arms["tight"] = measure_arm(options, options.tight, is_tight=True)
    table, goals = [], []
    for (name, arm), span in itertools.product(arms.items(), MIN_RATIO):
        served, control = (arm["runs"][kind][span] for kind in ("served", "control"))
        ratio = arm["ratio"][span]["median"]
        rates = {
            "tokens/s": served["tokens_per_s"]["median"],
            "control": control["tokens_per_s"]["median"],
            "ratio": ratio,
        }
        times = {"TTFT p99, ms": served["ttft_p99_ms"], "control's": control["ttft_p99_ms"]}
        states = {state: served["states"].get(state, 0.0) for state in ("device", "host", "stored")}
        table.append({"adapters": name, "": span, **rates, **times, **states})
        least = MIN_TIGHT_RATIO if name == "tight" else MIN_RATIO[span]
        goals.append(
            goal(f"{name}: tokens/s over the control's, {span}", ratio, least, is_least=True)
        )
        if name != "tight" and (span == "warm" or options.shape == "demo"):
            limit = MAX_COLD_TTFT_MS if span == "cold" else MAX_TTFT_RATIO * control["ttft_p99_ms"]
            goals.append(goal(f"{name}: TTFT p99, ms, {span}", served["ttft_p99_ms"], limit))
    return {"arms": arms, "table": table, "goals": goals}


def measure_arm(options: argparse.Namespace, count: int, *, is_tight: bool) -> dict[str, Any]:
    """Measure one number of adapters: two new servers in each repeat, with adapters that were uploaded once."""
    chosen = hashlib.sha256(f"own weights {options.model} {options.adapters}".encode()).hexdigest()[
        :8
    ]
    folder = options.cache / f"adapters-http-{chosen}-{count}"
    registered = register(options, folder, count)
    settings = {"control": [], "served": _half_of_pool(options, **registered) if is_tight else []}
    key, names = registered["key"], registered["names"]

    def run(repeat: int) -> dict[str, Spans]:
        with contextlib.ExitStack() as stack:
            servers = {}
            copies = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="manylora-", dir=options.cache)
                )
            )
            for kind, own in settings.items():
                copy = shutil.copytree(folder, copies / kind)
                server = stack.enter_context(
                    plain_server(options.model, [*options.set, *own], folder=copy)
                )
                uvloop.run(
                    _warm_up(
                        options,
                        server,
                        server.calls(key, repeat),
                        names if kind == "control" else [],
                    )
                )
                servers[kind] = server
            return _load_in_turns(options, servers, key, names, repeat)

    runs = [run(repeat) for repeat in range(1, options.repeats + 1)]
    merged = {
        kind: {span: _figures([each[kind][span] for each in runs]) for span in MIN_RATIO}
        for kind in settings
    }
    rates = {
        kind: {span: merged[kind][span]["tokens_per_s"]["repeats"] for span in MIN_RATIO}
        for kind in merged
    }
    ratio = {span: ratios(rates["served"][span], rates["control"][span]) for span in MIN_RATIO}
    return {"adapters": count, "settings": settings, "runs": merged, "ratio": ratio}


def register(options: argparse.Namespace, folder: Path, count: int) -> dict[str, Any]:
    """The key and the names of so many adapters, and the pages of some; uploaded if the folder does not have them."""
    finished = folder / "registered.json"
    if not finished.exists():
        shutil.rmtree(folder, ignore_errors=True)
        with plain_server(options.model, options.set, folder=folder) as server:
            key = server.add_tenant("zipf")
            names = server.upload_copies(key, options.adapters, count)
            client = server.client(key)
            found = [client.get_adapter(name)["pages"] for name in names[:_SAMPLE]]
            shape = {"pages": sum(found) / len(found), "geometry": server.ready["geometry"]}
            finished.write_text(json.dumps({"key": key, "names": names, **shape}))
    return dict(json.loads(finished.read_text()))


def _half_of_pool(
    options: argparse.Namespace,
    names: Sequence[str],
    pages: float,
    geometry: dict[str, int],
    **_: object,
) -> list[str]:
    """The setting of a pool that holds half of the adapters beside the KV cache of what is in flight."""
    blocks = options.in_flight * -(
        -(options.input_tokens + options.output_tokens) // geometry["page_tokens"]
    )
    needed = int(len(names) / 2 * pages + blocks * geometry["num_groups"])
    return [f"memory.gib={(needed + 1.5) * geometry['page_bytes'] / (1 << 30):.6f}"]


def _load_in_turns(
    options: argparse.Namespace,
    servers: dict[str, OwnServer],
    key: str,
    names: Sequence[str],
    seed: int,
) -> dict[str, Spans]:
    """Cold and warm spans of both servers, which get the same requests."""
    num_turns = max(round(options.seconds / TURN_S), 1)
    turn_s = options.seconds / num_turns
    adapters = {kind: enumerate(zipf_adapters(len(names), seed=seed), 1 << 20) for kind in servers}

    async def turn(kind: str) -> dict[str, Any]:
        replies: list[Reply] = []
        with contextlib.closing((calls := servers[kind].calls(key, seed)).client):
            load = (
                calls.make(names[adapter], options.input_tokens, options.output_tokens, number)
                for number, adapter in adapters[kind]
            )
            end_s = time.perf_counter() + turn_s
            await closed_loop(load, options.in_flight, replies, until_s=end_s)
        check_replies(replies)
        return {
            "tokens_per_s": tokens_per_s(replies, end_s - turn_s, end_s),
            # The first requests of a turn come all at once, as they do in no other moment.
            "ttft_ms": [1e3 * reply.ttft_s for reply in replies[options.in_flight :]],
            "states": Counter(
                reply.headers.get(b"x-manylora-adapter-state", b"none").decode()
                for reply in replies
            ),
        }

    turns = take_turns(
        ("served", "control"), num_turns, lambda kind, _: uvloop.run(turn(kind)), first=1
    )
    count = min(max(round(options.span_s / turn_s), 1), num_turns)
    return {kind: {"cold": each[:count], "warm": each[-count:]} for kind, each in turns.items()}


async def _warm_up(
    options: argparse.Namespace, server: OwnServer, calls: Calls, names: Sequence[str]
) -> None:
    """Some requests for the base, then one for each of these adapters, which are on the device then."""
    replies: list[Reply] = []
    with contextlib.closing(calls.client):
        base = (
            calls.make(BASE_NAME, options.input_tokens, options.output_tokens, number)
            for number in range(128)
        )
        await closed_loop(base, options.in_flight, replies)
        one_each = (
            calls.make(name, options.input_tokens, 1, number)
            for number, name in enumerate(names, 128)
        )
        await closed_loop(one_each, _PASS_IN_FLIGHT, replies)
    check_replies(replies)
    found = sum(resident["tier"] == "device" for resident in server.admin.engine()["residents"])
    if found < len(names):
        raise ManyloraError(
            f"The control needs all {len(names)} adapters on the device, but {found} are there after a pass over them. "
            "Give it room, for example with --set memory.gib=8."
        )


def _figures(repeats: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """What the turns of one span show, from those of each repeat."""
    turns = list(itertools.chain(*repeats))
    states = sum((turn["states"] for turn in turns), Counter[str]())
    return {
        "requests": states.total(),
        "tokens_per_s": spread(
            [statistics.mean(turn["tokens_per_s"] for turn in each) for each in repeats]
        ),
        "ttft_p99_ms": percentile([value for turn in turns for value in turn["ttft_ms"]], 99),
        "states": {state: number / states.total() for state, number in states.items()},
    }


def add_options(add: AddOption) -> None:
    """Add its options."""
    add_demo_options(add)
    add("--counts", type=counts, default="5,100,2000", help="registered adapters, comma-separated")
    add(
        "--shape",
        choices=("demo", "0.5b"),
        default="demo",
        help="0.5b: random weights, adapters of rank 8 on q and v",
    )
    add(
        "--tight",
        type=int,
        default=100,
        help="adapters of the arm with a pool for half of them; 0 leaves the arm out",
    )
    add("--in-flight", type=positive, default=32)
    add("--seconds", type=float, default=90.0, help="of load of each server")
    add("--span-s", type=float, default=30.0, help="of a load's begin and of its end")
    add("--repeats", type=positive, default=1)
    add("--input-tokens", type=positive, default=32)
    add("--output-tokens", type=positive, default=32)
    add(
        "--cache",
        type=Path,
        default=DEFAULT_CACHE,
        help="folder where checkpoints and registered adapters are kept",
    )
