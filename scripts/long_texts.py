"""Who waits while a tenant sends texts of a megabyte, and what is left of them in memory?

scripts/long_texts.py [--texts 12] [--seconds 15] [--json benchmarks/results/long-texts-cpu.json]

The demo model is served, with a context that such texts could fit. One tenant keeps sending texts of one megabyte, so
many at once and each at most once a second, to one after the other of the routes that tokenize; from a process of its
own. Beside it, another tenant streams short completions, and GET /health is asked ten times a second. At the end the
server's memory is read for a minute. The first row is without texts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

from manylora import demo
from manylora.benchmarks.http.own_server import BASE_NAME, OwnServer, plain_server
from manylora.benchmarks.metrics import percentile
from manylora.benchmarks.report import goal, positive, tell
from manylora.errors import ManyloraError

MEGABYTE = 1_000_000
MOST_LATER_MS, HEALTH_MS, LEFT_MIB = 100.0, 50.0, 100.0
"""Promised bounds."""
MEMORY_S = 60.0
LEAST_S = 1.0
START_S = 2.0
CONTEXT = 1 << 18
HEALTH_EVERY_S, QUIET_EVERY_S = 0.1, 0.05
MIB = 1 << 20


def bodies(size: int = MEGABYTE) -> dict[str, dict[str, Any]]:
    """A body for each route that tokenizes."""
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
    """All routes, one after the other."""
    with (
        tempfile.TemporaryDirectory() as folder,
        plain_server(_model(Path(folder)), options.set) as server,
    ):
        flood, quiet = server.add_tenant("flood"), server.add_tenant("quiet")
        return uvloop.run(_measure(server, flood, quiet, options))


def _model(folder: Path) -> Path:
    """A copy of the demo model with a longer context, for which it was not trained."""
    copy = Path(shutil.copytree(demo.MODEL, folder / "model"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return copy


async def _measure(
    server: OwnServer, flood: str, quiet: str, options: argparse.Namespace
) -> dict[str, Any]:
    url = server.admin.url
    async with _client(url, quiet) as calm:
        await _beside(calm, None, options.seconds / 3, _nothing)  # warms up
        before = _memory(server.pid)
        table = [await _beside(calm, "alone", options.seconds, _nothing)]
        for path, body in bodies().items():
            sent = json.dumps(body, separators=(",", ":")).encode()
            flooding = partial(_texts, Flood(url, flood, path, sent, options.texts))
            table.append(await _beside(calm, path, options.seconds, flooding))
        left = await _left(server.pid, before)
    alone = table[0]["ttft_p99_ms"]
    goals = [
        goal(f"{row['beside']}: TTFT p99, ms", row["ttft_p99_ms"], alone + MOST_LATER_MS)
        for row in table[1:]
    ]
    goals += [
        goal(f"{row['beside']}: /health p99, ms", row["health_p99_ms"], HEALTH_MS)
        for row in table[1:]
    ]
    goals.append(goal(f"MiB more after {MEMORY_S:.0f} s", left, LEFT_MIB))
    return {"table": table, "goals": goals}


async def _beside(
    calm: httpx.AsyncClient,
    name: str | None,
    seconds: float,
    load: Callable[[], contextlib.AbstractAsyncContextManager[list[tuple[int, float]]]],
) -> dict[str, Any]:
    """Times that the quiet tenant and /health see for some seconds beside a load."""
    async with load() as answers:
        end = time.monotonic() + seconds
        ttfts, healths = await asyncio.gather(
            _repeat(lambda: _first_token(calm), QUIET_EVERY_S, end),
            _repeat(lambda: _health(calm), HEALTH_EVERY_S, end),
        )
    return {
        "beside": name,
        "requests": len(ttfts),
        "ttft_p50_ms": percentile(ttfts, 50),
        "ttft_p99_ms": percentile(ttfts, 99),
        "health_p50_ms": percentile(healths, 50),
        "health_p99_ms": percentile(healths, 99),
        "texts": len(answers),
        "statuses": sorted({status for status, _ in answers}),
        "text_p50_s": percentile([taken for _, taken in answers], 50) if answers else None,
    }


async def _repeat(ask: Callable[[], Any], every_s: float, end: float) -> list[float]:
    """Milliseconds of each call."""
    taken = []
    while (began := time.monotonic()) < end:
        await ask()
        taken.append(1000 * (time.monotonic() - began))
        await asyncio.sleep(every_s)
    return taken


async def _first_token(client: httpx.AsyncClient) -> None:
    body = {
        "model": BASE_NAME,
        "prompt": "Hello, my",
        "max_tokens": 1,
        "stream": True,
        "ignore_eos": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise ManyloraError(
                f"The quiet tenant got {answer.status_code}: {await answer.aread()!r}"
            )
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                return


async def _health(client: httpx.AsyncClient) -> None:
    (await client.get("/health")).raise_for_status()


@contextlib.asynccontextmanager
async def _nothing() -> AsyncIterator[list[tuple[int, float]]]:
    yield []


@dataclass(frozen=True, slots=True)
class Flood:
    """Texts that a tenant keeps on their way."""

    url: str
    key: str
    path: str
    body: bytes
    count: int

    async def send(self, is_over: Callable[[], bool]) -> list[tuple[int, float]]:
        """Status and seconds of each that was answered."""
        answers: list[tuple[int, float]] = []

        async def one_after_the_other(client: httpx.AsyncClient) -> None:
            while not is_over():
                began = time.monotonic()
                answer = await client.post(
                    self.path, content=self.body, headers={"content-type": "application/json"}
                )
                answers.append((answer.status_code, time.monotonic() - began))
                await asyncio.sleep(max(0.0, began + LEAST_S - time.monotonic()))

        async with _client(self.url, self.key) as client:
            await asyncio.gather(*(one_after_the_other(client) for _ in range(self.count)))
        return answers


def _send(flood: Flood, pipe: Connection) -> None:
    """Run a flood in a process of its own, until something comes through the pipe."""
    pipe.send(uvloop.run(flood.send(pipe.poll)))


@contextlib.asynccontextmanager
async def _texts(flood: Flood) -> AsyncIterator[list[tuple[int, float]]]:
    """Have a flood run; the list has its answers afterwards."""
    answers: list[tuple[int, float]] = []
    own, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_send, args=(flood, other))
    process.start()
    await asyncio.sleep(START_S)
    try:
        yield answers
    finally:
        own.send(None)
        answers += await asyncio.to_thread(own.recv)
        await asyncio.to_thread(process.join)


async def _left(pid: int, before: float) -> float:
    """MiB more than before, at the end of a minute or as soon as it is little enough."""
    async with asyncio.timeout(MEMORY_S + 1):
        for _ in range(int(MEMORY_S)):
            if (left := _memory(pid) - before) <= LEFT_MIB / 2:
                break
            await asyncio.sleep(1)
    return left


def _memory(pid: int) -> float:
    """MiB of the server's own process; the engine is another."""
    return float(psutil.Process(pid).memory_info().rss) / MIB


def _client(url: str, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=300, trust_env=False, limits=limits
    )


def main() -> int:
    """Measure, and tell whether it is as promised."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=positive, default=12, help="texts at once")
    parser.add_argument("--seconds", type=positive, default=15, help="of each row")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="setting of the server"
    )
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    return tell("long-texts", options, measure)


if __name__ == "__main__":
    sys.exit(main())
