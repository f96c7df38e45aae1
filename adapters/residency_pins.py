"""Which adapters their owners want kept on the device, and which of these may be kept.

Pins keep a share of slots and pages at most, so that nobody's pins keep everybody else out. Those pinned first come
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from weft.adapters.ref import AdapterRef
from weft.adapters.residency_entry import Entry, Stage

PIN_SHARE = 2
"""Pinned adapters may keep one in so many slots, and one in so many pages of the pool, for themselves."""
LOOK_AHEAD = 64
"""Pinned adapters that are looked at, at a time, for one to bring in."""


class Pins:
    """Pinned adapters in the order of pinning.

    Args:
        slots: Adapter slots there are.
        num_pages: Pages of the pool.
    """

    def __init__(self, slots: int, num_pages: int) -> None:
        self._max_kept = slots // PIN_SHARE
        self._max_pages = num_pages // PIN_SHARE
        self._pinned: dict[str, AdapterRef] = {}
        self._failed: set[str] = set()

    def __contains__(self, digest: str) -> bool:
        return digest in self._pinned

    def add(self, ref: AdapterRef) -> None:
        """Pin an adapter; one whose load failed is tried again."""
        self._pinned.setdefault(ref.digest, ref)
        self._failed.discard(ref.digest)

    def discard(self, digest: str) -> None:
        """Unpin an adapter."""
        self._pinned.pop(digest, None)
        self._failed.discard(digest)

    def note_load(self, digest: str, succeeded: bool) -> None:
        """Remember that a pinned adapter cannot be loaded, or can: one that cannot is not brought in for its pin."""
        if succeeded or digest not in self._pinned:
            self._failed.discard(digest)
        else:
            self._failed.add(digest)

    def apply(self, entries: Mapping[str, Entry]) -> list[Entry]:
        """Decide anew which pinned adapters on the device are kept.

        Returns:
            All that are pinned and on the device.
        """
        num_left, pages_left = self._max_kept, self._max_pages
        pinned = [entry for entry in map(entries.get, self._pinned) if entry and entry.stage is Stage.DEVICE]
        for entry in pinned:
            entry.is_kept = num_left > 0 and entry.num_pages <= pages_left
            entry.goes_last = not entry.is_kept
            if entry.is_kept:
                num_left -= 1
                pages_left -= entry.num_pages
        return pinned

    def has_share(self, num_pages: int, entries: Mapping[str, Entry]) -> bool:
        """Whether one more of so many pages would be kept beside those that are kept now."""
        kept = [entry.num_pages for entry in entries.values() if entry.is_kept]
        return len(kept) < self._max_kept and sum(kept) + num_pages <= self._max_pages

    def missing(self, entries: Mapping[str, Entry]) -> Iterator[AdapterRef]:
        """The first pinned adapters that are neither on the device nor on their way, and can be loaded."""
        return islice(
            (ref for digest, ref in self._pinned.items() if digest not in entries and digest not in self._failed),
            LOOK_AHEAD,
        )
