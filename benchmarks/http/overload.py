"""Answers of a server to which far more requests come than it can answer.

    manylora bench overload [--factors 1,1.6,20] [--seconds 60] [--json benchmarks/results/overload-cpu.json]

The capacity is measured in a closed loop. Then requests arrive as a Poisson process at multiples of it, whatever the
server answers. The length of an answer is drawn from half to one and a half times --output-tokens: answers of equal
length would begin and end in waves. Three tenants of equal weight send 70, 20 and 10% of the requests. A fourth, quiet
tenant stays far below its share.

    hammering  one client in ten; tries again at once when it is refused
    honest     waits as long as Retry-After says, and tries three times
    impatient  all others; do not try again

All honest clients together ask for at most 30% of the capacity: no server could answer them all if they asked for more
than it has. Goodput counts the tokens of answers within the objectives; the first sixth of the time, in which the
server fills up, does not count. Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import statistics
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import uvloop

from manylora.benchmarks.http.generator import (
    Generator,
    Load,
    Target,
    check_replies,
    send_all,
)
from manylora.benchmarks.http.own_server import DEMO, OwnServer, plain_server
from manylora.benchmarks.http.runner import sleep_until, watch_delay
from manylora.benchmarks.metrics import Reply, distribution, tokens_per_s
from manylora.benchmarks.report import Figures, Options, goal, make_row, pick
from manylora.benchmarks.workloads import poisson_arrivals

SHARES = {"a": 0.7, "b": 0.2, "c": 0.1}
"""Share of the demand, by tenant."""
QUIET = "quiet"
QUIET_SHARE = 0.05
"""Share of the capacity; a fair share would be a quarter."""
TRIES = {"impatient": 1, "hammering": 4, "honest": 3, QUIET: 1}
"""Most sendings of a request, by kind of client."""
HAMMERING_SHARE = 0.1
"""Share of the demand."""
HONEST_SHARE = 0.3
"""Share of the capacity, at most."""
NORMAL_RATIO = 2.0
"""The server is normal again when three quiet TTFTs in a row are within this multiple of the quiet TTFT at capacity.
After the last arrival, running answers and clients that come back after their Retry-After still fill it."""
_POLL_S = 0.1
_FILLED = 1 / 6
Targets = Mapping[str, list[Target]]
"""Models by tenant."""


@dataclass(slots=True)
class Phase:
    """The clients of one multiple of the capacity, and what they saw."""

    loads: list[tuple[str, Load]]
    """Requests by kind of client."""
    replies: Mapping[str, list[Reply]] = field(default_factory=lambda: {kind: [] for kind in TRIES})
    """Replies by kind of client."""
    start_s: float = 0.0
    delays_s: list[float] = field(default_factory=list)
    """Lateness of the clients' event loop."""
    normal_after_s: float = math.nan
    """Seconds from the last arrival; NaN: not within the time given."""


def measure(options: Namespace) -> Figures:
    """Measure the capacity, then send each multiple of it."""
    with plain_server(options.model, options.set) as server:
        return uvloop.run(_measure(options, server))


async def _measure(options: Namespace, server: OwnServer) -> Figures:
    targets = {
        name: server.adapters(name, options.adapters, 1, first=place)
        for place, name in enumerate((*SHARES, QUIET))
    }
    seeds = itertools.count(options.seed << 10)  # no prompt comes twice
    capacity, busy_s = await measure_capacity(options, targets, seeds)
    about = f"capacity {capacity:.1f} requests/s, quiet TTFT beside it {1e3 * busy_s:.1f} ms"
    print(about, file=sys.stderr)
    phases = []
    for factor in options.factors:
        phase = Phase(plan_clients(options, targets, capacity, factor, seeds))
        probe = vary_lengths(options, targets[QUIET], next(seeds))
        await carry_out(options, phase, probe, NORMAL_RATIO * busy_s)
        phases.append(phase_result(options, phase, capacity, factor))
        server.wait_idle()
    return {
        "capacity_requests_per_s": capacity,
        "quiet_ttft_at_capacity_ms": 1e3 * busy_s,
        "phases": phases,
        "table": [make_row(phase, COLUMNS) for phase in phases],
        "goals": make_goals(max(phases, key=lambda phase: float(phase["times"]))),
    }


def vary_lengths(options: Namespace, targets: Sequence[Target], seed: int) -> Load:
    """Endless requests with answers of a half to three halves of --output-tokens."""
    length = options.output_tokens
    return Load(
        targets=targets,
        prompt_tokens=options.input_tokens,
        output_tokens=range(length // 2, 3 * length // 2 + 1),
        popularity="uniform",
        seed=seed,
    )


async def measure_capacity(
    options: Namespace, targets: Targets, seeds: Iterator[int]
) -> tuple[float, float]:
    """Measure the capacity by a closed loop of the tenants in their shares, with the quiet tenant beside it.

    Returns:
        Requests per second while it is full, and the median TTFT of the quiet tenant in seconds.
    """
    mixed = [
        target for name, share in SHARES.items() for target in targets[name] * round(10 * share)
    ]
    start_s = time.perf_counter() + options.capacity_seconds / 3
    end_s = start_s + options.capacity_seconds
    crowd = replace(vary_lengths(options, mixed, next(seeds)), at_once=options.in_flight)
    replies: list[Reply] = []
    quiet: list[Reply] = []
    beside = vary_lengths(options, targets[QUIET], next(seeds))
    await send_all([(crowd, replies), (beside, quiet)], end_s)
    check_replies(replies + quiet)
    capacity = tokens_per_s(replies + quiet, start_s, end_s) / float(options.output_tokens)
    return capacity, statistics.median(reply.ttft_s for reply in quiet[len(quiet) // 4 :])


def plan_clients(
    options: Namespace, targets: Targets, capacity: float, factor: float, seeds: Iterator[int]
) -> list[tuple[str, Load]]:
    """Plan the requests of each tenant by kind of client, with the times at which they come."""
    honest = HONEST_SHARE / max(1.0, factor)
    crowd = {
        "impatient": 1 - HAMMERING_SHARE - honest,
        "hammering": HAMMERING_SHARE,
        "honest": honest,
    }
    shares = {
        (name, kind): factor * share * part
        for (name, share), (kind, part) in itertools.product(SHARES.items(), crowd.items())
    }
    planned = []
    for (name, kind), share in {**shares, (QUIET, QUIET): QUIET_SHARE}.items():
        load = vary_lengths(options, targets[name], next(seeds))
        rate = share * capacity
        arrivals_s = poisson_arrivals(int(2 * rate * options.seconds) + 9, rate, load.seed)
        load = replace(
            load,
            arrivals_s=[at_s for at_s in arrivals_s if at_s < options.seconds],
            tries=TRIES[kind],
            heeds_retry_after=kind == "honest",
        )
        planned.append((kind, load))
    return planned


async def carry_out(options: Namespace, phase: Phase, probe: Load, normal_s: float) -> None:
    """Send every client when it is due; then wait for a normal quiet TTFT, and for the clients that still try."""
    clients = send_all((load, phase.replies[kind]) for kind, load in phase.loads)
    watch = asyncio.create_task(watch_delay(phase.delays_s))
    phase.start_s = time.perf_counter()
    end_s = phase.start_s + options.seconds
    await sleep_until(end_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(options.settle_s):
            phase.normal_after_s = await _until_normal(probe, normal_s) - end_s
            await clients
    for task in (watch, clients):
        task.cancel()
    await asyncio.wait([watch, clients])


async def _until_normal(probe: Load, normal_s: float) -> float:
    """Wait for three normal quiet TTFTs in a row; returns the time since which they are normal."""
    since_s = time.perf_counter()
    in_row = 0
    with Generator(probe.seed) as made:
        calls = probe.calls(made)
        while in_row < 3:
            reply = await next(calls).send([], time.perf_counter())
            in_row += 1
            if not reply.ttft_s <= normal_s:
                since_s = time.perf_counter()
                in_row = 0
            await asyncio.sleep(_POLL_S)
    return since_s


def phase_result(options: Namespace, phase: Phase, capacity: float, factor: float) -> Figures:
    """Compute the figures of one phase; the time of a refusal counts from its sending."""
    replies = list(itertools.chain(*phase.replies.values()))
    good = [reply for reply in replies if _is_good(options, reply)]
    refused = [reply for reply in replies if reply.is_refused]
    second = [reply for reply in phase.replies["honest"] if reply.attempt == 2]
    end_s = phase.start_s + options.seconds
    goodput = tokens_per_s(good, phase.start_s + _FILLED * options.seconds, end_s)
    return {
        "times": factor,
        "sent_per_s": len(replies) / options.seconds,
        "goodput": goodput / (capacity * options.output_tokens),
        "statuses": dict(
            Counter(str(reply.status or reply.error or "cut at the end") for reply in replies)
        ),
        "ttft_ms": distribution([reply.ttft_s for reply in replies], 1e3),
        "quiet_ttft_ms": distribution([reply.ttft_s for reply in phase.replies[QUIET]], 1e3),
        "refusal_ms": distribution([reply.head_s - reply.sent_s for reply in refused], 1e3),
        "with_retry_after": _share(reply.retry_after_s is not None for reply in refused),
        "admitted_at_retry_after": _share(reply.status == 200 for reply in second),
        "served": {kind: _served(each) for kind, each in phase.replies.items()},
        "normal_after_s": phase.normal_after_s,
        "client_delay_ms": distribution(phase.delays_s, 1e3),
    }


def make_goals(phase: Figures) -> list[Figures]:
    """Make the goals of the hardest phase."""
    rate = phase["sent_per_s"]
    refusal_ms = 50.0 if rate <= 100 else 150.0
    goals = [
        ("goodput over capacity", "goodput", 0.9, True),
        ("share of refusals with Retry-After", "with_retry_after", 1.0, True),
        ("honest clients admitted at Retry-After", "admitted_at_retry_after", 0.95, True),
        ("honest clients served within 3 tries", "served.honest", 0.99, True),
        ("quiet tenant served", "served.quiet", 1.0, True),
        (f"refusals p99, ms, at {rate:.0f} requests/s", "refusal_ms.p99", refusal_ms, False),
        ("normal again after, s", "normal_after_s", 5.0, False),
    ]
    return [
        goal(f"{phase['times']:g} times: {name}", pick(phase, path), limit, is_least=is_least)
        for name, path, limit, is_least in goals
    ]


def _is_good(options: Namespace, reply: Reply) -> bool:
    """Say if an answer is within both objectives; one token has no time per token to miss."""
    is_soon = reply.ttft_s <= options.ttft_s and not 1e3 * reply.tpot_s > options.tpot_ms
    return is_soon and reply.is_answered


def _served(replies: Sequence[Reply]) -> float:
    """The share of requests that were answered, at the first try or at another."""
    num_requests = sum(reply.attempt == 1 for reply in replies)
    return sum(reply.is_answered for reply in replies) / num_requests if replies else math.nan


def _share(found: Iterable[bool]) -> float:
    values = list(found)
    return sum(values) / len(values) if values else math.nan


def _factors(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


COLUMNS = {
    "times": "times",
    "sent_per_s": "sent_per_s",
    "goodput": "goodput",
    "TTFT p99, ms": "ttft_ms.p99",
    "quiet": "quiet_ttft_ms.p99",
    "refusal p50, ms": "refusal_ms.p50",
    "refusal p99, ms": "refusal_ms.p99",
    "honest served": "served.honest",
    "quiet served": "served.quiet",
    "normal after, s": "normal_after_s",
}
"""Figures of a phase in the table."""
OPTIONS: Options = {
    **DEMO,
    "factors": ("1,1.6,20", "offered load in capacities, comma-separated", _factors),
    "seconds": (60.0, "of each"),
    "capacity_seconds": (60.0, "of the load that measures it"),
    "in_flight": (96, "requests of the closed loop that measures the capacity"),
    "input_tokens": (32, ""),
    "output_tokens": (96, ""),
    "ttft_s": (10.0, "objective: time to the first token"),
    "tpot_ms": (100.0, "objective: time per token after it"),
    "settle_s": (120.0, "how long to wait for what is left when no more arrive"),
}
