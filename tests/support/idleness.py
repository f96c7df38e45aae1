"""Waiting for a server: until something is so, and until it holds nothing for requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from manylora_server import ManyloraServer

PATIENCE_S = 180.0
KEPT = frozenset(
    {"pages:free", "pages:adapter", "pages:prefix", "host_pages:free", "host_pages:adapter"}
)
"""Adapters and cached prefixes may stay: their pages are given to any request that needs them."""


def held_by_requests(state: dict[str, Any]) -> dict[str, int]:
    """What is held for requests, by what it is; empty when all of it is back."""
    counts = {
        "running": state["running"],
        "waiting": state["waiting"],
        "http": state["http_requests"],
    }
    for group in ("pages", "host_pages"):
        counts |= {f"{group}:{kind}": number for kind, number in state[group].items()}
    return {name: count for name, count in counts.items() if count and name not in KEPT}


def wait_until(condition: Callable[[], object], pause_s: float = 0.02) -> None:
    """Return once it is so; the patience only ends a hang."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "still not so"
        time.sleep(pause_s)


def seconds_until_idle(server: ManyloraServer) -> float:
    started_s = time.monotonic()
    wait_until(lambda: not held_by_requests(server.engine()))
    return time.monotonic() - started_s
