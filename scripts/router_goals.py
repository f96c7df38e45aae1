"""Prints the figures of the router of many servers in virtual time, beside one that knows loads only, and times it.

docs/cluster.md has the table. Run it with `PYTHONPATH=tests/support`; `--time-only` leaves out the table.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from manylora.server.cluster.router import Router, Target
from registry_samples import server_sample
from router_simulation import Case, RouterSimulation

STALE = Case(num_replicas=64, num_gateways=4, view_s=5.0)


def cases() -> list[tuple[str, Case]]:
    """Rows of the table."""
    rows = []
    for num_replicas in (8, 64):
        for zipf in (0.9, 1.3):
            for view, case in (
                ("fresh", replace(STALE, num_gateways=1, view_s=0.0)),
                ("5 s old", STALE),
            ):
                sized = replace(case, num_replicas=num_replicas, zipf=zipf)
                rows.append((f"{num_replicas} replicas, zipf {zipf}, {view}", sized))
                rows.append(("- power of two", replace(sized, is_power_of_two=True)))
    rows.append(("64, 0.9, 5 s old, from empty caches", replace(STALE, warm_s=0.0)))
    rows.append(("64, 0.9, fresh, from empty caches", replace(STALE, view_s=0.0, warm_s=0.0)))
    rows.append(("64, 0.9, 1 s old, 16 gateways", replace(STALE, view_s=1.0, num_gateways=16)))
    rows.append(("64, 0.9, 5 s old, 16 gateways", replace(STALE, num_gateways=16)))
    rows.append(
        ("64, 0.9, 1 s old, 4 replicas at half speed", replace(STALE, view_s=1.0, num_slow=4))
    )
    rows.append(
        ("64, 0.9, fresh, a new adapter gets 20%", replace(STALE, view_s=0.0, new_share=0.2))
    )
    for num_replicas in (1, 2, 4, 16, 64):
        saturated = Case(num_replicas=num_replicas, num_gateways=4, utilisation=1.5)
        rows.append((f"{num_replicas}, 0.9, fresh, saturated", saturated))
    return rows


def print_table() -> None:
    """Print all rows as Markdown."""
    print(
        "| | waits for a load | imbalance | copies | p99 wait, ms | throughput |\n|---|---|---|---|---|---|"
    )
    for name, case in cases():
        outcome = RouterSimulation(case).run()
        print(
            f"| {name} | {outcome.cold:.3f} | {outcome.imbalance:.2f} | {outcome.copies:.2f}"
            f" | {1000 * outcome.p99_wait_s:.0f} | {outcome.throughput:.2f} |",
            flush=True,
        )


def time_router() -> None:
    """Print the time of a decision, with 64 replicas."""
    router = Router(time.monotonic)
    router.set_replicas([server_sample(name=f"r{i}") for i in range(64)])
    known = [Target(adapter=f"known {i}", units=300.0, tenant="t") for i in range(1000)]
    kinds = {
        "a new adapter": [Target(adapter=f"new {i}", units=300.0) for i in range(1000)],
        "an adapter": known,
        "an adapter and a session": [replace(target, affinity=b"session") for target in known],
        "the base": [Target(adapter=None, units=300.0)] * 1000,
        "the base and a session": [Target(adapter=None, units=300.0, affinity=b"session")] * 1000,
    }
    for target in known:
        router.order(target)
    for name, targets in kinds.items():
        started_s = time.perf_counter()
        for target in targets:
            router.order(target)
        print(f"order, {name}: {1e3 * (time.perf_counter() - started_s):.1f} us")
    started_s = time.perf_counter()
    for target in known:
        router.sent("r1", target)
        router.ended("r1", target)
    print(f"sent and ended: {1e3 * (time.perf_counter() - started_s):.1f} us")


if __name__ == "__main__":
    time_router()
    if "--time-only" not in sys.argv:
        print_table()
