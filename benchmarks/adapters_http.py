"""What do many adapters, few of them popular, cost a server over HTTP?

    weft bench adapters-http [--counts 5,100,2000] [--shape demo] [--json benchmarks/results/adapters-http-cpu.json]

32 requests in flight for adapters by Zipf's law with exponent 1, against a server that has just started, so that every
adapter comes from the store. The control is the same requests with every adapter on the device beforehand, at another
start of the same server: a first pass over all of them brings them there. It tells what distinct adapters cost by
themselves. Cold is the first span of a run, warm the last. One more arm, tight, has twice as many adapters as fit the
pool beside the KV cache. Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from weft.benchmarks.arguments import counts, positive
from weft.benchmarks.calls import Calls, first_error, tokens_per_s, watch_delay
from weft.benchmarks.generator import Call, Reply, closed_loop
from weft.benchmarks.metrics import distribution, percentile
from weft.benchmarks.own_server import BASE_NAME, OwnServer, add_demo_options, plain_server
from weft.benchmarks.qwen_shape import make_checkpoints, make_small_adapters
from weft.benchmarks.report import DEFAULT_CACHE, goal, spread
from weft.benchmarks.rounds import ratios, take_turns
from weft.benchmarks.workloads import zipf_adapters
from weft.errors import WeftError

MIN_RATIO = {"cold": 0.85, "warm": 0.95}
"""Of the control's tokens/s."""
MIN_TIGHT_RATIO = 0.8
MAX_TTFT_RATIO = 2.0
"""Warm TTFT p99 in the control's."""
MAX_COLD_TTFT_MS = 300.0
"""Demo model."""
_PASS_IN_FLIGHT = 8
_SAMPLE = 40
"""Adapters whose pages are asked for; copies repeat after a few."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of adapters, then the pool that is too small."""
    if options.shape == "0.5b":
        options.model, options.adapters = make_checkpoints(options.cache)[0], make_small_adapters(options.cache)
    arms = {str(count): measure_arm(options, count, is_tight=False) for count in options.counts}
    if options.tight:
        arms["tight"] = measure_arm(options, options.tight, is_tight=True)
    table, goals = [], []
    for (name, arm), span in itertools.product(arms.items(), MIN_RATIO):
        served, control = (arm["runs"][kind][span] for kind in ("served", "control"))
        ratio = arm["ratio"][span]["median"]
        table.append(
            {
                "adapters": name,
                "": span,
                "tokens/s": served["tokens_per_s"]["median"],
                "control": control["tokens_per_s"]["median"],
                "ratio": ratio,
                "TTFT p99, ms": served["ttft_p99_ms"],
                "control's": control["ttft_p99_ms"],
                **{state: served["states"].get(state, 0.0) for state in ("device", "host", "stored")},
            }
        )
        least = MIN_TIGHT_RATIO if name == "tight" else MIN_RATIO[span]
        goals.append(goal(f"{name}: tokens/s over the control's, {span}", ratio, least, is_least=True))
        if name != "tight" and (span == "warm" or options.shape == "demo"):
            limit = MAX_COLD_TTFT_MS if span == "cold" else MAX_TTFT_RATIO * control["ttft_p99_ms"]
            goals.append(goal(f"{name}: TTFT p99, ms, {span}", served["ttft_p99_ms"], limit))
    return {"arms": arms, "table": table, "goals": goals}


def measure_arm(options: argparse.Namespace, count: int, *, is_tight: bool) -> dict[str, Any]:
    """Restart the server before each run of the load and of its control; adapters are uploaded once and kept."""
    chosen = hashlib.sha256(f"own weights {options.model} {options.adapters}".encode()).hexdigest()[:8]
    folder = options.cache / f"adapters-http-{chosen}-{count}"
    registered = register(options, folder, count)
    settings = {"served": _half_of_pool(options, **registered) if is_tight else [], "control": options.control_set}
    delays_s: list[float] = []

    def run(kind: str, repeat: int) -> dict[str, Any]:
        with plain_server(options.model, [*options.set, *settings[kind]], folder=folder) as server:
            calls = server.calls(registered["key"], repeat)
            load = _put_load(options, server, calls, registered["names"], kind == "control", delays_s)
            return uvloop.run(load)

    runs = take_turns(settings, options.repeats, run, first=1)
    merged = {
        kind: {span: _merged([each[span] for each in found]) for span in MIN_RATIO} for kind, found in runs.items()
    }
    rates = {kind: {span: merged[kind][span]["tokens_per_s"]["repeats"] for span in MIN_RATIO} for kind in runs}
    return {
        "adapters": count,
        "settings": settings,
        "runs": merged,
        "ratio": {span: ratios(rates["served"][span], rates["control"][span]) for span in MIN_RATIO},
        "client_delay_ms": distribution(delays_s, 1e3),
    }


def register(options: argparse.Namespace, folder: Path, count: int) -> dict[str, Any]:
    """The key and the names of so many adapters, and the pages of some; uploaded if the folder does not have them."""
    finished = folder / "registered.json"
    if not finished.exists():
        shutil.rmtree(folder, ignore_errors=True)
        with plain_server(options.model, options.set, folder=folder) as server:
            key = server.add_tenant("zipf")
            names = server.upload_copies(key, options.adapters, count)
            found = [server.call("GET", f"/v1/adapters/{name}", key)["pages"] for name in names[:_SAMPLE]]
            shape = {"pages": sum(found) / len(found), "geometry": server.ready["geometry"]}
            finished.write_text(json.dumps({"key": key, "names": names, **shape}))
    return dict(json.loads(finished.read_text()))


def _half_of_pool(
    options: argparse.Namespace, names: Sequence[str], pages: float, geometry: dict[str, int], **_: object
) -> list[str]:
    """The setting of a pool that holds half of the adapters beside the KV cache of what is in flight."""
    blocks = options.in_flight * -(-(options.input_tokens + options.output_tokens) // geometry["page_tokens"])
    needed = int(len(names) / 2 * pages + blocks * geometry["num_groups"])
    return [f"memory.gib={(needed + 1.5) * geometry['page_bytes'] / (1 << 30):.6f}"]


async def _put_load(
    options: argparse.Namespace,
    server: OwnServer,
    calls: Calls,
    names: Sequence[str],
    is_control: bool,
    delays_s: list[float],
) -> dict[str, Any]:
    numbers = itertools.count()

    def call(model: str, tokens: int = options.output_tokens) -> Call:
        return calls.make(model, options.input_tokens, tokens, next(numbers))

    with contextlib.closing(calls.client):
        await closed_loop((call(BASE_NAME) for _ in range(4 * options.in_flight)), options.in_flight, [])
        if is_control:
            await closed_loop((call(name, 1) for name in names), _PASS_IN_FLIGHT, [])
            found = sum(resident["tier"] == "device" for resident in server.engine()["residents"])
            if found < len(names):
                raise WeftError(
                    f"The control needs all {len(names)} adapters on the device, but {found} are there after a pass "
                    "over them. Give it room with --control-set, for example adapter.slots=4096 or memory.gib=8."
                )
        numbers = itertools.count(1 << 20)  # the same requests, whatever went before
        replies: list[Reply] = []
        watch = asyncio.create_task(watch_delay(delays_s))
        start_s = time.perf_counter()
        load: Iterator[Call] = (call(names[adapter]) for adapter in zipf_adapters(len(names), seed=calls.seed))
        await closed_loop(load, options.in_flight, replies, until_s=start_s + options.seconds)
        watch.cancel()
    if failed := first_error(replies):
        raise WeftError(f"A request failed: {failed}")
    ends = {"cold": options.span_s, "warm": options.seconds}
    return {span: _span(replies, start_s + end - options.span_s, start_s + end) for span, end in ends.items()}


def _span(replies: Sequence[Reply], start_s: float, end_s: float) -> dict[str, Any]:
    sent = [reply for reply in replies if start_s <= reply.sent_s < end_s]
    return {
        "tokens_per_s": tokens_per_s(replies, start_s, end_s),
        "ttft_ms": [1e3 * reply.ttft_s for reply in sent],
        "states": Counter(reply.headers.get(b"x-weft-adapter-state", b"none").decode() for reply in sent),
    }


def _merged(spans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    states = sum((each["states"] for each in spans), Counter[str]())
    return {
        "requests": states.total(),
        "tokens_per_s": spread([each["tokens_per_s"] for each in spans]),
        "ttft_p99_ms": percentile([value for each in spans for value in each["ttft_ms"]], 99),
        "states": {state: number / states.total() for state, number in states.items()},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    add_demo_options(parser)
    add = parser.add_argument
    add("--counts", type=counts, default="5,100,2000", help="registered adapters, comma-separated")
    add("--shape", choices=("demo", "0.5b"), default="demo", help="0.5b: random weights, adapters of rank 8 on q and v")
    add("--tight", type=int, default=100, help="adapters of the arm whose pool holds half of them; 0 leaves it out")
    add("--in-flight", type=positive, default=32)
    add("--seconds", type=float, default=90.0, help="of a run")
    add("--span-s", type=float, default=30.0, help="of a run's begin and of its end")
    add("--repeats", type=positive, default=1)
    add("--input-tokens", type=positive, default=32)
    add("--output-tokens", type=positive, default=32)
    add(
        "--control-set", action="append", default=[], metavar="NAME=VALUE", help="more settings of the control's server"
    )
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder where checkpoints and registered adapters are kept")
