"""What it costs to have a page again. Plain numbers, measured when the engine starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCosts:
    """Seconds."""

    copy_s: float
    """One page between host and device."""
    load_s: float
    """One page of an adapter from the store into host memory: read, hashed, checked and packed."""
    token_s: float
    """One token of a prompt, computed with others."""
