"""The cost of a batch for interactive requests: one load alone, and beside a batch.

    manylora bench batches [--lines 1000] [--requests 200 --rate 4] [--json result.json]

Starts a server with 8 adapters (or with --model and --adapter, or takes one with --url), sends the interactive load,
then a batch of --lines over all models with the load beside it. Prints the times to the first token and per token of
both, and how fast the batch ran. With `--set scheduler.itl_target_ms=...` the time per token is held to it. Exit status
1 if any request or line failed, 2 if the arguments make no sense.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from manylora.benchmarks.http.generator import Load
from manylora.benchmarks.http.serve import SERVER, chosen_load, warm_up
from manylora.benchmarks.metrics import summarise
from manylora.benchmarks.report import Figures, Options, goal, make_row
from manylora.client import Client
from manylora.errors import ManyloraError

PATH = "/v1/completions"
LOOK_S = 0.2
MAX_STEPS_MORE = 2
"""Largest delay of the first token by a batch, in the steps that requests alone have."""
COLUMNS = {
    "errors": "errors",
    "ttft_p50_ms": "ttft_ms.p50",
    "ttft_p95_ms": "ttft_ms.p95",
    "tpot_p50_ms": "tpot_ms.p50",
    "tpot_p95_ms": "tpot_ms.p95",
}
"""Figures of the load in the table."""
_TARGET = "scheduler.itl_target_ms="


def measure(options: Namespace) -> Figures:
    """The load alone and beside a batch, sent to the server that the options describe."""
    with chosen_load(options) as load, Client(load.targets[0].url, load.targets[0].key) as client:
        warm_up(load, options.warmup)
        loads = {"alone": _figures(load)}
        batch_id = start_batch(client, upload_lines(client, _bodies(options, load)))
        wait_for_batch(client, batch_id, "in_progress", "completed")
        loads["beside"] = _figures(replace(load, seed=load.seed + 1))
        ended = wait_for_batch(client, batch_id, "completed")
    counts = ended["request_counts"]
    seconds = max(1, ended["finalizing_at"] - ended["in_progress_at"])
    lines_per_s = counts["completed"] / seconds
    failed = {**{name: found["errors"] for name, found in loads.items()}, "batch": counts["failed"]}
    return {
        **loads,
        "batch": {
            **counts,
            "seconds": seconds,
            "lines_per_s": lines_per_s,
            "output_tokens_per_s": lines_per_s * options.line_tokens,
        },
        "table": [{"interactive": name, **found} for name, found in loads.items()],
        "goals": _goals(loads, options.set),
        "failures": [f"{name}: {count} requests failed" for name, count in failed.items() if count],
    }


def _bodies(options: Namespace, load: Load) -> Iterator[dict[str, Any]]:
    """Make the bodies of the lines."""
    draw = random.Random(options.seed)
    for target in itertools.islice(itertools.cycle(load.targets), options.lines):
        ids = range(5, target.vocab_size)
        yield {
            "model": target.model,
            "prompt": draw.choices(ids, k=options.line_prompt),
            "max_tokens": options.line_tokens,
            "ignore_eos": True,
        }


def upload_lines(client: Client, bodies: Iterable[dict[str, Any]]) -> str:
    """Upload a file of completions for a batch; returns its id."""
    lines = (
        json.dumps({"custom_id": str(number), "method": "POST", "url": PATH, "body": body})
        for number, body in enumerate(bodies)
    )
    content = {"file": ("lines.jsonl", "\n".join(lines).encode())}
    return str(client.request("POST", "/v1/files", data={"purpose": "batch"}, files=content)["id"])


def start_batch(client: Client, file_id: str) -> str:
    """Start a batch of the lines of a file; returns its id."""
    wanted = {"input_file_id": file_id, "endpoint": PATH, "completion_window": "24h"}
    return str(client.request("POST", "/v1/batches", json=wanted)["id"])


def wait_for_batch(
    client: Client, batch_id: str, *statuses: str, look_s: float = LOOK_S
) -> dict[str, Any]:
    """Wait until a batch has one of these statuses; returns the batch.

    Raises:
        ManyloraError: The batch ended in another way.
    """
    while (batch := client.request("GET", f"/v1/batches/{batch_id}"))["status"] not in statuses:
        if batch["status"] in ("failed", "expired", "cancelled"):
            raise ManyloraError(f"the batch ended as {batch['status']}: {batch['errors']}")
        time.sleep(look_s)
    return batch


def _goals(loads: dict[str, Figures], settings: Sequence[str]) -> list[Figures]:
    alone, beside = loads.values()
    later = (beside["ttft_p95_ms"] - alone["ttft_p95_ms"]) / alone["tpot_p50_ms"]
    goals = [goal("TTFT p95 beside the batch, steps more than alone", later, MAX_STEPS_MORE)]
    for setting in settings:
        if setting.startswith(_TARGET):
            target_ms = float(setting.removeprefix(_TARGET))
            goals.append(goal("time per token p95, ms", beside["tpot_p95_ms"], target_ms))
    return goals


def _figures(load: Load) -> Figures:
    """Send the load; returns its times."""
    replies = load.run()
    found = summarise(replies)
    if found["errors"] == len(replies):
        raise ManyloraError(f"no interactive request succeeded: {replies[0].error}")
    return make_row(found, COLUMNS)


OPTIONS: Options = {
    **SERVER,
    "requests": (200, ""),
    "concurrency": (8, "requests in flight (closed loop)"),
    "warmup": (16, "requests sent before, not measured", int),
    "lines": (1000, "requests of the batch"),
    "line_prompt": (64, "prompt tokens of a line"),
    "line_tokens": (64, "output tokens of a line"),
}
