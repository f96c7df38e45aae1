"""What of a server is busy, and waiting until nothing is."""

from __future__ import annotations

import time
from typing import Any

from weft_server import WeftServer

KEPT = frozenset({"pages:free", "pages:adapter", "pages:prefix", "host_pages:free", "host_pages:adapter"})
"""Adapters and cached prefixes may stay when nobody asks: whoever needs their pages gets them."""


def held_by_requests(state: dict[str, Any]) -> dict[str, int]:
    """What is held for requests, by what it is; empty when all of it is back."""
    counts = {"running": state["running"], "waiting": state["waiting"], "http": state["http_requests"]}
    for group in ("pages", "host_pages"):
        counts |= {f"{group}:{kind}": number for kind, number in state[group].items()}
    return {name: count for name, count in counts.items() if count and name not in KEPT}


def seconds_until_idle(server: WeftServer, patience_s: float = 60) -> float:
    started = time.monotonic()
    while held := held_by_requests(server.engine()):
        assert time.monotonic() - started < patience_s, f"still held: {held}"
        time.sleep(0.02)
    return time.monotonic() - started
