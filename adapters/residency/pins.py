"""Which adapters are pinned to the device, and which of these may be kept there.

Pins keep at most a share of the slots and pages, so one tenant's pins cannot keep all others out. Adapters pinned
first have precedence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from manylora.adapters.ref import AdapterRef
from manylora.adapters.residency.entry import Entries, Entry

PIN_DIVISOR = 2
"""Pinned adapters may keep 1 / PIN_DIVISOR of the slots, and of the pages of the pool."""
LOOK_AHEAD = 64
"""Pinned adapters that are looked at, at a time, for one to bring in."""


class Pins:
    """Pinned adapters in the order of pinning.

    Args:
        slots: Adapter slots there are.
        num_pages: Pages of the pool.
    """

    def __init__(self, slots: int, num_pages: int) -> None:
        self._max_kept = slots // PIN_DIVISOR
        self._max_pages = num_pages // PIN_DIVISOR
        self._pinned: dict[str, AdapterRef] = {}
        self._failed: set[str] = set()
        self._absent: set[str] = set()
        """Neither on the device nor on their way, and can be loaded."""
        self._missing: list[AdapterRef] | None = None
        """The first of these, while none has come or gone."""
        self._num_kept = 0
        self._kept_pages = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._pinned

    def add(self, ref: AdapterRef, *, is_here: bool) -> None:
        """Pin an adapter; if its load failed before, it is tried again.

        Args:
            ref: The adapter.
            is_here: Whether it is on the device or on its way.
        """
        self._pinned.setdefault(ref.digest, ref)
        self._failed.discard(ref.digest)
        if not is_here:
            self.left(ref.digest)

    def discard(self, digest: str) -> None:
        """Unpin an adapter."""
        self.entered(digest)
        self._pinned.pop(digest, None)
        self._failed.discard(digest)

    def entered(self, digest: str) -> None:
        """Note that an adapter is on its way."""
        if digest in self._absent:
            self._absent.remove(digest)
            self._missing = None

    def left(self, digest: str) -> None:
        """Note that an adapter is neither on the device nor on its way any more."""
        if digest in self._pinned and digest not in self._failed:
            self._absent.add(digest)
            self._missing = None

    def note_load(self, digest: str, succeeded: bool) -> None:
        """Remember that a pinned adapter cannot be loaded, or can: one that cannot is not brought in for its pin."""
        if succeeded or digest not in self._pinned:
            self._failed.discard(digest)
        else:
            self._failed.add(digest)

    def apply(self, entries: Entries) -> list[Entry]:
        """Decide which pinned adapters on the device are kept.

        Returns:
            Those for which that has changed.
        """
        self._num_kept = self._kept_pages = 0
        changed = []
        for digest in self._pinned:
            entry = entries.on_device(digest)
            if entry is None:
                continue
            is_kept = self.has_share(entry.num_pages)
            if is_kept:
                self._num_kept += 1
                self._kept_pages += entry.num_pages
            if entry.is_kept != is_kept or entry.evict_last == is_kept:
                entry.is_kept = is_kept
                entry.evict_last = not is_kept
                changed.append(entry)
        return changed

    def has_share(self, num_pages: int) -> bool:
        """Whether one more adapter of `num_pages` pages would be kept beside those that are kept now."""
        return self._num_kept < self._max_kept and self._kept_pages + num_pages <= self._max_pages

    def missing(self) -> Sequence[AdapterRef]:
        """The first pinned adapters that are neither on the device nor on their way, and can be loaded."""
        if self._missing is None:
            absent = (ref for digest, ref in self._pinned.items() if digest in self._absent)
            self._missing = list(islice(absent, LOOK_AHEAD))
        return self._missing
