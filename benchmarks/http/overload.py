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
import random
import statistics
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import uvloop

from manylora.benchmarks.http.generator import Call, Generator, Load, Target, check_replies
from manylora.benchmarks.http.own_server import DEMO, OwnServer, plain_server
from manylora.benchmarks.http.runner import play, sleep_until, watch_delay
from manylora.benchmarks.metrics import Reply, distribution, tokens_per_s
from manylora.benchmarks.report import Figures, Options, goal
from manylora.benchmarks.workloads import poisson_arrivals

SHARES = {"a": 0.7, "b": 0.2, "c": 0.1}
"""Share of the demand, by tenant."""
QUIET = "quiet"
QUIET_SHARE = 0.05
"""Share of the capacity; a fair share would be a quarter."""
TRIES = {"impatient": 1, "hammering": 4, "honest": 3, QUIET: 1}
HAMMERING_SHARE = 0.1
"""Share of the demand."""
HONEST_SHARE = 0.3
"""Share of the capacity, at most."""
NORMAL_RATIO = 2.0
"""The server is normal again when three quiet TTFTs in a row are within this multiple of the quiet TTFT at capacity.
After the last arrival, running answers and clients that come back after their Retry-After still fill it."""
_POLL_S = 0.1
_FILLED = 1 / 6


@dataclass(slots=True)
class Visit:
    """A client, with all its tries."""

    kind: str
    call: Call
    arrival_s: float
    tries: list[Reply] = field(default_factory=list)


@dataclass(slots=True)
class Phase:
    """The clients of one multiple of the capacity, and what they saw."""

    visits: list[Visit]
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
    with Generator(options.seed) as made:
        loads = {name: vary_lengths(options, each, 1) for name, each in targets.items()}
        calls = {name: each.calls(made) for name, each in loads.items()}
        capacity, busy_s = await measure_capacity(options, targets)
        print(
            f"capacity {capacity:.1f} requests/s, quiet TTFT beside it {1e3 * busy_s:.1f} ms",
            file=sys.stderr,
        )
        phases = []
        for factor in options.factors:
            phase = Phase(plan_visits(options, calls, capacity, factor))
            await carry_out(options, phase, calls[QUIET], NORMAL_RATIO * busy_s)
            phases.append(phase_result(options, phase, capacity, factor))
            server.wait_idle()
    return {
        "capacity_requests_per_s": capacity,
        "quiet_ttft_at_capacity_ms": 1e3 * busy_s,
        "phases": phases,
        "table": [_row(phase) for phase in phases],
        "goals": make_goals(max(phases, key=lambda phase: float(phase["times"]))),
    }


def vary_lengths(options: Namespace, targets: Sequence[Target], at_once: int) -> Load:
    """Endless requests with answers of a half to three halves of --output-tokens."""
    length = options.output_tokens
    lengths = range(length // 2, 3 * length // 2 + 1)
    return Load(
        targets=targets,
        at_once=at_once,
        prompt_tokens=options.input_tokens,
        output_tokens=lengths,
        popularity="uniform",
        seed=options.seed,
    )


async def measure_capacity(
    options: Namespace, targets: Mapping[str, list[Target]]
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
    replies, quiet = await asyncio.gather(
        vary_lengths(options, mixed, options.in_flight).send(until_s=end_s),
        vary_lengths(options, targets[QUIET], 1).send(until_s=end_s),
    )
    check_replies(replies + quiet)
    capacity = tokens_per_s(replies + quiet, start_s, end_s) / float(options.output_tokens)
    return capacity, statistics.median(reply.ttft_s for reply in quiet[len(quiet) // 4 :])


def plan_visits(
    options: Namespace, calls: Mapping[str, Iterator[Call]], capacity: float, factor: float
) -> list[Visit]:
    """Plan all clients by the time at which they come."""
    draw = random.Random(options.seed)
    honest = HONEST_SHARE / max(1.0, factor)
    weights = [1 - HAMMERING_SHARE - honest, HAMMERING_SHARE, honest]
    visits = []
    demand = {**{name: share * factor for name, share in SHARES.items()}, QUIET: QUIET_SHARE}
    for place, (name, share) in enumerate(demand.items()):
        rate = share * capacity
        arrivals = poisson_arrivals(int(2 * rate * options.seconds) + 9, rate, options.seed + place)
        for arrival_s in itertools.takewhile(lambda at: at < options.seconds, arrivals):
            kind = QUIET if name == QUIET else draw.choices(list(TRIES)[:3], weights)[0]
            visits.append(Visit(kind, next(calls[name]), arrival_s))
    return sorted(visits, key=lambda visit: visit.arrival_s)


async def carry_out(
    options: Namespace, phase: Phase, quiet: Iterator[Call], normal_s: float
) -> None:
    """Send every client when it is due; then wait for a normal quiet TTFT, and for the clients that still try."""
    phase.start_s = time.perf_counter()
    end_s = phase.start_s + options.seconds
    visits = phase.visits
    arrivals_s = [visit.arrival_s for visit in visits]
    clients = asyncio.create_task(play(visits, _visit, at_once=len(visits), arrivals_s=arrivals_s))
    watch = asyncio.create_task(watch_delay(phase.delays_s))
    await sleep_until(end_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(options.settle_s):
            phase.normal_after_s = await _until_normal(quiet, normal_s) - end_s
            await clients
    for task in (watch, clients):
        task.cancel()
    await asyncio.wait([watch, clients])


async def _visit(visit: Visit, due_s: float) -> None:
    for _ in range(TRIES[visit.kind]):
        reply = await visit.call.send(visit.tries, due_s)
        if not reply.is_refused:
            return
        if visit.kind == "honest":
            await asyncio.sleep(reply.retry_after_s or 1.0)
        due_s = time.perf_counter()


async def _until_normal(quiet: Iterator[Call], normal_s: float) -> float:
    """Wait for three normal quiet TTFTs in a row; returns the time since which they are normal."""
    since_s = time.perf_counter()
    in_row = 0
    while in_row < 3:
        reply = await next(quiet).send([], time.perf_counter())
        in_row += 1
        if not reply.ttft_s <= normal_s:
            since_s = time.perf_counter()
            in_row = 0
        await asyncio.sleep(_POLL_S)
    return since_s


def phase_result(options: Namespace, phase: Phase, capacity: float, factor: float) -> Figures:
    """Compute the figures of one phase; the time of a refusal counts from its sending."""
    by_kind = {kind: [each for each in phase.visits if each.kind == kind] for kind in TRIES}
    replies = [reply for visit in phase.visits for reply in visit.tries]
    good = [reply for reply in replies if _is_good(options, reply)]
    refused = [reply for reply in replies if reply.is_refused]
    quiet = [reply for visit in by_kind[QUIET] for reply in visit.tries]
    second = [visit.tries[1] for visit in by_kind["honest"] if visit.tries[1:]]
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
        "quiet_ttft_ms": distribution([reply.ttft_s for reply in quiet], 1e3),
        "refusal_ms": distribution([reply.head_s - reply.sent_s for reply in refused], 1e3),
        "with_retry_after": _mean([reply.retry_after_s is not None for reply in refused]),
        "admitted_at_retry_after": _mean([reply.status == 200 for reply in second]),
        "served": {kind: _mean([_is_served(each) for each in by_kind[kind]]) for kind in TRIES},
        "normal_after_s": phase.normal_after_s,
        "client_delay_ms": distribution(phase.delays_s, 1e3),
    }


def make_goals(phase: Figures) -> list[Figures]:
    """Make the goals of the hardest phase."""
    rate = phase["sent_per_s"]
    goals = [
        ("goodput over capacity", phase["goodput"], 0.9, True),
        ("share of refusals with Retry-After", phase["with_retry_after"], 1.0, True),
        ("honest clients admitted at Retry-After", phase["admitted_at_retry_after"], 0.95, True),
        ("honest clients served within 3 tries", phase["served"]["honest"], 0.99, True),
        ("quiet tenant served", phase["served"][QUIET], 1.0, True),
        (
            f"refusals p99, ms, at {rate:.0f} requests/s",
            phase["refusal_ms"]["p99"],
            50.0 if rate <= 100 else 150.0,
            False,
        ),
        ("normal again after, s", phase["normal_after_s"], 5.0, False),
    ]
    return [
        goal(f"{phase['times']:g} times: {name}", figure, limit, is_least=is_least)
        for name, figure, limit, is_least in goals
    ]


def _row(phase: Figures) -> Figures:
    return {
        **{name: phase[name] for name in ("times", "sent_per_s", "goodput")},
        "TTFT p99, ms": phase["ttft_ms"]["p99"],
        "quiet": phase["quiet_ttft_ms"]["p99"],
        **{f"refusal {name}, ms": phase["refusal_ms"][name] for name in ("p50", "p99")},
        **{f"{kind} served": phase["served"][kind] for kind in ("honest", QUIET)},
        "normal after, s": phase["normal_after_s"],
    }


def _is_good(options: Namespace, reply: Reply) -> bool:
    """Say if an answer is within both objectives; one token has no time per token to miss."""
    is_soon = reply.ttft_s <= options.ttft_s and not 1e3 * reply.tpot_s > options.tpot_ms
    return is_soon and reply.completion_tokens > 0 and reply.error is None


def _is_served(visit: Visit) -> bool:
    return (
        bool(visit.tries)
        and visit.tries[-1].error is None
        and visit.tries[-1].completion_tokens > 0
    )


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else math.nan


def _factors(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


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
