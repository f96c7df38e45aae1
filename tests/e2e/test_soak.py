"""Thousands of requests of every kind: pages, threads, open files and memory stay where they were."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from idleness import seconds_until_idle
from manylora_server import (
    DEMO_ADAPTERS,
    DEMO_MODEL,
    STEADY_MALLOC,
    ManyloraServer,
    manylora_server,
    upload_bytes,
)
from stream_client import Cut, exchange, stream

pytestmark = pytest.mark.timeout(1800)

NUM_REQUESTS = 3_000
NUM_REQUESTS_WITH_LEAK = 800
ROUND = 100
CLIENTS = 6
MAX_BYTES_PER_REQUEST = 1024
PAGES = 90
PAGE_BYTES = 32 * 1024
SETTINGS = {
    "memory.gib": PAGES * PAGE_BYTES / (1 << 30),
    "memory.host_gib": PAGES * PAGE_BYTES / (1 << 30),
    "scheduler.max_running": 8,
    "scheduler.step_tokens": 16,
    "scheduler.max_wait_s": 600,  # a slow machine is no reason to refuse one of them
    "model.threads": 1,
}
BASE = DEMO_MODEL.name
ADAPTERS = ("pirate",)
INVALID: list[dict[str, Any]] = [
    {"temperature": -1},
    {"model": "no-such-adapter"},
    {"prompt": [99_999_999]},
    {"prompt": [5] * 5000},
    {"no_such_field": 1},
]
KINDS = {
    "whole": 40,
    "streamed": 24,
    "cut": 12,
    "two choices": 8,
    "invalid": 10,
    "looked up": 5,
    "passing": 1,
}
"""How often each kind of request comes; one that is passing uploads an adapter, asks it and deletes it."""


WARM_UP = 0.5
"""The part of all samples in which caches and pools of threads may still fill."""
SPAN = 4
"""Rounds between two samples that are compared, so that each kind of request comes between them."""
LATE = {"processes": 0, "threads": 1, "fds": 3, "pages": 0}
"""What may come after the warm-up and is no leak: the last connection of a pool, with its thread and its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A server's processes while nothing runs."""

    requests: int
    """Answered until then."""
    processes: int
    threads: int
    fds: int
    rss_bytes: int
    pages: int
    """Pages of the pool, free ones included."""


def sample(server: ManyloraServer, requests: int) -> Sample:
    """Wait until nothing runs, and look at the server and all its children."""
    seconds_until_idle(server)
    parent = psutil.Process(server.process.pid)
    processes = [parent, *parent.children(recursive=True)]
    return Sample(
        requests=requests,
        processes=len(processes),
        threads=sum(process.num_threads() for process in processes),
        fds=sum(process.num_fds() for process in processes),
        rss_bytes=sum(process.memory_info().rss for process in processes),
        pages=sum(server.engine()["pages"].values()),
    )


def growth(samples: Sequence[Sample], *, max_bytes_per_request: float) -> dict[str, str]:
    """What grew from the first sample, which is warm, with the figures; empty when nothing did."""
    grown = {
        name: f"{lowest} at the least in the end, {highest} at the most before"
        for name, late in LATE.items()
        for lowest, highest in [_end_and_begin([getattr(each, name) for each in samples])]
        if lowest > highest + late
    }
    slope = bytes_per_request(samples)
    if slope > max_bytes_per_request:
        grown["rss"] = f"{slope:.0f} bytes per request, {max_bytes_per_request:.0f} allowed"
    return grown


def bytes_per_request(samples: Sequence[Sample]) -> float:
    """The least of the slopes of RSS between samples that are SPAN rounds apart.

    What is lost with each request is in every slope. What is in some only are caches that fill late: pages of the
    database, kernels that oneDNN compiles for a new set of adapters. On a busy machine they fill later.
    """
    return min(
        (later.rss_bytes - earlier.rss_bytes) / (later.requests - earlier.requests)
        for earlier, later in zip(samples, samples[SPAN:], strict=False)
    )


def _end_and_begin(counts: list[int]) -> tuple[int, int]:
    """The least of the last third and the most of the first: what only wavers does not grow by them."""
    third = len(counts) // 3
    return min(counts[-third:]), max(counts[:third])


@dataclass
class Crowd:
    """Clients that send a seeded mix of requests."""

    server: ManyloraServer
    key: str
    rng: random.Random
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Kind of request and status of its answer; 0 where it left before."""
    num_passing: int = 0

    async def round(self, count: int) -> None:
        """Send so many requests, a few at a time."""
        kinds = iter(self.rng.choices(list(KINDS), list(KINDS.values()), k=count))
        # One adapter passes at a time, so that all sets of adapters that may meet have met when the warm-up is over:
        # oneDNN keeps kernels for each.
        passing = asyncio.Lock()

        async def client() -> None:
            for kind in kinds:
                async with passing if kind == "passing" else contextlib.nullcontext():
                    self.statuses[kind, await self.send(kind)] += 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def send(self, kind: str) -> int:
        body = {
            "model": self.rng.choice([BASE, *ADAPTERS]),
            "prompt": [self.rng.randrange(6, 600) for _ in range(self.rng.choice([1, 8, 40]))],
            "max_tokens": self.rng.randint(1, 4),
            "temperature": self.rng.choice([0, 1]),
            "ignore_eos": True,
        }
        match kind:
            case "whole":
                return await self.complete(body)
            case "two choices":
                return await self.complete({**body, "n": 2})
            case "invalid":
                return await self.complete({**body, **self.rng.choice(INVALID)})
            case "streamed":
                seen = await stream(self.server.url, self.key, "soak", body, Cut())
                assert seen.tokens == body["max_tokens"]
                return seen.status or 0
            case "cut":
                cut = Cut(
                    manner=self.rng.choice(["close", "reset", "half"]),
                    after_s=self.rng.choice([None, 0, 0.01]),
                    tokens=self.rng.randint(0, 4),
                )
                return (
                    await stream(self.server.url, self.key, "soak", {**body, "max_tokens": 60}, cut)
                ).status or 0
            case "looked up":
                path = self.rng.choice(
                    [
                        "/v1/models",
                        "/v1/adapters",
                        "/v1/adapters/pirate",
                        "/v1/usage",
                        "/v1/nothing",
                    ]
                )
                return (await exchange(self.server.url, self.key, f"GET {path}"))[0]
            case _:
                return await self.upload_ask_delete(body)

    async def complete(self, body: dict[str, Any]) -> int:
        return (await exchange(self.server.url, self.key, "POST /v1/completions", body))[0]

    async def upload_ask_delete(self, body: dict[str, Any]) -> int:
        self.num_passing += 1
        name = f"passing-{self.num_passing % 5}"
        config = json.loads((DEMO_ADAPTERS / "pirate" / "adapter_config.json").read_text())
        config["lora_alpha"] += self.num_passing  # so that each has its own digest
        weights = (DEMO_ADAPTERS / "pirate" / "adapter_model.safetensors").read_bytes()
        client = self.server.tenant("acme")
        uploaded = await asyncio.to_thread(
            upload_bytes, client, name, json.dumps(config).encode(), weights
        )
        assert uploaded.status_code == 201, uploaded.text
        asked = await self.complete({**body, "model": name})
        await exchange(self.server.url, self.key, f"DELETE /v1/adapters/{name}")
        return asked


def rounds(crowd: Crowd, first: int, last: int) -> list[Sample]:
    """Send the requests with these numbers in rounds, with a sample after each."""
    samples = []
    for done in range(first + ROUND, last + 1, ROUND):
        asyncio.run(crowd.round(ROUND))
        samples.append(sample(crowd.server, done))
    return samples


@dataclass(frozen=True, slots=True)
class Soaked:
    """A server after all requests, and what was seen of it."""

    crowd: Crowd
    samples: list[Sample]
    leak_while: Path
    """While this file exists, it leaks."""


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soaked]:
    folder = tmp_path_factory.mktemp("soak")
    leak_while = folder / "leak"
    environment: dict[str, Any] = {**STEADY_MALLOC, "LEAK_WHILE": str(leak_while)}
    with manylora_server(
        folder, "--dtype", "float32", program="leaking_server", settings=SETTINGS, **environment
    ) as server:
        server.publish("acme", *ADAPTERS)
        crowd = Crowd(server, server.tenants["acme"], random.Random(11))
        yield Soaked(crowd, rounds(crowd, 0, NUM_REQUESTS), leak_while)


def test_nothing_grows_in_thousands_of_requests(soaked: Soaked) -> None:
    statuses, samples = soaked.crowd.statuses, soaked.samples
    good = sum(count for (kind, status), count in statuses.items() if status == 200)
    refused = sum(
        count for (kind, status), count in statuses.items() if kind == "invalid" and status >= 400
    )
    assert good > 0.7 * NUM_REQUESTS
    assert refused == sum(count for (kind, _), count in statuses.items() if kind == "invalid")
    assert all(status < 500 for _, status in statuses), statuses
    warm = samples[round(len(samples) * WARM_UP) :]
    assert growth(warm, max_bytes_per_request=MAX_BYTES_PER_REQUEST) == {}, samples
    assert "Traceback" not in soaked.crowd.server.log.read_text()


def test_a_planted_leak_is_noticed(soaked: Soaked) -> None:
    """From then on: the very same server has just been found without one."""
    soaked.leak_while.touch()
    samples = rounds(soaked.crowd, NUM_REQUESTS, NUM_REQUESTS + NUM_REQUESTS_WITH_LEAK)
    assert list(growth(samples, max_bytes_per_request=MAX_BYTES_PER_REQUEST)) == ["rss"], samples


STILL = {"processes": 2, "threads": 17, "fds": 50, "rss_bytes": 900_000_000, "pages": 89}


@pytest.mark.parametrize(
    ("lost", "noticed"),
    [
        ({}, None),
        ({"rss_bytes": 900 * ROUND}, None),
        ({"rss_bytes": 1100 * ROUND}, "rss"),
        ({"threads": 1}, "threads"),
    ]
    + [({name: 1}, name) for name in ("processes", "fds", "pages")],
)
def test_what_is_lost_in_each_round_is_noticed_and_what_only_wavers_is_not(
    lost: dict[str, int], noticed: str | None
) -> None:
    samples = []
    for number in range(20, 41):
        counts = {name: at + lost.get(name, 0) * number for name, at in STILL.items()}
        counts["threads"] += number % 3 == 0
        counts["rss_bytes"] += 20_000_000 * (number > 30)
        counts["fds"] += 3 * (number > 30)  # a connection that SQLite's pool had not made before
        samples.append(Sample(requests=ROUND * number, **counts))
    assert list(growth(samples, max_bytes_per_request=MAX_BYTES_PER_REQUEST)) == (
        [noticed] if noticed else []
    )
