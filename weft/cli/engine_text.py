"""What `weft ps` and `weft top` say of the engine in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REASONS = {
    "LOADING": "loading",
    "NO_ROOM": "no room",
    "NO_PAGES": "no pages",
    "FORK": "shared prompt",
    "NEW": "in line",
}
"""Why requests wait: for their adapter to be loaded; for pages or a slot for it; for pages of KV cache; for the prompt
that choices of one request share; for their tenant's turn."""
REFUSALS = {
    "limit.queue": "over share",
    "server.overloaded": "overload",
    "engine_overloaded": "queue full",
    "deadline.queue": "too late",
}
"""Why requests were refused; other codes are shown as they are."""


def counts_text(counts: Mapping[str, int]) -> str:
    """Counts with what they count, in a row."""
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items()) or "none"


def in_words(counts: Mapping[str, int], words: Mapping[str, str]) -> dict[str, int]:
    """Counts by plain words, the largest first; what is 0 is left out."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {words.get(code, code): count for code, count in ordered if count}


def num_paused(body: Mapping[str, Any]) -> int:
    """Running requests that sat out the last step, from the body of `GET /v1/engine`."""
    return sum(load["paused"] for load in body["tenants"].values())
