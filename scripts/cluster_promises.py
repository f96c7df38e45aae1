"""Measures when clients and servers notice that a server of a cluster was killed, or that a key was revoked.

scripts/cluster_promises.py [--streams 64] [--json benchmarks/results/cluster-promises-cpu.json]

Two replicas and two gateways over one registry, as `manylora bench gateway` starts them: 100 tokens a second per
stream.

key revoked      through one gateway, while it is used at all servers: until each of them refuses it, the longest of ten
replica killed   kill -9 under the streams of a gateway: until each stream of that replica has its error event, and how
                 many of 100 requests sent within the next second failed
gateway killed   kill -9 under as many streams: until the replica that is left runs none of them. The other gateway says
                 so, which hears it every 0.25 s
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import uvloop

from manylora.benchmarks.http.gateway import (
    ARRIVE_S,
    STEP_S,
    Servers,
    stepped_cluster,
    streams,
    targets,
)
from manylora.benchmarks.http.generator import Target, send_all
from manylora.benchmarks.http.own_server import TENANT, OwnServer
from manylora.benchmarks.metrics import Reply, distribution
from manylora.benchmarks.report import Options, goal, tell
from manylora.client import Client
from manylora.errors import ClientError, ManyloraError

EVENT_S = 1.0
ABORTED_S = 2.0
REFUSED_S = 1.0
"""Promised bounds."""
NUM_KEYS = 10
NUM_USES = 20
NUM_NEW = 100
WITHIN_S = 30.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all of them, one after the other."""
    with stepped_cluster() as (replicas, gateways):
        base = gateways[0].target(TENANT)
        seconds_until(lambda: all(len(num_running(each)) == len(replicas) for each in gateways))
        refused_s = max(key_revoked([*gateways, *replicas]) for _ in range(NUM_KEYS))
        killed = uvloop.run(replica_killed(replicas[0], [base], options.streams))
        aborted_s = uvloop.run(gateway_killed(gateways, base, options.streams))
    goals = [
        goal("key revoked: s until all servers refuse it, longest", refused_s, REFUSED_S),
        goal("replica killed: s until the error event, p99", killed["event_s"]["p99"], EVENT_S),
        goal("replica killed: new requests that failed", killed["new_failed"], 0),
        goal("gateway killed: s until its streams are aborted", aborted_s, ABORTED_S),
    ]
    table = [{"promise": each["goal"], "": each["figure"]} for each in goals]
    return {"replica_killed": killed, "table": table, "goals": goals}


def key_revoked(servers: Servers) -> float:
    """Seconds until all servers refuse a key, which is used until it is revoked through the first of them."""
    made = servers[0].admin.create_key(TENANT)
    clients = [Client(server.admin.url, made["key"]) for server in servers]
    if any(is_refused(client) for client in clients * NUM_USES):
        raise ManyloraError("a new key was refused")
    servers[0].admin.revoke_key(made["id"])
    return seconds_until(lambda: all(map(is_refused, clients)))


async def replica_killed(
    victim: OwnServer, asked: Sequence[Target], num_streams: int
) -> dict[str, Any]:
    """Kill a replica; returns when its streams had the error event, and what became of requests sent meanwhile."""
    replies: list[Reply] = []
    new: list[Reply] = []
    running = send_all([(streams(asked, num_streams, int(4 * ARRIVE_S / STEP_S)), replies)])
    await asyncio.sleep(2 * ARRIVE_S)
    killed_s = time.perf_counter()
    os.killpg(victim.pid, signal.SIGKILL)  # its engine goes with it, as when the machine goes
    await send_all([(streams(asked, NUM_NEW, 2), new)])
    await running
    lost = [reply for reply in replies if reply.error]
    if other := next(
        (reply.error for reply in lost if "replica_lost" not in str(reply.error)), None
    ):
        raise ManyloraError(
            f"A stream ended in another way than by the event of a lost replica: {other}"
        )
    return {
        "event_s": distribution([reply.done_s - killed_s for reply in lost]),
        "streams_lost": len(lost),
        "streams_whole": len(replies) - len(lost),
        "new_failed": sum(reply.error is not None for reply in new),
        "new_ttft_s": distribution([reply.ttft_s for reply in new]),
    }


async def gateway_killed(gateways: Servers, base: Target, num_streams: int) -> float:
    """Seconds until the replica that is left computes nothing more for it."""
    victim, other = gateways
    load = streams(targets([victim], base), num_streams, int(9 * ARRIVE_S / STEP_S))
    sending = send_all([(load, [])])
    await asyncio.sleep(2 * ARRIVE_S)
    if (running := await asyncio.to_thread(num_running, other)) != [num_streams]:
        raise ManyloraError(
            f"{running} streams ran on replicas when the gateway was to be killed, {num_streams} were sent"
        )
    os.killpg(victim.pid, signal.SIGKILL)
    aborted_s = await asyncio.to_thread(seconds_until, lambda: num_running(other) == [0])
    await sending
    return aborted_s


def num_running(gateway: OwnServer) -> list[int]:
    """Requests that each replica computes, as it has told the gateway."""
    servers = gateway.admin.request("GET", "/v1/servers")["data"]
    return [server["running"] for server in servers if "running" in server]


def is_refused(client: Client) -> bool:
    """Ask the server if it refuses the client's key; with a valid one, it has no such route for tenants."""
    try:
        client.request("GET", "/v1/servers")
    except ClientError as error:
        if error.status not in (401, 403, 404):
            raise
        return error.status == 401
    raise ManyloraError("a tenant's key was let in as the admin's")


def seconds_until(is_so: Callable[[], bool]) -> float:
    """Wait, and say for how long."""
    start_s = time.perf_counter()
    while not is_so():
        if time.perf_counter() - start_s > WITHIN_S:
            raise ManyloraError(f"The servers did not get there within {WITHIN_S:.0f} s.")
        time.sleep(0.002)
    return time.perf_counter() - start_s


OPTIONS: Options = {"streams": (64, "of the gateways")}

if __name__ == "__main__":
    sys.exit(tell("cluster-promises", __doc__, OPTIONS, measure))
