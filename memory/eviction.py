"""The evictor of everything that can be loaded or computed again: idle adapters and cached prefixes.

Knows the cost and the uses of an item, not its kind. Items in use are unknown here: the owner offers an item when its
last user is done, and withdraws it when the next one comes.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from manylora.errors import PageAccountingError
from manylora.memory.pool import PageKind, PagePool


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCosts:
    """Times to bring back what was evicted."""

    copy_s: float
    """Seconds to copy a page between host and device."""
    load_s: float
    """Seconds to bring a page of an adapter from the store to host memory: read, hash, check and pack."""
    token_s: float
    """Seconds to compute a token of a prompt together with others."""


HALF_LIFE_S = 120.0
"""Seconds in which the weight of a use halves."""
MIN_COMPACTION = 64
"""Number of withdrawn entries that the heap may always keep."""


class UseCount:
    """Recent uses of an item. A use counts 1 at first, and half as much after every `HALF_LIFE_S` seconds."""

    __slots__ = ("last_s", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.last_s = 0.0
        """Time of the last use, in seconds."""

    def note(self, now_s: float, weight: float = 1.0, at_least: float = 0.0) -> None:
        """Count a use. A weight of 0 notes only its time. The count becomes at least `at_least`."""
        self.value = max(
            weight + self.value * 0.5 ** ((now_s - self.last_s) / HALF_LIFE_S), at_least
        )
        self.last_s = now_s

    def lift(self, other: UseCount) -> None:
        """Raise the count and the time to at least those of another item, which cannot be used without this one."""
        self.value = max(self.value, other.value)
        self.last_s = max(self.last_s, other.last_s)


class EvictionOwner(Protocol):
    """Owner of items that may be evicted."""

    def reload_cost(self, item: Any, /) -> tuple[float, int]:  # noqa: ANN401 - each owner takes its own items
        """Seconds to bring an item back, and pages that its eviction frees; both include the items that go with it."""

    def evict(self, item: Any, /) -> None:  # noqa: ANN401
        """Free the pages of an item and everything that depends on them. Dependent items are withdrawn."""


@dataclass(eq=False, slots=True, kw_only=True)
class Evictable:
    """An item that may be evicted. Compared by identity."""

    owner: EvictionOwner
    kind: PageKind
    """Kind of its pages."""
    pages: list[int] = field(default_factory=list)
    """Pages that are freed when it is evicted."""
    depth: int = 0
    """Number of blocks before it. Among equal scores the deepest goes first."""
    last_step: int = 0
    """The last step that may read its pages."""
    evict_last: bool = False
    """True for an item that goes only when nothing else is left."""
    uses: UseCount = field(default_factory=UseCount)
    """Its recent uses."""

    @property
    def num_pages(self) -> int:
        """Number of its own pages."""
        return len(self.pages)


_HeapEntry = tuple[bool, float, int, int, Evictable]
"""Sort key and item: goes last, score, minus depth, ticket, item."""


class Evictor:
    """Keeps the items that can be evicted now, and evicts them. Not thread-safe: it belongs to the engine's thread.

    The order is greedy-dual-size-frequency (Cherkasova, 1998): the item goes first that takes the fewest seconds per
    page to bring back, weighted by use. The score of the last evicted item, the inflation, is added to the score of
    each later use, so an expensive item that is no longer used is evicted in the end.

    Args:
        pool: Pool that gets the pages back.
        clock: Monotonic seconds.
    """

    def __init__(self, pool: PagePool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._inflation = 0.0
        self._heap: list[_HeapEntry] = []
        self._offered: dict[int, tuple[_HeapEntry, int]] = {}
        """Entry and number of pages of each offered item, by the item's id. The entry keeps the item alive."""
        self._last_ticket = 0
        self.evictions: Counter[str] = Counter()
        """Evictions since start, by kind of page."""
        self.num_evictable = 0
        """Pages of all offered items."""

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted."""
        return self._pool.num_free + self.num_evictable

    def __contains__(self, item: Evictable) -> bool:
        return id(item) in self._offered

    def used(self, item: Evictable, weight: float = 1.0) -> None:
        """Count a use of an item. Its score changes the next time that it is offered."""
        item.uses.note(self._clock(), weight)

    def offer(self, item: Evictable) -> None:
        """Allow an item to be evicted. An item that is offered already gets a new score."""
        self.withdraw(item)
        self._last_ticket += 1
        cost_s, num_pages = item.owner.reload_cost(item)
        score = self._inflation + item.uses.value * cost_s / max(num_pages, 1)
        entry = (item.evict_last, score, -item.depth, self._last_ticket, item)
        self._offered[id(item)] = (entry, item.num_pages)
        self.num_evictable += item.num_pages
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._offered) + MIN_COMPACTION:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def withdraw(self, item: Evictable) -> None:
        """Keep an item from being evicted. Does nothing for an item that is not offered."""
        offer = self._offered.pop(id(item), None)
        if offer is not None:
            self.num_evictable -= offer[1]

    def take(self, item: Evictable) -> None:
        """Evict an item because an item goes that it depends on, or because its owner wants it."""
        self.withdraw(item)
        self.evictions[item.kind] += 1
        item.owner.evict(item)

    def first(self, items: Iterable[Evictable]) -> Evictable | None:
        """The item that goes first among these; None if none of them can go now."""
        known = (self._offered.get(id(item)) for item in items)
        entries = [
            offer[0] for offer in known if offer is not None and self._is_free_at_once(offer[0][4])
        ]
        return min(entries)[4] if entries else None

    def make_room(self, num_free: int, also: Evictable | None = None) -> bool:
        """Get `num_free` pages free. The items that are cheapest to bring back are evicted.

        Args:
            num_free: Pages.
            also: Result of `first`. It is always evicted, because the caller needs its slot.

        Returns:
            True if the pages are free; if not, nothing was evicted.
        """
        lacking = num_free - self._pool.num_free - (also.num_pages if also is not None else 0)
        victims = self._choose(lacking, also)
        if victims is None:
            return False
        if also is not None:
            self._evict(self._offered[id(also)][0])
        for index, entry in enumerate(victims):
            if self._pool.num_free >= num_free:  # dependent items went too, so enough is free
                for spared in victims[index:]:
                    heapq.heappush(self._heap, spared)
                break
            if entry[4] in self:  # if not, it went with an item before it
                self._evict(entry)
        return self._pool.num_free >= num_free

    def check(self) -> None:
        """Verify the count of evictable pages, and that each offered item has a place in the order.

        Raises:
            PageAccountingError: The count is not the sum over offered items, or an offered item has no place.
        """
        if sum(self._is_current(entry) for entry in self._heap) != len(self._offered):
            raise PageAccountingError(
                f"{len(self._offered)} items are offered for eviction, but not all have a place in the order"
            )
        offered = [(entry[4], pages) for entry, pages in self._offered.values()]
        if any(item.num_pages != pages for item, pages in offered):
            raise PageAccountingError(
                "an item that is offered for eviction has another number of pages than when it was offered"
            )
        if sum(pages for _, pages in offered) != self.num_evictable:
            raise PageAccountingError(
                f"{self.num_evictable} pages are counted as evictable, but offered are {offered}"
            )

    def _choose(self, lacking: int, also: Evictable | None) -> list[_HeapEntry] | None:
        """Take the entries that go off the heap; if they have too few pages, return None and take nothing."""
        if lacking > self.num_evictable:
            return None
        chosen: list[_HeapEntry] = []
        passed_over: list[_HeapEntry] = []
        while lacking > 0 and self._heap:
            entry = heapq.heappop(self._heap)
            if not self._is_current(entry):
                continue
            if entry[4] is also or not self._is_free_at_once(entry[4]):
                passed_over.append(entry)
                continue
            chosen.append(entry)
            lacking -= entry[4].num_pages
        for entry in passed_over if lacking <= 0 else passed_over + chosen:
            heapq.heappush(self._heap, entry)
        return chosen if lacking <= 0 else None

    def _evict(self, entry: _HeapEntry) -> None:
        self._inflation = max(self._inflation, entry[1])
        self.take(entry[4])

    def _is_current(self, entry: _HeapEntry) -> bool:
        offer = self._offered.get(id(entry[4]))
        return offer is not None and offer[0] is entry

    def _is_free_at_once(self, item: Evictable) -> bool:
        """True if no step may still read its pages, so they need no quarantine."""
        return item.last_step <= self._pool.completed_step
