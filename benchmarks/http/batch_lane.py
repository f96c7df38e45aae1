"""What does a batch cost interactive requests? The same load alone, and beside a batch.

    manylora bench batches [--lines 1000] [--requests 200 --rate 4] [--json result.json]

Starts a server with 8 adapters (or with --model and --adapter, or takes one with --url), sends the interactive load,
then a batch of --lines over all models with the load beside it. Prints the times to the first token and per token of
both, and how fast the batch ran. With `--set scheduler.itl_target_ms=...` the time per token is held to it. Exit status
1 if any request or line failed, 2 if the arguments make no sense.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from manylora.benchmarks.http.serve import add_server_options, make_load, target
from manylora.benchmarks.metrics import RequestRecord, summarise
from manylora.benchmarks.report import AddOption, goal, positive
from manylora.client import Client
from manylora.errors import ManyloraError

PATH = "/v1/completions"
LOOK_S = 0.2
MAX_STEPS_MORE = 2
"""How much later the first token may be beside a batch, in the steps that requests alone have."""
_TARGET = "scheduler.itl_target_ms="


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The load alone and beside a batch, sent to the server that the options describe."""
    with target(options) as served, Client(served.url, served.key) as client:
        load = make_load(options, len(served.models))
        alone = uvloop.run(load.send(served, options.warmup))
        batch_id = _start(client, options, served.models)
        _until(client, batch_id, "in_progress", "completed")
        beside = uvloop.run(load.send(served))
        done_beside = client.request("GET", f"/v1/batches/{batch_id}")["request_counts"][
            "completed"
        ]
        ended = _until(client, batch_id, "completed")
    counts, seconds = (
        ended["request_counts"],
        max(1, ended["finalizing_at"] - ended["in_progress_at"]),
    )
    lines_per_s = counts["completed"] / seconds
    rates = {"lines_per_s": lines_per_s, "output_tokens_per_s": lines_per_s * options.line_tokens}
    loads = {"alone": _figures(alone), "beside": _figures(beside)}
    failed = {**{name: found["errors"] for name, found in loads.items()}, "batch": counts["failed"]}
    return {
        **loads,
        "batch": {**counts, "seconds": seconds, **rates, "done_when_the_load_ended": done_beside},
        "table": [{"interactive": name, **found} for name, found in loads.items()],
        "goals": _goals(loads, options.set),
        "failures": [f"{name}: {count} requests failed" for name, count in failed.items() if count],
    }


def _start(client: Client, options: argparse.Namespace, models: Sequence[str]) -> str:
    rng = random.Random(options.seed)
    lines = []
    for number in range(options.lines):
        prompt = [rng.randrange(5, options.vocab_size) for _ in range(options.line_prompt)]
        body = {
            "model": models[number % len(models)],
            "prompt": prompt,
            "max_tokens": options.line_tokens,
        }
        body["ignore_eos"] = True
        lines.append(
            json.dumps({"custom_id": str(number), "method": "POST", "url": PATH, "body": body})
        )
    content = {"file": ("lines.jsonl", "\n".join(lines).encode())}
    file = client.request("POST", "/v1/files", data={"purpose": "batch"}, files=content)
    wanted = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
    return str(client.request("POST", "/v1/batches", json=wanted)["id"])


def _until(client: Client, batch_id: str, *statuses: str) -> dict[str, Any]:
    while (batch := client.request("GET", f"/v1/batches/{batch_id}"))["status"] not in statuses:
        if batch["status"] in ("failed", "expired", "cancelled"):
            raise ManyloraError(f"the batch ended as {batch['status']}: {batch['errors']}")
        time.sleep(LOOK_S)
    return batch


def _goals(loads: dict[str, dict[str, float]], settings: Sequence[str]) -> list[dict[str, Any]]:
    alone, beside = loads["alone"], loads["beside"]
    later = (beside["ttft_p95_ms"] - alone["ttft_p95_ms"]) / alone["tpot_p50_ms"]
    targets_ms = [
        float(setting.removeprefix(_TARGET)) for setting in settings if setting.startswith(_TARGET)
    ]
    return [
        goal("TTFT p95 beside the batch, steps more than alone", later, MAX_STEPS_MORE),
        *(
            goal("time per token p95, ms", beside["tpot_p95_ms"], target_ms)
            for target_ms in targets_ms
        ),
    ]


def _figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    found = summarise(records)
    if found["errors"] == len(records):
        raise ManyloraError(f"no interactive request succeeded: {records[0].error}")
    times = {
        f"{kind}_{at}_ms": found[f"{kind}_ms"][at]
        for kind in ("ttft", "tpot")
        for at in ("p50", "p95")
    }
    return {"errors": found["errors"], **times}


def add_options(add: AddOption) -> None:
    """Add its options."""
    add_server_options(add, requests=200, concurrency=8)
    add("--warmup", type=int, default=16, help="requests sent before, not measured")
    add("--lines", type=positive, default=1000, help="requests of the batch")
    add("--line-prompt", type=positive, default=64, help="prompt tokens of a line")
    add("--line-tokens", type=positive, default=64, help="output tokens of a line")
