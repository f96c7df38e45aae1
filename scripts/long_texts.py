"""Measures who waits while a tenant sends texts of a megabyte, and what is left of them in memory.

scripts/long_texts.py [--texts 12] [--seconds 15] [--json benchmarks/results/long-texts-cpu.json]

The demo model is served, with a context that such texts could fit. One tenant keeps sending texts of one megabyte, some
at once and each at most once a second, to one after the other of the routes that tokenize; from a process of its
own. Beside it, another tenant streams short completions, and GET /health is asked ten times a second. At the end the
server's memory is read for a minute. The first row is without texts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import uvloop

from manylora import demo
from manylora.benchmarks.http.generator import (
    Call,
    Generator,
    Load,
    Target,
    check_replies,
    flood,
)
from manylora.benchmarks.http.own_server import BASE_NAME, OwnServer, plain_server
from manylora.benchmarks.http.runner import play
from manylora.benchmarks.metrics import Reply, percentile
from manylora.benchmarks.report import SETTINGS, Options, goal, tell

MEGABYTE = 1_000_000
MOST_LATER_MS = 100.0
HEALTH_MS = 50.0
LEFT_MIB = 100.0
"""Promised bounds."""
MEMORY_S = 60.0
LEAST_S = 1.0
START_S = 2.0
CONTEXT = 1 << 18
HEALTH_EVERY_S = 0.1
QUIET_EVERY_S = 0.05
QUIET_BODY = json.dumps(
    {
        "model": BASE_NAME,
        "prompt": "Hello, my",
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
).encode()
"""A short text, which is tokenized as well."""


def bodies(size: int = MEGABYTE) -> dict[str, dict[str, Any]]:
    """Make a body for each route that tokenizes."""
    text = "ab " * (size // 3)
    chat = {"model": BASE_NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return {
        "/tokenize": {"prompt": text},
        "/detokenize": {"tokens": [100] * (size // 4)},
        "/v1/messages/count_tokens": {"model": BASE_NAME, "messages": chat["messages"]},
        "/v1/messages": chat,
        "/v1/completions": {"model": BASE_NAME, "prompt": text, "max_tokens": 8},
        "/v1/chat/completions": chat,
        "/v1/responses": {"model": BASE_NAME, "input": text, "max_output_tokens": 8},
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all routes, one after the other."""
    with (
        tempfile.TemporaryDirectory() as folder,
        plain_server(_model(Path(folder)), options.set) as server,
    ):
        return _measure(server, options)


def _model(folder: Path) -> Path:
    """A copy of the demo model with a longer context, for which it was not trained."""
    copy = Path(shutil.copytree(demo.MODEL, folder / "model"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return copy


def _measure(server: OwnServer, options: argparse.Namespace) -> dict[str, Any]:
    quiet = server.target("quiet")
    above = replace(server.target("flood"), url=server.admin.url)  # bodies name whole paths
    _beside(quiet, None, [], options.seconds / 3)  # warms up
    before_mib = _memory_mib(server)
    table = [_beside(quiet, "alone", [], options.seconds)]
    for path, body in bodies().items():
        sent = json.dumps(body, separators=(",", ":")).encode()
        texts = Texts(targets=[above], at_once=options.texts, every_s=LEAST_S, path=path, body=sent)
        table.append(_beside(quiet, path, [texts], options.seconds))
    ends_s = time.monotonic() + MEMORY_S
    while (left_mib := _memory_mib(server) - before_mib) > LEFT_MIB / 2:
        if time.monotonic() > ends_s:
            break
        time.sleep(1)
    limit_ms = table[0]["ttft_p99_ms"] + MOST_LATER_MS
    beside = [(row, row["beside"]) for row in table[1:]]
    goals = [
        *(goal(f"{name}: TTFT p99, ms", row["ttft_p99_ms"], limit_ms) for row, name in beside),
        *(
            goal(f"{name}: /health p99, ms", row["health_p99_ms"], HEALTH_MS)
            for row, name in beside
        ),
        goal(f"MiB more after {MEMORY_S:.0f} s", left_mib, LEFT_MIB),
    ]
    return {"table": table, "goals": goals}


@dataclass(frozen=True, kw_only=True)
class Texts(Load):
    """Texts that a tenant keeps on their way."""

    path: str
    body: bytes

    def calls(self, made: Generator) -> Iterator[Call]:
        """Make the same request without end."""
        (target,) = self.targets
        while True:
            yield Call(made.client(target), target.model, self.body, path=self.path)


def _beside(quiet: Target, name: str | None, groups: list[Texts], seconds: float) -> dict[str, Any]:
    """Measure what the quiet tenant and /health see for some seconds beside texts."""
    with flood(groups) as flooded:
        time.sleep(START_S if groups else 0)
        replies, health_ms = uvloop.run(_ask_both(quiet, time.perf_counter() + seconds))
    check_replies(replies)
    ttft_ms = [1e3 * reply.ttft_s for reply in replies]
    answers = [reply for group in flooded for reply in group if reply.status]
    return {
        "beside": name,
        "requests": len(ttft_ms),
        "ttft_p50_ms": percentile(ttft_ms, 50),
        "ttft_p99_ms": percentile(ttft_ms, 99),
        "health_p50_ms": percentile(health_ms, 50),
        "health_p99_ms": percentile(health_ms, 99),
        "texts": len(answers),
        "statuses": sorted({reply.status for reply in answers}),
        "text_p50_s": percentile([reply.done_s - reply.sent_s for reply in answers], 50),
    }


async def _ask_both(quiet: Target, until_s: float) -> tuple[list[Reply], list[float]]:
    """Ask for completions and for /health beside each other; returns the replies and milliseconds of /health."""
    replies: list[Reply] = []
    health_ms: list[float] = []

    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        with Generator() as made:

            async def complete(_: int, due_s: float) -> None:
                call = Call(made.client(quiet), quiet.model, QUIET_BODY, output_tokens=1)
                await call.send(replies, due_s)
                await asyncio.sleep(QUIET_EVERY_S)

            async def look(_: int, due_s: float) -> None:
                (await client.get(quiet.url.removesuffix("/v1") + "/health")).raise_for_status()
                health_ms.append(1e3 * (time.perf_counter() - due_s))
                await asyncio.sleep(HEALTH_EVERY_S)

            each = (
                play(itertools.count(), act, at_once=1, until_s=until_s) for act in (complete, look)
            )
            await asyncio.gather(*each)
    return replies, health_ms


def _memory_mib(server: OwnServer) -> float:
    """MiB of the server's own process; the engine is another."""
    return server.usage()["rss_mib"]


OPTIONS: Options = {"texts": (12, "texts at once"), "seconds": (15, "of each row"), **SETTINGS}

if __name__ == "__main__":
    sys.exit(tell("long-texts", __doc__, OPTIONS, measure))
