"""How long does a quiet tenant wait for its first token while another tenant floods the server?

    manylora bench fairness [--seconds 20] [--repeats 3] [--json benchmarks/results/fairness-cpu.json]

The flood keeps 200 streams of 400 tokens open, from a separate process. The quiet tenant sends one request at a time,
with pauses. All arms run on one server, in reverse order in every second repeat:

    alone      only the quiet tenant
    one        both tenants use one adapter each
    all        the flood uses all its adapters and the base
    hundred    the flood uses 100 adapters
    same       the flooding tenant itself sends the quiet requests, for another adapter
    weights    two flooding tenants of weights 3 and 1, no quiet requests

With `--replicas 2` there are two replicas, each with half of the cores, and two gateways on all of them: floods go
through one gateway, quiet requests through the other.

Each arm is also measured without the quiet requests, to see what they cost the flood. "Flood step" is the mean time of
an engine step then. Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from manylora.benchmarks.http.generator import (
    Call,
    Calls,
    LoadSettings,
    Reply,
    check_replies,
    closed_loop,
    tokens_per_s,
    watch_delay,
)
from manylora.benchmarks.http.http_stream import EventClient
from manylora.benchmarks.http.own_server import (
    BASE_NAME,
    OwnServer,
    Served,
    add_demo_options,
    many_servers,
    plain_server,
)
from manylora.benchmarks.metrics import distribution, percentile
from manylora.benchmarks.report import AddOption, goal, positive, spread, take_turns

WEIGHTS = {"heavy": 3, "light": 1}
MAX_RATIO = 3.0
"""Largest quiet TTFT p95, as a multiple of that of the arm `alone`."""
MAX_STEPS = 5.0
"""The same in steps of the flood; the larger of both limits holds."""
MAX_SAME_RATIO = 10.0
"""The same in the arm `same`."""
MIN_KEPT = 0.95
"""Least share of its tokens/s that the flood keeps beside the quiet requests."""
MAX_WEIGHT_ERROR = 0.05
RAMP_S = 4.0
"""Seconds from the first request of a flood to the first span: by then the server has admitted its streams."""
TURNS = 10
"""Spans with the quiet requests, and as many without."""
_OTHERS = 1 << 16
"""Number of the adapter of the quiet requests; the flood does not use it."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Requests that one tenant keeps open without pause."""

    served: Served
    """Its models are asked in turn."""
    count: int
    prompt_tokens: int
    output_tokens: int
    settings: LoadSettings

    def calls(self) -> Iterator[Call]:
        """Requests without end."""
        made = Calls(EventClient(self.served.url, self.served.key), self.settings)
        for index, model in enumerate(itertools.cycle(self.served.models)):
            yield made.make(model, self.prompt_tokens, self.output_tokens, index)


@dataclass(frozen=True, slots=True)
class FloodReport:
    """The replies of a flood; complete when its block has ended."""

    replies: list[list[Reply]]
    """Per group of streams, in the order in which they were sent; those of the end are cut short."""
    delays_s: list[float]
    """How late the flood's own event loop was."""


@dataclass(frozen=True, slots=True)
class Arm:
    """The flooding streams and the quiet requests of one arm."""

    groups: tuple[Streams, ...]
    quiet: tuple[str, str] | None
    """Key and model of the quiet requests, if there are any."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all arms on a server that is started for them."""
    many = options.replicas
    with (
        many_servers(options.model, options.set, many)
        if many
        else plain_server(options.model, options.set) as server
    ):
        arms = make_arms(options, server)
        carry_out(options, server, arms["all"], repeat=0)  # warms up
        runs = take_turns(
            arms,
            options.repeats,
            lambda name, repeat: carry_out(options, server, arms[name], repeat),
            1,
        )
    return make_result(runs)


def make_arms(options: argparse.Namespace, server: OwnServer) -> dict[str, Arm]:
    """Tenants and adapters of all arms."""
    keys = {name: server.add_tenant(name) for name in ("flood", "quiet", *WEIGHTS)}
    seeds = itertools.count(1)

    def adapters(tenant: str, count: int, first: int) -> list[str]:
        return server.upload_copies(keys[tenant], options.adapters, count, first)

    def group(tenant: str, models: list[str], count: int = options.streams) -> Streams:
        served = Served(server.url, keys[tenant], models)
        settings = LoadSettings(vocab_size=server.ready["vocab_size"], seed=next(seeds))
        return Streams(served, count, options.prompt_tokens, options.flood_tokens, settings)

    few = adapters("flood", 5, 0)
    quiet = (keys["quiet"], adapters("quiet", 1, _OTHERS)[0])
    arms = {"alone": Arm((), quiet)}
    for name, models in (
        ("one", few[:1]),
        ("all", [BASE_NAME, *few]),
        ("hundred", adapters("flood", options.many, 5)),
    ):
        arms[name] = Arm((group("flood", models),), quiet)
    arms["same"] = Arm(
        (group("flood", few[:1]),), (keys["flood"], adapters("flood", 1, _OTHERS + 1)[0])
    )
    both = tuple(group(name, adapters(name, 1, 0), options.streams // 2) for name in WEIGHTS)
    for tenant, weight in WEIGHTS.items():
        server.admin.update_tenant(tenant, weight=weight)
    return {**arms, "weights": Arm(both, None)}


def carry_out(
    options: argparse.Namespace, server: OwnServer, arm: Arm, repeat: int
) -> dict[str, Any]:
    """Run one arm once; spans with and without the quiet requests take turns.

    The speed of a shared machine drifts by more in a minute than what a quiet tenant takes, and the flood's streams
    begin and end in waves of some seconds: short turns even both out.
    """
    replies: list[Reply] = []
    delays_s: list[float] = []
    spans: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    steps_s = [math.nan]
    with flood(arm.groups) as report:
        time.sleep(min(RAMP_S, options.seconds) if arm.groups else 0)
        for turn in range(2 * TURNS):
            name = ("with", "without")[(turn + turn // 2 + repeat) % 2]  # a b b a
            start_s = time.perf_counter()
            if arm.quiet and name == "with":
                uvloop.run(_ask_quietly(options, server, *arm.quiet, replies, delays_s))
            elif arm.groups:
                steps_s.append(_watch_steps(options, server))
            spans[name].append((start_s, time.perf_counter()))
    server.wait_idle()
    check_replies(itertools.chain(replies, *report.replies))
    rates = {
        name: [
            statistics.mean(tokens_per_s(group, *span) for span in turns)
            for group in report.replies
        ]
        for name, turns in spans.items()
    }
    return {
        "ttft_ms": [1e3 * reply.ttft_s for reply in replies if reply.token_times_s],
        "refused": sum(reply.is_refused for reply in replies),
        "client_delay_ms": [1e3 * delay for delay in delays_s],
        "flood_client_delay_ms": [1e3 * delay for delay in report.delays_s],
        "flood_refused": sum(reply.is_refused for group in report.replies for reply in group),
        "flood_step_ms": 1e3 * statistics.mean(steps_s[1:] or steps_s),
        "rates": rates["with"],
        "kept": sum(rates["with"]) / sum(rates["without"]) if arm.groups else None,
    }


@contextlib.contextmanager
def flood(groups: Sequence[Streams]) -> Iterator[FloodReport]:
    """Keep streams open from a process of its own until the block is left, and then close them all.

    The clients whose times are measured beside the flood must not wait while its tokens are counted. Both processes
    read the same clock.
    """
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


def run_clients(pipe: Connection, groups: Sequence[Streams]) -> None:
    """What the flood's own process does."""
    uvloop.run(_keep_open(pipe, groups))


async def _keep_open(pipe: Connection, groups: Sequence[Streams]) -> None:
    report = FloodReport([[] for _ in groups], [])
    loops = (
        closed_loop(each.calls(), each.count, found)
        for each, found in zip(groups, report.replies, strict=True)
    )
    tasks = [asyncio.create_task(each) for each in (*loops, watch_delay(report.delays_s))]
    pipe.send(None)
    await asyncio.to_thread(pipe.recv)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    pipe.send(report)


def _watch_steps(options: argparse.Namespace, server: OwnServer) -> float:
    """Seconds per step of an engine while nothing but the flood is there."""
    first, start_s = _num_steps(server), time.perf_counter()
    time.sleep(options.seconds / TURNS)
    steps: float = (_num_steps(server) - first) / max(1, options.replicas)
    return (time.perf_counter() - start_s) / max(1, steps)


def _num_steps(server: OwnServer) -> int:
    return sum(int(engine["num_steps"]) for engine in server.engines())


async def _ask_quietly(
    options: argparse.Namespace,
    server: OwnServer,
    key: str,
    model: str,
    replies: list[Reply],
    delays_s: list[float],
) -> None:
    """Send one request at a time until the time is over; the first one, which connects, does not count."""
    watch = asyncio.create_task(watch_delay(delays_s))
    draw = random.Random(f"{options.seed}/{len(replies)}")
    calls = server.calls(
        key, time.perf_counter_ns(), server.other_url
    )  # a prompt that was seen before measures the prefix cache
    with contextlib.closing(calls.client):
        await calls.make(model, options.prompt_tokens, options.quiet_tokens, 0).send(
            first := Reply(model, due_s=0.0)
        )
        check_replies([first])
        end_s = time.perf_counter() + options.seconds / TURNS
        while time.perf_counter() < end_s:
            await asyncio.sleep(draw.expovariate(1e3 / options.pause_ms))
            replies.append(Reply(model, due_s=time.perf_counter()))
            await calls.make(model, options.prompt_tokens, options.quiet_tokens, len(replies)).send(
                replies[-1]
            )
    watch.cancel()


def make_result(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Quiet times by arm and as multiples of those of `alone`, the rates of the flood, and the goals."""
    arms = {name: _arm_result(each) for name, each in runs.items()}
    alone = arms["alone"]["ttft_ms"]["p95"]
    table, goals = [], []
    for name, arm in arms.items():
        ttft, step_ms = arm["ttft_ms"], arm["flood_step_ms"]
        kept = arm["kept"] and arm["kept"]["median"]
        times = {f"TTFT {key}, ms": value for key, value in ttft.items()} | {
            "p95 / alone": ttft["p95"] / alone
        }
        flooding = {"flood step, ms": step_ms, "flood tokens/s": arm["tokens_per_s"], "kept": kept}
        table.append(
            {"arm": name, **times, "client late p99, ms": arm["client_delay_ms"]["p99"], **flooding}
        )
        if name == "weights":
            ratio = arm["rates"][0] / arm["rates"][1] / (WEIGHTS["heavy"] / WEIGHTS["light"])
            goals.append(
                goal(
                    "weights 3:1: error of the ratio of tokens/s", abs(ratio - 1), MAX_WEIGHT_ERROR
                )
            )
        elif name != "alone":
            limit = (
                MAX_SAME_RATIO * alone
                if name == "same"
                else max(MAX_RATIO * alone, MAX_STEPS * step_ms)
            )
            goals.append(goal(f"{name}: quiet TTFT p95, ms", ttft["p95"], limit))
            goals.append(
                goal(
                    f"{name}: part of its tokens/s that the flood keeps",
                    kept,
                    MIN_KEPT,
                    is_least=True,
                )
            )
            goals.append(goal(f"{name}: quiet requests refused", arm["refused"], 0))
    return {"arms": arms, "table": table, "goals": goals}


def _arm_result(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ttft = [value for run in runs for value in run["ttft_ms"]]
    delays = ("client_delay_ms", "flood_client_delay_ms")
    rates = [sum(each) / len(each) for each in zip(*(run["rates"] for run in runs), strict=True)]
    return {
        "requests": len(ttft),
        "ttft_ms": {
            "p50": percentile(ttft, 50),
            "p95": percentile(ttft, 95),
            "max": max(ttft, default=None),
        },
        "ttft_p95_ms_by_repeat": [percentile(run["ttft_ms"], 95) for run in runs],
        **{name: distribution([value for run in runs for value in run[name]]) for name in delays},
        **{name: sum(run[name] for run in runs) for name in ("refused", "flood_refused")},
        "flood_step_ms": statistics.mean(run["flood_step_ms"] for run in runs),
        "rates": rates,
        "tokens_per_s": sum(rates),
        "kept": spread([run["kept"] for run in runs]) if rates else None,
    }


def add_options(add: AddOption) -> None:
    """Add its options."""
    add_demo_options(add)
    add(
        "--seconds", type=float, default=20.0, help="of an arm with the quiet requests, and without"
    )
    add("--repeats", type=positive, default=3)
    add(
        "--replicas",
        type=int,
        default=0,
        help="behind two gateways; 0 is one server that serves by itself",
    )
    add("--streams", type=positive, default=200, help="that the flood keeps open")
    add(
        "--many",
        type=positive,
        default=100,
        help="adapters of the flood in the arm that is called hundred",
    )
    add("--flood-tokens", type=positive, default=400, help="output tokens of a stream of the flood")
    add("--quiet-tokens", type=positive, default=16, help="output tokens of a quiet request")
    add("--prompt-tokens", type=positive, default=32)
    add("--pause-ms", type=float, default=100.0, help="mean pause between quiet requests")
