"""What is remembered of adapters, also while they are in no memory: their size, and how often they are used."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.adapters.load_times import LoadTimes
from weft.memory.eviction import UseCount

NUM_LOADS = 32
"""Of each adapter, loads that count for how long they take."""


@dataclass(slots=True, eq=False)
class KnownAdapter:
    """One adapter that was wanted or pinned once."""

    num_pages: int | None = None
    """Pages of its image; None before it was first loaded."""
    uses: UseCount = field(default_factory=UseCount)
    num_runs: int = 0
    """Requests that ran with it and are done, since it was last read from the store."""
    loads: LoadTimes = field(default_factory=lambda: LoadTimes(NUM_LOADS))
    """Its loads onto the device."""


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

    def get(self, digest: str) -> KnownAdapter:
        """What is known of an adapter, which does not count as asking for it."""
        return self._known.get(digest) or KnownAdapter()

    def forget(self, digest: str) -> None:
        """Remember nothing of an adapter."""
        self._known.pop(digest, None)
