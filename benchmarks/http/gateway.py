"""What does a gateway cost, in CPU time, memory, latency and throughput?

    manylora bench gateway [--streams 64] [--tokens 900] [--repeats 3] [--json benchmarks/results/gateway-cpu.json]

Starts two replicas whose engine is a clock, 100 tokens a second for each stream, and two gateways. The same clients ask
the replicas directly and through one gateway, in turns: streams that begin within a second; and then one request after
the other. CPU time is that of whole processes, without the replicas' engines. Prints tables and, last, one JSON line.
`scripts/cluster_promises.py` kills replicas and gateways.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import uvloop

from manylora import demo
from manylora.benchmarks.http.generator import (
    Reply,
    check_replies,
    closed_loop,
    open_loop,
    tokens_per_s,
)
from manylora.benchmarks.http.own_server import BASE_NAME, TENANT, OwnServer, cluster
from manylora.benchmarks.http.stepped_server import STEP_S
from manylora.benchmarks.metrics import percentile
from manylora.benchmarks.report import (
    AddOption,
    goal,
    positive,
    ratios,
    spread,
    spread_rows,
    take_turns,
)

STEPPED = "manylora.benchmarks.http.stepped_server"
PROMPT_TOKENS = 8
ARRIVE_S = 1.0
"""All streams begin within this time."""
NUM_ALONE = 200
"""Requests for one token, one after the other, to each replica; as many in all through the gateway."""
Servers = Sequence[OwnServer]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The cost, in turns."""
    with stepped_cluster() as (replicas, gateways):
        key, idle_mib = gateways[0].add_tenant(TENANT), _used(gateways[:1])[1]

        def run(name: str, _: int) -> dict[str, float]:
            return cost(
                replicas if name == "direct" else gateways[:1], gateways[:1], replicas, key, options
            )

        runs = take_turns(("direct", "gateway"), options.repeats, run)
        alone = list[Reply]()
        uvloop.run(
            load([replicas[0], gateways[0], replicas[1], gateways[0]], key, 4 * NUM_ALONE, 1, alone)
        )
    check_replies(alone)
    direct_ms, through_ms = (
        percentile([1e3 * each.ttft_s for each in alone[at::2]], 50) for at in (0, 1)
    )
    found = {
        name: {part: spread([run[part] for run in own]) for part in own[0]}
        for name, own in runs.items()
    }
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


async def load(
    servers: Servers, key: str, count: int, num_tokens: int, replies: list[Reply]
) -> None:
    """Ask the servers in turn: for one token one request at a time, for more in streams side by side."""
    made = [server.calls(key, 0) for server in servers]
    calls = [
        made[n % len(made)].make(BASE_NAME, PROMPT_TOKENS, num_tokens, n) for n in range(count)
    ]
    if num_tokens == 1:
        await closed_loop(iter(calls), 1, replies)
    else:
        await open_loop(calls, [n * ARRIVE_S / count for n in range(count)], replies)
    for each in made:
        each.client.close()


def cost(
    asked: Servers, gateways: Servers, replicas: Servers, key: str, options: argparse.Namespace
) -> dict[str, float]:
    """Figures of one run.

    Raises:
        ManyloraError: A request failed.
    """
    replies: list[Reply] = []
    before = _used(gateways), _used(replicas)
    uvloop.run(load(asked, key, options.streams, options.tokens, replies))
    after = _used(gateways), _used(replicas)
    check_replies(replies)
    num_tokens, start_s = options.streams * options.tokens, replies[0].due_s
    gateway_us, replicas_us = (
        1e6 * (end[0] - begin[0]) / num_tokens for begin, end in zip(before, after, strict=True)
    )
    return {
        "ttft_p50_ms": percentile([1e3 * reply.ttft_s for reply in replies], 50),
        "ttft_p99_ms": percentile([1e3 * reply.ttft_s for reply in replies], 99),
        "itl_p99_ms": percentile([1e3 * gap for reply in replies for gap in reply.gaps_s], 99),
        "tokens_per_s": tokens_per_s(
            replies, start_s + ARRIVE_S, start_s + options.tokens * STEP_S
        ),
        "gateway_cpu_us": gateway_us,
        "replicas_cpu_us": replicas_us,
        "gateway_mib": after[0][1],
    }


def _used(servers: Servers) -> tuple[float, float]:
    """CPU seconds that the servers' processes have taken, and the MiB of memory that they hold."""
    fields = [
        Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
        for server in servers
    ]
    ticks, pages = (
        sum(int(each[11]) + int(each[12]) for each in fields),
        sum(int(each[21]) for each in fields),
    )
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def add_options(add: AddOption) -> None:
    """Add its options."""
    add("--streams", type=positive, default=64, help="at once")
    add("--tokens", type=positive, default=900, help="of each stream; 100 come in a second")
    add("--repeats", type=positive, default=3)
