"""Hundreds of clients that hardly send anything delay no other request, and are disconnected."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

from manylora_server import DEMO_MODEL, ManyloraServer

CLIENTS = 200
SECONDS = 14
SHOWN_OUT = {
    "nothing": (),
    "head": ("408",),
    "upload without key": ("401",),
    "text without key": ("401",),
}
"""Whom the server leaves no time, and its last word."""
SLOW_CLIENTS = Path(__file__).parents[1] / "support" / "slow_clients.py"


def test_two_hundred_slow_clients_hold_up_nobody(server: ManyloraServer) -> None:
    server.tenant("slow")
    before = psutil.Process(server.process.pid).memory_info().rss
    arguments = [server.url, server.tenants["slow"], str(CLIENTS), str(SECONDS)]
    with subprocess.Popen(
        [sys.executable, str(SLOW_CLIENTS), *arguments], stdout=subprocess.PIPE
    ) as clients:
        assert clients.stdout is not None
        assert clients.stdout.readline() == b"started\n"
        while clients.poll() is None:
            assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
            time.sleep(0.05)
        ends = json.loads(clients.stdout.read())
    assert psutil.Process(server.process.pid).memory_info().rss - before < 64 << 20
    for kind, statuses in SHOWN_OUT.items():
        assert set(ends[kind]) <= {"closed", *statuses}, ends
    assert sum(sum(kind.values()) for kind in ends.values()) == CLIENTS
    assert sum(1 for path in (server.data_dir / "blobs" / "tmp").iterdir()) == 0
    body = {"model": DEMO_MODEL.name, "prompt": "x", "max_tokens": 2}
    assert server.tenant("slow").post("/v1/completions", json=body).status_code == 200
