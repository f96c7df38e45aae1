"""What residency tells about an adapter that is in memory, or could not be loaded. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from weft.errors import WeftError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentAdapter:
    """An adapter that is on the device, in host memory, or on its way."""

    digest: str
    tier: Literal["device", "host", "loading"]
    pages: int
    """Pages of its image; 0 while unknown."""
    running: int
    """Running requests that use it."""
    pinned: bool = False
    holds: int = 0
    """Requests that wait for it."""
    uses: int = 0
    """How often a request began to run with it since it came to memory."""
    prefix_pages: int = 0
    """Pages of cached KV that were computed with it."""
    slot: int = -1
    """Its adapter slot; -1 where it has none, being in host memory or still loaded there."""
    loads: int = 0
    """How often it came to the device, as long as it is remembered."""
    load_p95_s: float | None = None
    """Of the last 32 of these loads, 95 % took at most so many seconds, from the first hold on; null before one."""


class LoadFailure(NamedTuple):
    """An adapter that could not be loaded, told once."""

    digest: str
    error: WeftError
