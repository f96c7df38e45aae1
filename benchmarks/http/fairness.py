"""The wait of a quiet tenant for its first token, while another tenant floods the server.

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

import asyncio
import itertools
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import uvloop

from manylora.benchmarks.http.generator import (
    Generator,
    Load,
    Target,
    check_replies,
    flood,
)
from manylora.benchmarks.http.own_server import DEMO, OwnServer, cluster, plain_server
from manylora.benchmarks.http.runner import play, watch_delay
from manylora.benchmarks.metrics import Reply, distribution, percentile, tokens_per_s
from manylora.benchmarks.report import Figures, Options, goal, make_row, spread, take_turns

WEIGHTS = {"heavy": 3, "light": 1}
MAX_RATIO = 3.0
"""Largest quiet TTFT p95, as a multiple of that of the arm `alone`."""
MAX_STEPS = 5.0
"""Largest quiet TTFT p95 in steps of the flood; the larger of both limits holds."""
MAX_SAME_RATIO = 10.0
"""Largest quiet TTFT p95 in the arm `same`, as a multiple of that of the arm `alone`."""
MIN_KEPT = 0.95
"""Least share of its tokens/s that the flood keeps beside the quiet requests."""
MAX_WEIGHT_ERROR = 0.05
RAMP_S = 4.0
"""Seconds from the first request of a flood to the first span: by then the server has admitted its streams."""
TURNS = 10
"""Spans with the quiet requests, and as many without."""
_OTHERS = 1 << 16
"""Number of the adapter of the quiet requests; the flood does not use it."""
COLUMNS = {
    "arm": "arm",
    "TTFT p50, ms": "ttft_ms.p50",
    "TTFT p95, ms": "ttft_ms.p95",
    "TTFT max, ms": "ttft_ms.max",
    "p95 / alone": "over_alone",
    "client late p99, ms": "client_delay_ms.p99",
    "flood step, ms": "flood_step_ms",
    "flood tokens/s": "tokens_per_s",
    "kept": "kept.median",
}
"""Figures of an arm in the table."""


@dataclass(slots=True)
class Arm:
    """The flooding loads and the quiet requests of one arm, and what all repeats found."""

    loads: Sequence[Load]
    quiet: Load | None
    """Quiet requests, if there are any."""
    replies: list[Reply] = field(default_factory=list)
    """Answers to quiet requests."""
    delays_s: list[float] = field(default_factory=list)
    """Lateness of the quiet client's event loop."""
    steps_s: list[float] = field(default_factory=list)
    """Mean seconds of a step in each span without the quiet requests."""
    rates: list[dict[str, list[float]]] = field(default_factory=list)
    """Tokens/s of each load in each repeat, with the quiet requests and without."""


def measure(options: Namespace) -> Figures:
    """Run all arms on a server that is started for them."""
    with ExitStack() as stack:
        if options.replicas:
            servers = cluster(options.model, options.set, options.replicas, divides_cores=True)
            _, (server, other) = stack.enter_context(servers)
        else:
            server = other = stack.enter_context(plain_server(options.model, options.set))
        arms = make_arms(options, server, f"{other.admin.url}/v1")
        warm_up = Arm(arms["all"].loads, arms["all"].quiet)
        carry_out(options, server, warm_up, repeat=0)
        take_turns(
            arms,
            options.repeats,
            lambda name, repeat: carry_out(options, server, arms[name], repeat),
            first=1,
        )
    return make_result(arms)


def make_arms(options: Namespace, server: OwnServer, quiet_url: str) -> dict[str, Arm]:
    """Make the tenants and adapters of all arms; quiet requests go to a URL of their own."""
    seeds = itertools.count(1)

    def adapters(tenant: str, count: int, first: int = 0) -> list[Target]:
        return server.adapters(tenant, options.adapters, count, first)

    def load(targets: list[Target], **fields: Any) -> Load:  # noqa: ANN401 - those of Load
        prompt_tokens = options.prompt_tokens
        return Load(targets=targets, prompt_tokens=prompt_tokens, seed=next(seeds), **fields)

    def streams(targets: list[Target], count: int = options.streams) -> Load:
        return load(targets, at_once=count, output_tokens=options.flood_tokens)

    def rare(tenant: str, number: int) -> Load:
        (target,) = adapters(tenant, 1, number)
        pause_s = options.pause_ms / 1e3
        asked = [replace(target, url=quiet_url)]
        return load(asked, output_tokens=options.quiet_tokens, pause_s=pause_s)

    few = adapters("flood", 5)
    quiet = rare("quiet", _OTHERS)
    weighted = [streams(adapters(name, 1), options.streams // 2) for name in WEIGHTS]
    for tenant, weight in WEIGHTS.items():
        server.admin.update_tenant(tenant, weight=weight)
    return {
        "alone": Arm([], quiet),
        "one": Arm([streams(few[:1])], quiet),
        "all": Arm([streams([server.target("flood"), *few])], quiet),
        "hundred": Arm([streams(adapters("flood", options.many, 5))], quiet),
        "same": Arm([streams(few[:1])], rare("flood", _OTHERS + 1)),
        "weights": Arm(weighted, None),
    }


def carry_out(options: Namespace, server: OwnServer, arm: Arm, repeat: int) -> None:
    """Run one arm once; spans with and without the quiet requests take turns.

    The speed of a shared machine drifts by more in a minute than what a quiet tenant takes, and the flood's streams
    begin and end in waves of some seconds: short turns even both out.
    """
    spans: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    with flood(arm.loads) as flooded:
        time.sleep(min(RAMP_S, options.seconds) if arm.loads else 0)
        for turn in range(2 * TURNS):
            name = ("with", "without")[(turn + turn // 2 + repeat) % 2]  # a b b a
            start_s = time.perf_counter()
            if arm.quiet and name == "with":
                uvloop.run(_ask_quietly(arm, arm.quiet, options.seconds / TURNS))
            elif arm.loads:
                arm.steps_s.append(_watch_steps(server, options.seconds / TURNS))
            spans[name].append((start_s, time.perf_counter()))
    server.wait_idle()
    check_replies(itertools.chain(arm.replies, *flooded))
    if flooded:
        arm.rates.append(
            {
                name: [
                    statistics.mean(tokens_per_s(replies, *span) for span in each)
                    for replies in flooded
                ]
                for name, each in spans.items()
            }
        )


def _watch_steps(server: OwnServer, seconds: float) -> float:
    """Time the steps of an engine while nothing but the flood is there; in seconds per step."""

    def num_steps() -> float:
        return statistics.mean(int(engine["num_steps"]) for engine in server.engines())

    first = num_steps()
    start_s = time.perf_counter()
    time.sleep(seconds)
    steps = num_steps() - first
    return (time.perf_counter() - start_s) / max(1, steps)


async def _ask_quietly(arm: Arm, quiet: Load, seconds: float) -> None:
    """Send one request at a time until the time is over; the first one, which connects, does not count."""
    watch = asyncio.create_task(watch_delay(arm.delays_s))
    # A prompt that was seen before would measure the prefix cache.
    with Generator(time.perf_counter_ns()) as made:
        calls = quiet.calls(made)
        check_replies([await next(calls).send([], 0.0)])
        until_s = time.perf_counter() + seconds
        await play(calls, partial(quiet.ask, arm.replies), at_once=1, until_s=until_s)
    watch.cancel()


def make_result(arms: dict[str, Arm]) -> Figures:
    """Compute quiet times by arm and as multiples of those of `alone`, the rates of the flood, and the goals."""
    figures = {name: arm_figures(arm) for name, arm in arms.items()}
    alone_ms = figures["alone"]["ttft_ms"]["p95"]
    table: list[Figures] = []
    goals: list[Figures] = []
    for name, found in figures.items():
        p95_ms = found["ttft_ms"]["p95"]
        table.append(make_row({"arm": name, "over_alone": p95_ms / alone_ms, **found}, COLUMNS))
        if name == "weights":
            ratio = found["rates"][0] / found["rates"][1] / (WEIGHTS["heavy"] / WEIGHTS["light"])
            text = "weights 3:1: error of the ratio of tokens/s"
            goals.append(goal(text, abs(ratio - 1), MAX_WEIGHT_ERROR))
        elif name != "alone":
            limit_ms = max(MAX_RATIO * alone_ms, MAX_STEPS * found["flood_step_ms"])
            if name == "same":
                limit_ms = MAX_SAME_RATIO * alone_ms
            kept = found["kept"]["median"]
            text = f"{name}: part of its tokens/s that the flood keeps"
            goals += [
                goal(f"{name}: quiet TTFT p95, ms", p95_ms, limit_ms),
                goal(text, kept, MIN_KEPT, is_least=True),
                goal(f"{name}: quiet requests refused", found["refused"], 0),
            ]
    return {"arms": figures, "table": table, "goals": goals}


def arm_figures(arm: Arm) -> Figures:
    """Compute the figures of an arm over all repeats."""
    ttft_ms = [1e3 * reply.ttft_s for reply in arm.replies if reply.token_times_s]
    repeats = zip(*(rates["with"] for rates in arm.rates), strict=True)
    rates = [statistics.mean(each) for each in repeats]
    kept = [sum(each["with"]) / sum(each["without"]) for each in arm.rates]
    return {
        "requests": len(ttft_ms),
        "ttft_ms": {
            "p50": percentile(ttft_ms, 50),
            "p95": percentile(ttft_ms, 95),
            "max": max(ttft_ms, default=None),
        },
        "client_delay_ms": distribution(arm.delays_s, 1e3),
        "refused": sum(reply.is_refused for reply in arm.replies),
        "flood_step_ms": 1e3 * statistics.mean(arm.steps_s or [math.nan]),
        "rates": rates,
        "tokens_per_s": sum(rates),
        "kept": spread(kept) if kept else None,
    }


OPTIONS: Options = {
    **DEMO,
    "seconds": (20.0, "of an arm with the quiet requests, and without"),
    "repeats": (3, ""),
    "replicas": (0, "behind two gateways; 0 is one server that serves by itself", int),
    "streams": (200, "that the flood keeps open"),
    "many": (100, "adapters of the flood in the arm that is called hundred"),
    "flood_tokens": (400, "output tokens of a stream of the flood"),
    "quiet_tokens": (16, "output tokens of a quiet request"),
    "prompt_tokens": (32, ""),
    "pause_ms": (100.0, "mean pause between quiet requests"),
}
