"""What residency tells about an adapter that is in memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
