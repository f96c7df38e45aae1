"""Does Manylora keep its promises in seconds? Measured with the clients of the tests, on the demo model.

scripts/promises [--json benchmarks/results/promises-cpu.json]

start         `manylora demo --once`, from the start to six answers: the longest of three
killed        an engine is killed: until the server is ready again, the longer of two (a third would be a crash loop)
left          32 clients close their streams at once: until all their pages are free, the longest of five
slow clients  200 clients that send a byte now and then: the 99th percentile of /health beside them
page          a page of the dashboard with 20 tenants, 500 adapters and 100,000 events of 90 days: the best of five,
              from the address to a page that shows all its figures
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page

import slow_clients
from browser import chromium, sign_in, wait_until_shown, watched_page
from idleness import seconds_until_idle
from many_usage import PATHS, fill
from manylora.benchmarks.metrics import percentile
from manylora.benchmarks.report import goal, tell
from manylora_server import (
    ADMIN_KEY,
    DEMO_MODEL,
    MANYLORA,
    ManyloraServer,
    engines,
    free_port,
    manylora_server,
)
from stream_client import Cut, stream

START_S = 15.0
KILLED_S = 10.0
LEFT_S = 2.0
HEALTH_S = 0.1
PAGE_S = 1.0
"""Promised bounds."""
LEAVING = 32
SLOW_CLIENTS = 200
SLOW_S = 14


def measure(_options: argparse.Namespace) -> dict[str, Any]:
    """Measure all of them, one after the other."""
    with tempfile.TemporaryDirectory(prefix="manylora-") as name:
        folder = Path(name)
        goals = [
            goal(
                "start: seconds to the answers",
                max(demo_s(folder / "demo") for _ in range(3)),
                START_S,
            )
        ]
        with manylora_server(folder / "server") as server:
            server.tenant("acme")
            goals += [
                goal(
                    "left: seconds until all pages are free",
                    max(left_s(server) for _ in range(5)),
                    LEFT_S,
                ),
                goal(
                    "slow clients: seconds of /health, p99",
                    percentile(beside_slow_clients(server), 99),
                    HEALTH_S,
                ),
                goal(
                    "killed: seconds until ready", max(killed_s(server) for _ in range(2)), KILLED_S
                ),
            ]
        goals += [
            goal(f"page {path}: seconds", seconds, PAGE_S)
            for path, seconds in pages_s(folder / "many").items()
        ]
    return {
        "table": [{"promise": each["goal"], "seconds": each["figure"]} for each in goals],
        "goals": goals,
    }


def demo_s(folder: Path) -> float:
    """Seconds that `manylora demo --once` says it took."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [*MANYLORA, "demo", "--once", "--port", str(free_port())],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"([\d.]+) s from start to answers", done.stdout)
    return float(found[1]) if found else float("nan")


def left_s(server: ManyloraServer) -> float:
    """Clients read a few tokens and close; returns the seconds after the last has closed."""
    body = {
        "model": DEMO_MODEL.name,
        "prompt": [5, 6, 7],
        "max_tokens": 400,
        "n": 1,
        "ignore_eos": True,
    }

    async def leave() -> None:
        each = (
            stream(server.url, server.tenants["acme"], f"r{i}", body, Cut(tokens=i))
            for i in range(LEAVING)
        )
        await asyncio.gather(*each)

    asyncio.run(leave())
    return seconds_until_idle(server)


def killed_s(server: ManyloraServer) -> float:
    """The engine is killed and another one starts."""
    engines(server)[0].kill()
    started_s = time.perf_counter()
    while server.admin.get("/ready").status_code == 200:
        time.sleep(0.01)
    server.wait_ready()
    return time.perf_counter() - started_s


def beside_slow_clients(server: ManyloraServer) -> list[float]:
    """Seconds of each answer, asked twenty times a second on a connection each."""
    arguments = [server.url, server.tenants["acme"], str(SLOW_CLIENTS), str(SLOW_S)]
    with subprocess.Popen(
        [sys.executable, slow_clients.__file__, *arguments], stdout=subprocess.PIPE
    ) as clients:
        if clients.stdout is None or clients.stdout.readline() != b"started\n":
            raise RuntimeError("the slow clients did not start")
        taken = []
        ends_s = time.perf_counter() + SLOW_S - 2
        while time.perf_counter() < ends_s:
            started_s = time.perf_counter()
            httpx.get(f"{server.url}/health", trust_env=False).raise_for_status()
            taken.append(time.perf_counter() - started_s)
            time.sleep(0.05)
        clients.communicate()
    return taken


def pages_s(folder: Path) -> dict[str, float]:
    """Seconds of each page, by path."""
    asyncio.run(fill(folder / "data", ADMIN_KEY, datetime.now(UTC)))
    with (
        manylora_server(
            folder, "--served-model-name", "manylora-demo", MANYLORA_MEMORY__POISON="false"
        ) as server,
        chromium() as browser,
        watched_page(browser, server.url) as (page, _),
    ):
        sign_in(page, ADMIN_KEY, "/account")
        return {path: min(_show_s(page, path) for _ in range(5)) for path in PATHS}


def _show_s(page: Page, path: str) -> float:
    started_s = time.perf_counter()
    page.goto(path, wait_until="commit")
    wait_until_shown(page)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(tell("promises", __doc__, {}, measure))
