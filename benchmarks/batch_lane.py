"""What does a batch cost those who wait for an answer? The same interactive load alone, and beside a batch.

    weft bench batches [--lines 1000] [--requests 200 --rate 4] [--json result.json]

Starts a server with 8 adapters (or with --model and --adapter, or takes one with --url), sends the interactive load,
then a batch of --lines over all models with the load beside it. Prints the times to the first token and per token of
both, and how fast the batch ran. Exit status 1 if any request or line failed, 2 if the arguments make no sense.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx

from weft.benchmarks import load, serve
from weft.benchmarks.arguments import positive
from weft.benchmarks.generator import run_load
from weft.benchmarks.http_stream import EventClient
from weft.benchmarks.metrics import RequestRecord, percentile
from weft.errors import WeftError

PATH = "/v1/completions"
LOOK_S = 0.2


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The load alone and beside a batch, sent to the server that the options describe."""
    with serve.target(options):
        return asyncio.run(_measure(options))


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    plan, settings = load.make_plan(options), load.make_settings(options)
    async with (
        EventClient(options.url, headers) as client,
        httpx.AsyncClient(base_url=options.url, headers=headers, timeout=120, trust_env=False) as http,
    ):
        await run_load(client, plan[: options.warmup], settings)
        alone = await run_load(client, plan, settings)
        batch_id = await _start(http, options)
        await _until(http, batch_id, "in_progress", "completed")
        beside = await run_load(client, plan, settings)
        done_beside = (await _ask(http, "GET", f"/batches/{batch_id}"))["request_counts"]["completed"]
        ended = await _until(http, batch_id, "completed")
    counts, seconds = ended["request_counts"], max(1, ended["finalizing_at"] - ended["in_progress_at"])
    loads = {"alone": _figures(alone), "beside": _figures(beside)}
    failed = {**{name: found["errors"] for name, found in loads.items()}, "batch": counts["failed"]}
    return {
        **loads,
        "batch": {
            **counts,
            "seconds": seconds,
            "lines_per_s": counts["completed"] / seconds,
            "output_tokens_per_s": counts["completed"] * options.line_tokens / seconds,
            "done_when_the_load_ended": done_beside,
        },
        "table": [{"interactive": name, **found} for name, found in loads.items()],
        "failures": [f"{name}: {count} requests failed" for name, count in failed.items() if count],
    }


async def _start(http: httpx.AsyncClient, options: argparse.Namespace) -> str:
    rng, models = random.Random(options.seed), [name for name in options.models.split(",") if name]
    lines = []
    for number in range(options.lines):
        prompt = [rng.randrange(5, options.vocab_size) for _ in range(options.line_prompt)]
        body = {"model": models[number % len(models)], "prompt": prompt, "max_tokens": options.line_tokens}
        body["ignore_eos"] = True
        lines.append(json.dumps({"custom_id": str(number), "method": "POST", "url": PATH, "body": body}))
    content = {"file": ("lines.jsonl", "\n".join(lines).encode())}
    file = await _ask(http, "POST", "/files", data={"purpose": "batch"}, files=content)
    wanted = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
    return str((await _ask(http, "POST", "/batches", json=wanted))["id"])


async def _until(http: httpx.AsyncClient, batch_id: str, *statuses: str) -> dict[str, Any]:
    while True:
        batch = await _ask(http, "GET", f"/batches/{batch_id}")
        if batch["status"] in statuses:
            return batch
        if batch["status"] in ("failed", "expired", "cancelled"):
            raise WeftError(f"the batch ended as {batch['status']}: {batch['errors']}")
        await asyncio.sleep(LOOK_S)


async def _ask(http: httpx.AsyncClient, method: str, path: str, **content: Any) -> dict[str, Any]:  # noqa: ANN401 - a body
    answer = await http.request(method, path, **content)
    if not answer.is_success:
        raise WeftError(f"{method} {path} was answered {answer.status_code}: {answer.text}")
    return dict(answer.json())


def _figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    good = [record for record in records if record.error is None]
    if not good:
        raise WeftError(f"no interactive request succeeded: {records[0].error}")
    ttft, tpot = [record.ttft_s * 1e3 for record in good], [record.tpot_s * 1e3 for record in good]
    return {
        "errors": len(records) - len(good),
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p95_ms": percentile(ttft, 95),
        "tpot_p50_ms": percentile(tpot, 50),
        "tpot_p95_ms": percentile(tpot, 95),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    serve.add_server_options(parser)
    load.add_load_options(parser)
    parser.set_defaults(requests=200, concurrency=8)
    add = parser.add_argument
    add("--warmup", type=int, default=16, help="requests sent before, not measured")
    add("--lines", type=positive, default=1000, help="requests of the batch")
    add("--line-prompt", type=positive, default=64, help="prompt tokens of a line")
    add("--line-tokens", type=positive, default=64, help="output tokens of a line")
