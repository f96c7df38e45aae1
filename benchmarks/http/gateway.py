"""The cost of a gateway, in CPU time, memory, latency and throughput.

    manylora bench gateway [--streams 64] [--tokens 900] [--repeats 3] [--json benchmarks/results/gateway-cpu.json]

Starts two replicas whose engine is a clock, 100 tokens a second for each stream, and two gateways. The same clients ask
the replicas directly and through one gateway, in turns: streams that begin within a second; and then one request after
the other. CPU time is that of whole processes, without the replicas' engines. Prints tables and, last, one JSON line.
`scripts/cluster_promises.py` kills replicas and gateways.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import uvloop

from manylora import demo
from manylora.benchmarks.http.generator import Load, Target, check_replies
from manylora.benchmarks.http.own_server import TENANT, OwnServer, cluster
from manylora.benchmarks.http.stepped_server import STEP_S
from manylora.benchmarks.metrics import Reply, percentile, summarise, tokens_per_s
from manylora.benchmarks.report import (
    Figures,
    Options,
    goal,
    ratios,
    spread_rows,
    spreads,
    take_turns,
)

STEPPED = "manylora.benchmarks.http.stepped_server"
PROMPT_TOKENS = 8
ARRIVE_S = 1.0
"""Time within which the streams begin."""
NUM_ALONE = 200
"""Requests for one token, one after the other, to each replica; as many in all through the gateway."""
Servers = Sequence[OwnServer]


def measure(options: Namespace) -> Figures:
    """The cost, in turns."""
    with stepped_cluster() as (replicas, gateways):
        gateway = gateways[0]
        base = gateway.target(TENANT)
        idle_mib = gateway.usage().mib
        asked = {"direct": replicas, "gateway": [gateway]}

        def run(name: str, _: int) -> dict[str, float]:
            return cost(targets(asked[name], base), gateway, replicas, options)

        runs = take_turns(asked, options.repeats, run)
        turns = targets([replicas[0], gateway, replicas[1], gateway], base)
        alone = uvloop.run(load(turns, 4 * NUM_ALONE, 1))
    check_replies(alone)
    direct_ms, through_ms = (
        percentile([1e3 * each.ttft_s for each in alone[at::2]], 50) for at in (0, 1)
    )
    found = spreads(runs)
    speed = ratios(*(found[name]["tokens_per_s"]["repeats"] for name in ("gateway", "direct")))
    more_ms = through_ms - direct_ms
    cpu_us = found["gateway"]["gateway_cpu_us"]["median"]
    return {
        "paths": found,
        "gateway_idle_mib": idle_mib,
        "ttft_alone_p50_ms": {"direct": direct_ms, "gateway": through_ms},
        "ratios": {"tokens/s, gateway / direct": speed},
        "table": spread_rows(found),
        "goals": [
            goal("CPU of the gateway, us per token", cpu_us, 60.0),
            goal("TTFT p50 of one request at a time, ms more than direct", more_ms, 1.0),
            goal("tokens/s, of direct", speed["median"], 0.95, is_least=True),
        ],
    }


def stepped_cluster() -> AbstractContextManager[tuple[Servers, Servers]]:
    """Two replicas whose engine is a clock, and two gateways, until the block is left."""
    return cluster(demo.MODEL, ("memory.gib=0.0625", "model.threads=1"), 2, STEPPED)


def targets(servers: Servers, base: Target) -> list[Target]:
    """The base at each of these servers of a cluster, with one key."""
    return [replace(base, url=f"{server.admin.url}/v1") for server in servers]


async def load(targets: Sequence[Target], count: int, num_tokens: int) -> list[Reply]:
    """Ask in turn: for one token one request at a time, for more in streams side by side."""
    is_alone = num_tokens == 1
    asked = Load(
        targets=targets,
        at_once=1 if is_alone else count,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=num_tokens,
        count=count,
        arrivals_s=None if is_alone else [at * ARRIVE_S / count for at in range(count)],
    )
    return await asked.send()


def cost(
    asked: Sequence[Target], gateway: OwnServer, replicas: Servers, options: Namespace
) -> dict[str, float]:
    """Measure one run.

    Raises:
        ManyloraError: A request failed.
    """
    before = cpu_s([gateway]), cpu_s(replicas)
    replies = uvloop.run(load(asked, options.streams, options.tokens))
    after = cpu_s([gateway]), cpu_s(replicas)
    check_replies(replies)
    gateway_us, replicas_us = (
        1e6 * (end_s - begin_s) / (options.streams * options.tokens)
        for begin_s, end_s in zip(before, after, strict=True)
    )
    found = summarise(replies)
    start_s = replies[0].due_s
    end_s = start_s + options.tokens * STEP_S
    return {
        "ttft_p50_ms": found["ttft_ms"]["p50"],
        "ttft_p99_ms": found["ttft_ms"]["p99"],
        "itl_p99_ms": found["itl_ms"]["p99"],
        "tokens_per_s": tokens_per_s(replies, start_s + ARRIVE_S, end_s),
        "gateway_cpu_us": gateway_us,
        "replicas_cpu_us": replicas_us,
        "gateway_mib": gateway.usage().mib,
    }


def cpu_s(servers: Servers) -> float:
    """CPU seconds that the servers' own processes have taken."""
    return sum(server.usage().cpu_s for server in servers)


OPTIONS: Options = {
    "streams": (64, "at once"),
    "tokens": (900, "of each stream; 100 come in a second"),
    "repeats": (3, ""),
}
