"""Measures the time of ten lines of one tenant beside a hundred batches of another.

scripts/batch_turns.py [--batches 100] [--lines 200] [--own-lines 10] [--repeats 5]
    [--json benchmarks/results/batch-turns-cpu.json]

The demo model is served. A tenant sends a batch of ten lines, several times, one after the other: alone, and while the
batches of another tenant of the same weight wait and run. A server that took batches in the order of arrival would
start the ten lines after all others.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from typing import Any

from manylora import demo
from manylora.benchmarks.http.batch_lane import start_batch, upload_lines, wait_for_batch
from manylora.benchmarks.http.own_server import BASE_NAME, plain_server
from manylora.benchmarks.report import SETTINGS, Options, goal, tell
from manylora.client import Client
from manylora.errors import ManyloraError

MOST_TIMES_LONGER = 3.0
"""Promised bound."""
LOOK_S = 0.02
DONE = "completed"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The own lines alone, then beside the batches."""
    with plain_server(demo.MODEL, options.set) as server:
        flood, own = (server.client(name) for name in ("flood", "own"))
        with flood, own:
            file_id = _upload(own, options.own_lines, options.line_tokens)
            _run(own, file_id)  # warms up
            alone_s = [_run(own, file_id) for _ in range(options.repeats)]
            flood_file = _upload(flood, options.lines, options.line_tokens)
            flooding = [start_batch(flood, flood_file) for _ in range(options.batches)]
            beside_s = [_run(own, file_id) for _ in range(options.repeats)]
            found = [flood.request("GET", f"/v1/batches/{batch}") for batch in flooding]
    done = sum(batch["status"] == DONE for batch in found)
    if done == len(found):
        raise ManyloraError(
            "all batches of the other tenant were done before the last own lines: use more --lines"
        )
    rows = [
        {"own lines": name, **_summary(taken)}
        for name, taken in (("alone", alone_s), ("beside", beside_s))
    ]
    ratio = statistics.median(beside_s) / statistics.median(alone_s)
    goals = [goal("times longer beside the batches, median", ratio, MOST_TIMES_LONGER)]
    return {"table": rows, "other_batches_done": done, "goals": goals}


def _upload(client: Client, count: int, tokens: int) -> str:
    """Upload lines for the base; returns the id of the file."""
    body = {"model": BASE_NAME, "prompt": "Hello, my", "max_tokens": tokens, "ignore_eos": True}
    return upload_lines(client, itertools.repeat(body, count))


def _run(client: Client, file_id: str) -> float:
    """Run a batch; returns the seconds until it is done."""
    began = time.monotonic()
    batch = wait_for_batch(client, start_batch(client, file_id), DONE, look_s=LOOK_S)
    if batch["request_counts"]["failed"]:
        raise ManyloraError(f"lines failed: {batch['request_counts']}")
    return time.monotonic() - began


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(seconds), "least_s": min(seconds), "most_s": max(seconds)}


OPTIONS: Options = {
    "batches": (100, "batches of the other tenant"),
    "lines": (200, "requests of each of them"),
    "own_lines": (10, "requests of the batch that is timed"),
    "line_tokens": (64, "output tokens of a line"),
    "repeats": (5, "batches that are timed"),
    **SETTINGS,
}

if __name__ == "__main__":
    sys.exit(tell("batch-turns", __doc__, OPTIONS, measure))
