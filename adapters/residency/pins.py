"""Adapters that are pinned to the device, and the choice of those that are kept there.

Pins keep at most a share of the slots and pages, so one tenant's pins cannot keep all others out. Adapters that were
pinned first have precedence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from manylora.adapters.ref import AdapterRef
from manylora.adapters.residency.entry import AdapterEntries, AdapterEntry

PIN_DIVISOR = 2
"""Pinned adapters may keep 1 / PIN_DIVISOR of the slots and of the pool's pages."""
LOOK_AHEAD = 64
"""Number of pinned adapters among which one to bring is chosen at a time."""


class Pins:
    """Pinned adapters in the order of pinning.

    Args:
        slots: Number of adapter slots.
        num_pages: Pages of the pool.
    """

    def __init__(self, slots: int, num_pages: int) -> None:
        self._max_kept = slots // PIN_DIVISOR
        self._max_pages = num_pages // PIN_DIVISOR
        self._pinned: dict[str, AdapterRef] = {}
        self._failed: set[str] = set()
        self.absent: set[str] = set()
        """Pinned adapters that are neither on the device nor on their way, and can be loaded."""
        self._missing: list[AdapterRef] | None = None
        """First absent adapters in the order of pinning; None after a change."""
        self._num_kept = 0
        self._kept_pages = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._pinned

    def add(self, ref: AdapterRef, *, is_here: bool) -> None:
        """Pin an adapter. A load that failed before is tried again.

        Args:
            ref: The adapter.
            is_here: True if it is on the device or on its way.
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
        if digest in self.absent:
            self.absent.remove(digest)
            self._missing = None

    def left(self, digest: str) -> None:
        """Note that an adapter is neither on the device nor on its way any more."""
        if digest in self._pinned and digest not in self._failed:
            self.absent.add(digest)
            self._missing = None

    def note_load(self, digest: str, succeeded: bool) -> None:
        """Remember if a pinned adapter can be loaded. If not, it is not brought in for its pin."""
        if succeeded or digest not in self._pinned:
            self._failed.discard(digest)
        else:
            self._failed.add(digest)

    def apply(self, entries: AdapterEntries) -> list[AdapterEntry]:
        """Decide which pinned adapters on the device are kept.

        Returns:
            Entries whose decision has changed.
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
        """True if one more adapter of `num_pages` pages could be kept beside those that are kept now."""
        return self._num_kept < self._max_kept and self._kept_pages + num_pages <= self._max_pages

    def missing(self) -> Sequence[AdapterRef]:
        """The first pinned adapters that are neither on the device nor on their way, and can be loaded."""
        if self._missing is None:
            absent = (ref for digest, ref in self._pinned.items() if digest in self.absent)
            self._missing = list(islice(absent, LOOK_AHEAD))
        return self._missing
