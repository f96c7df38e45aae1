"""The cost of a gateway, in CPU time, memory, latency and throughput.

    manylora bench gateway [--streams 64] [--tokens 900] [--repeats 3] [--json benchmarks/results/gateway-cpu.json]

Starts two replicas whose engine is a clock, 100 tokens a second for each stream, and two gateways. The same clients ask
the replicas directly and through one gateway, in turns: streams that begin within a second; and then one request after
the other. CPU time is that of whole processes, without the replicas' engines. Prints tables and, last, one JSON line.
`scripts/cluster_promises.py` kills replicas and gateways.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import uvloop

from manylora import demo
from manylora.benchmarks.http.generator import Load, Target, check_replies
from manylora.benchmarks.http.own_server import BASE_NAME, TENANT, OwnServer, cluster
from manylora.benchmarks.http.processes import Usage, usage
from manylora.benchmarks.http.stepped_server import STEP_S
from manylora.benchmarks.metrics import Reply, percentile, summarise, tokens_per_s
from manylora.benchmarks.report import (
    AddOption,
    add_positive,
    goal,
    ratios,
    spread_rows,
    spreads,
    take_turns,
)
from manylora.benchmarks.workloads import TimedRequest

STEPPED = "manylora.benchmarks.http.stepped_server"
PROMPT_TOKENS = 8
ARRIVE_S = 1.0
"""Time within which the streams begin."""
NUM_ALONE = 200
"""Requests for one token, one after the other, to each replica; as many in all through the gateway."""
Servers = Sequence[OwnServer]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The cost, in turns."""
    with stepped_cluster() as (replicas, gateways):
        key = gateways[0].add_tenant(TENANT)
        idle_mib = _own_usage(gateways[0]).mib

        def run(name: str, _: int) -> dict[str, float]:
            return cost(
                replicas if name == "direct" else gateways[:1], gateways[:1], replicas, key, options
            )

        runs = take_turns(("direct", "gateway"), options.repeats, run)
        turns = [replicas[0], gateways[0], replicas[1], gateways[0]]
        alone = uvloop.run(load(turns, key, 4 * NUM_ALONE, 1))
    check_replies(alone)
    direct_ms, through_ms = (
        percentile([1e3 * each.ttft_s for each in alone[at::2]], 50) for at in (0, 1)
    )
    found = spreads(runs)
    speed = ratios(*([run["tokens_per_s"] for run in runs[name]] for name in ("gateway", "direct")))
    return {
        "paths": found,
        "gateway_idle_mib": idle_mib,
        "ttft_alone_p50_ms": {"direct": direct_ms, "gateway": through_ms},
        "ratios": {"tokens/s, gateway / direct": speed},
        "table": spread_rows(found),
        "goals": [
            goal(
                "CPU of the gateway, us per token",
                found["gateway"]["gateway_cpu_us"]["median"],
                60.0,
            ),
            goal(
                "TTFT p50 of one request at a time, ms more than direct",
                through_ms - direct_ms,
                1.0,
            ),
            goal("tokens/s, of direct", speed["median"], 0.95, is_least=True),
        ],
    }


def stepped_cluster() -> AbstractContextManager[tuple[Servers, Servers]]:
    """Two replicas whose engine is a clock, and two gateways, until the block is left."""
    return cluster(demo.MODEL, ("memory.gib=0.0625", "model.threads=1"), 2, STEPPED)


async def load(servers: Servers, key: str, count: int, num_tokens: int) -> list[Reply]:
    """Ask the servers in turn: for one token one request at a time, for more in streams side by side."""
    plan = [
        TimedRequest(number * ARRIVE_S / count, number % len(servers), PROMPT_TOKENS, num_tokens)
        for number in range(count)
    ]
    in_flight = 1 if num_tokens == 1 else None
    targets = [Target(server.url, key, BASE_NAME) for server in servers]
    return await Load(plan, in_flight=in_flight).send(targets)


def cost(
    asked: Servers, gateways: Servers, replicas: Servers, key: str, options: argparse.Namespace
) -> dict[str, float]:
    """Measure one run.

    Raises:
        ManyloraError: A request failed.
    """
    before = cpu_s(gateways), cpu_s(replicas)
    replies = uvloop.run(load(asked, key, options.streams, options.tokens))
    after = cpu_s(gateways), cpu_s(replicas)
    check_replies(replies)
    num_tokens = options.streams * options.tokens
    start_s = replies[0].due_s
    gateway_us, replicas_us = (
        1e6 * (end_s - begin_s) / num_tokens for begin_s, end_s in zip(before, after, strict=True)
    )
    found = summarise(replies)
    end_s = start_s + options.tokens * STEP_S
    return {
        "ttft_p50_ms": found["ttft_ms"]["p50"],
        "ttft_p99_ms": found["ttft_ms"]["p99"],
        "itl_p99_ms": found["itl_ms"]["p99"],
        "tokens_per_s": tokens_per_s(replies, start_s + ARRIVE_S, end_s),
        "gateway_cpu_us": gateway_us,
        "replicas_cpu_us": replicas_us,
        "gateway_mib": _own_usage(gateways[0]).mib,
    }


def cpu_s(servers: Servers) -> float:
    """CPU seconds that the servers' own processes have taken."""
    return sum(_own_usage(server).cpu_s for server in servers)


def _own_usage(server: OwnServer) -> Usage:
    return usage(server.pid, has_children=False)


def add_options(add: AddOption) -> None:
    """Add its options."""
    add_positive(
        add,
        streams=(64, "at once"),
        tokens=(900, "of each stream; 100 come in a second"),
        repeats=(3, ""),
    )
