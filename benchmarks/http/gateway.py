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

from manylora import demo
from manylora.benchmarks.http.generator import Load, Target, check_replies
from manylora.benchmarks.http.own_server import TENANT, OwnServer, cluster
from manylora.benchmarks.http.stepped_server import STEP_S
from manylora.benchmarks.metrics import percentile, summarise, tokens_per_s
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
        idle_mib = gateway.usage()["rss_mib"]
        asked = {"direct": replicas, "gateway": [gateway]}

        def run(name: str, _: int) -> dict[str, float]:
            return cost(targets(asked[name], base), gateway, replicas, options)

        found = spreads(take_turns(asked, options.repeats, run))
        turns = targets([replicas[0], gateway, replicas[1], gateway], base)
        alone = Load(
            targets=turns, prompt_tokens=PROMPT_TOKENS, output_tokens=1, count=4 * NUM_ALONE
        ).run()
    check_replies(alone)
    ttft_ms = {
        name: percentile([1e3 * reply.ttft_s for reply in alone[at::2]], 50)
        for at, name in enumerate(asked)
    }
    speed = ratios(*(found[name]["tokens_per_s"]["repeats"] for name in ("gateway", "direct")))
    more_ms = ttft_ms["gateway"] - ttft_ms["direct"]
    cpu_us = found["gateway"]["gateway_cpu_us"]["median"]
    return {
        "paths": found,
        "gateway_idle_mib": idle_mib,
        "ttft_alone_p50_ms": ttft_ms,
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


def streams(targets: Sequence[Target], count: int, num_tokens: int) -> Load:
    """Streams side by side that begin within a second."""
    return Load(
        targets=targets,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=num_tokens,
        arrivals_s=[at * ARRIVE_S / count for at in range(count)],
    )


def cost(
    asked: Sequence[Target], gateway: OwnServer, replicas: Servers, options: Namespace
) -> dict[str, float]:
    """Measure one run.

    Raises:
        ManyloraError: A request failed.
    """

    def cpu_s() -> dict[str, float]:
        """CPU seconds that the servers' own processes have taken."""
        return {
            name: sum(server.usage()["cpu_s"] for server in servers)
            for name, servers in (("gateway", [gateway]), ("replicas", replicas))
        }

    before = cpu_s()
    replies = streams(asked, options.streams, options.tokens).run()
    after = cpu_s()
    check_replies(replies)
    found = summarise(replies)
    start_s = replies[0].due_s
    end_s = start_s + options.tokens * STEP_S
    num_tokens = options.streams * options.tokens
    return {
        "ttft_p50_ms": found["ttft_ms"]["p50"],
        "ttft_p99_ms": found["ttft_ms"]["p99"],
        "itl_p99_ms": found["itl_ms"]["p99"],
        "tokens_per_s": tokens_per_s(replies, start_s + ARRIVE_S, end_s),
        **{f"{name}_cpu_us": 1e6 * (after[name] - before[name]) / num_tokens for name in before},
        "gateway_mib": gateway.usage()["rss_mib"],
    }


OPTIONS: Options = {
    "streams": (64, "at once"),
    "tokens": (900, "of each stream; 100 come in a second"),
    "repeats": (3, ""),
}
