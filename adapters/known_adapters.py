"""What is remembered of adapters, also while they are in no memory: their size, and how often they are used."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.memory.eviction import UseCount


@dataclass(slots=True, eq=False)
class KnownAdapter:
    """One adapter that was wanted or pinned once."""

    num_pages: int | None = None
    """Pages of its image; None before it was first loaded."""
    uses: UseCount = field(default_factory=UseCount)
    num_runs: int = 0
    """Requests that ran with it and are done, since it was last read from the store."""


class KnownAdapters:
    """The last `limit` that were asked for; one that falls out and comes back starts anew.

    Args:
        limit: Adapters.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[str, KnownAdapter] = {}
        """The one asked for last at the end."""

    def __getitem__(self, digest: str) -> KnownAdapter:
        known = self._known.pop(digest, None) or KnownAdapter()
        self._known[digest] = known
        if len(self._known) > self._limit:
            del self._known[next(iter(self._known))]
        return known

    def num_pages(self, digest: str) -> int | None:
        """Pages of an adapter's image, where they are known."""
        known = self._known.get(digest)
        return None if known is None else known.num_pages

    def num_runs(self, digest: str) -> int:
        """Requests that ran with an adapter since it was last read."""
        known = self._known.get(digest)
        return 0 if known is None else known.num_runs

    def forget(self, digest: str) -> None:
        """Remember nothing of an adapter."""
        self._known.pop(digest, None)
