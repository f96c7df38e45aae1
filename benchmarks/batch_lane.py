"""What does a batch cost those who wait for an answer? The same interactive load alone, and beside a batch.

    weft bench batches [--lines 1000] [--requests 200 --in-flight 8] [--json result.json]

Starts a server with adapters, sends the interactive load, then a batch of --lines over all adapters with the load
beside it. Prints the times to the first token and per token of both, and how fast the batch ran. Exit status 1 if a
request or a line failed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

from weft.benchmarks.arguments import positive
from weft.benchmarks.calls import Reply, closed_loop, first_error
from weft.benchmarks.metrics import percentile
from weft.benchmarks.own_server import OwnServer, demo_parser, plain_server
from weft.benchmarks.report import tell
from weft.errors import WeftError

PATH = "/v1/completions"
LOOK_S = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit status."""
    return tell("batches", _parser().parse_args(arguments), measure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The load alone, then beside a batch."""
    with plain_server(options.model, options.set) as server:
        key = server.add_tenant("shop")
        names = server.upload_copies(key, options.adapters, options.copies)
        alone, beside, batch = asyncio.run(_put_load(options, server, key, names))
    table = [{"": name, **_figures(replies)} for name, replies in (("alone", alone), ("beside", beside))]
    counts, seconds = batch["request_counts"], max(1, batch["finalizing_at"] - batch["in_progress_at"])
    figures = {**counts, "seconds": seconds, "lines_per_s": counts["completed"] / seconds}
    return {"table": table, "goals": [], "batch": figures}


async def _put_load(
    options: argparse.Namespace, server: OwnServer, key: str, names: Sequence[str]
) -> tuple[list[Reply], list[Reply], dict[str, Any]]:
    calls, numbers = server.calls(key, options.seed), itertools.count()

    async def load() -> list[Reply]:
        replies: list[Reply] = []
        models = itertools.islice(itertools.cycle(names), options.requests)
        tokens = options.input_tokens, options.output_tokens
        await closed_loop((calls.make(name, *tokens, next(numbers)) for name in models), options.in_flight, replies)
        if failed := first_error(replies):
            raise WeftError(f"A request failed: {failed}")
        return replies

    async with calls.client:
        await load()  # brings the adapters to the device
        alone = await load()
        lines = []
        for number, name in zip(range(options.lines), itertools.cycle(names), strict=False):
            body = json.loads(calls.make(name, options.line_prompt, options.line_tokens, next(numbers)).body)
            body = {name: value for name, value in body.items() if not name.startswith("stream")}
            lines.append(json.dumps({"custom_id": str(number), "method": "POST", "url": PATH, "body": body}))
        content = {"file": ("lines.jsonl", "\n".join(lines).encode())}
        file = server.call("POST", "/v1/files", key, data={"purpose": "batch"}, files=content)
        wanted = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
        batch_id = server.call("POST", "/v1/batches", key, json=wanted)["id"]
        await _until(server, key, batch_id, "in_progress", "completed")
        beside = await load()
        batch = await _until(server, key, batch_id, "completed")
    if batch["request_counts"]["failed"]:
        raise WeftError(f"Lines failed: the batch has {batch['request_counts']}.")
    return alone, beside, batch


async def _until(server: OwnServer, key: str, batch_id: str, *statuses: str) -> dict[str, Any]:
    while (batch := server.call("GET", f"/v1/batches/{batch_id}", key))["status"] not in statuses:
        if batch["status"] in ("failed", "expired", "cancelled"):
            raise WeftError(f"The batch ended as {batch['status']}: {batch['errors']}.")
        await asyncio.sleep(LOOK_S)
    return batch


def _figures(replies: Sequence[Reply]) -> dict[str, float]:
    times = {"TTFT": [1e3 * reply.ttft_s for reply in replies], "TPOT": [1e3 * reply.tpot_s for reply in replies]}
    return {f"{name} p{rank}, ms": percentile(values, rank) for name, values in times.items() for rank in (50, 95)}


def _parser() -> argparse.ArgumentParser:
    parser = demo_parser("batches", __doc__)
    add = parser.add_argument
    add("--copies", type=positive, default=8, help="adapters, versions of those in --adapters")
    add("--requests", type=positive, default=200, help="of the interactive load")
    add("--in-flight", type=positive, default=8, help="of them")
    add("--input-tokens", type=positive, default=64)
    add("--output-tokens", type=positive, default=64)
    add("--lines", type=positive, default=1000, help="requests of the batch")
    add("--line-prompt", type=positive, default=64, help="prompt tokens of a line")
    add("--line-tokens", type=positive, default=64, help="output tokens of a line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
