"""Adapters that are on the device or on their way there, as the evictor sees them, and what is remembered of others.

An adapter slot is a row of the adapter tables. Here are the adapter in each, and its generation.

The size, the uses and the load times of an adapter are remembered while it is in no memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from manylora.adapters.ref import AdapterRef, AdapterTier
from manylora.adapters.residency.images import HostImage
from manylora.adapters.residency.load_threads import LAST_TURN, LoadJob
from manylora.errors import ManyloraError, PageAccountingError, StaleSlotError
from manylora.memory.eviction import Evictable, UseCount
from manylora.memory.pool import PageKind, PagePool

NUM_LOADS = 32
"""Number of last loads of each adapter that count in its load times."""
PERCENT = 95
"""Share of the last loads that `LoadTimes.p95_s` covers."""


class SlotLease(NamedTuple):
    """An adapter slot in one generation."""

    slot: int
    generation: int
    digest: str


class AdapterSlots:
    """Hands out adapter slots. Each time a slot is taken, its generation goes up.

    Args:
        count: Number of slots.
    """

    def __init__(self, count: int) -> None:
        self._pool = PagePool(count, first_page=0)
        """Pool of the slots, which are handed out and quarantined like pages."""
        self.complete = self._pool.complete
        """Note that all steps up to one are complete."""
        self._generations = [0] * count
        self._leases: list[SlotLease | None] = [None] * count

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return self._pool.num_free

    @property
    def all_taken(self) -> bool:
        """True if no slot can be taken now or once a step is complete."""
        return not self._pool.num_free and not self._pool.num_quarantined

    def take(self, digest: str) -> SlotLease | None:
        """Take a slot for an adapter; None if none is free."""
        slots = self._pool.allocate(1, "adapter")
        if slots is None:
            return None
        (slot,) = slots
        self._generations[slot] += 1
        lease = self._leases[slot] = SlotLease(slot, self._generations[slot], digest)
        return lease

    def free(self, slot: int, last_step: int) -> None:
        """Free a slot; it can be taken again once `last_step` is complete.

        Raises:
            PageAccountingError: The slot is free.
        """
        self._pool.free([slot], last_step)
        self._leases[slot] = None

    def check_lease(self, lease: SlotLease) -> None:
        """Verify that a lease still holds.

        Raises:
            StaleSlotError: The slot was freed or reused since, or never had that adapter.
        """
        current = self._leases[lease.slot] if 0 <= lease.slot < len(self._leases) else None
        if current != lease:
            raise StaleSlotError(
                f"adapter slot {lease.slot} is {current or 'free'}, expected {lease}"
            )

    def check(self, owners: Mapping[int, str]) -> None:
        """Verify that exactly these slots are taken, by these adapters.

        Raises:
            PageAccountingError: If not, or if a slot is in two places.
        """
        self._pool.check()
        taken = {slot: lease.digest for slot, lease in enumerate(self._leases) if lease is not None}
        if taken != owners or len(taken) != self._pool.counts()["adapter"]:
            raise PageAccountingError(f"adapter slots: {len(taken)} taken, owners are {owners}")


class LoadTimes:
    """Seconds of loads that succeeded.

    Args:
        limit: Number of last loads that count for `p95_s`.
    """

    __slots__ = ("_last", "_p95_s", "count")

    def __init__(self, limit: int) -> None:
        self._last: deque[float] = deque(maxlen=limit)
        self._p95_s: float | None = None
        """Last result of `p95_s`; None if a load was noted since."""
        self.count = 0
        """Number of all noted loads."""

    def note(self, seconds: float) -> None:
        """Count a load."""
        self.count += 1
        self._last.append(seconds)
        self._p95_s = None

    @property
    def p95_s(self) -> float | None:
        """95th percentile of the last load times; None before the first load."""
        if self._p95_s is None and self._last:
            self._p95_s = sorted(self._last)[(PERCENT * len(self._last) + 99) // 100 - 1]
        return self._p95_s


@dataclass(slots=True, eq=False)
class KnownAdapter:
    """One adapter that was held or pinned at least once."""

    num_pages: int | None = None
    """Pages of its image; None before it was first loaded."""
    uses: UseCount = field(default_factory=UseCount)
    num_runs: int = 0
    """Requests that ran with it and ended since it was last read from the store."""
    loads: LoadTimes = field(default_factory=lambda: LoadTimes(NUM_LOADS))
    """Times of its loads to the device."""


class KnownAdapters:
    """The last `limit` adapters that were asked for. A forgotten adapter starts from zero when it comes back.

    Args:
        limit: Largest number of adapters.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[str, KnownAdapter] = {}
        """Known adapters, the last one asked for at the end."""

    def __getitem__(self, digest: str) -> KnownAdapter:
        known = self._known.pop(digest, None) or KnownAdapter()
        self._known[digest] = known
        if len(self._known) > self._limit:
            del self._known[next(iter(self._known))]
        return known

    def get(self, digest: str) -> KnownAdapter:
        """Knowledge of an adapter. Reading it does not count as asking for the adapter."""
        return self._known.get(digest) or KnownAdapter()

    def forget(self, digest: str) -> None:
        """Forget an adapter."""
        self._known.pop(digest, None)


class LoadFailure(NamedTuple):
    """An adapter that could not be loaded. It is reported once."""

    digest: str
    error: ManyloraError


class Stage(Enum):
    """Stage of an adapter on its way to the device."""

    QUEUED = "queued"
    LOADING = "loading"
    PLACING = "placing"
    COPYING = "copying"
    DEVICE = "device"


@dataclass(eq=False, kw_only=True)
class AdapterEntry(Evictable):
    """An adapter with its pages, slot and references. Changed by the residency alone."""

    ref: AdapterRef
    known: KnownAdapter
    entered_s: float
    kind: PageKind = "adapter"
    stage: Stage = Stage.QUEUED
    origin: AdapterTier = "stored"
    holds: int = 0
    running: int = 0
    held_pages: int = 0
    """Its pages in the sum `held_pages` of all entries."""
    turn: int = LAST_TURN
    """Place in the order of need; the smallest comes first."""
    job: LoadJob | None = None
    image: HostImage | None = None
    """Page image, in use from the end of LOADING until the adapter is on the device."""
    lease: SlotLease | None = None
    """Its slot while it has pages."""
    is_unrequested: bool = False
    """True if a pin or a push started its load, so that it is loaded even if no request wants it."""
    is_kept: bool = False
    """True if its pin keeps it on the device. Pinned adapters beyond the share of pins have `evict_last` instead."""
    is_counted: bool = False
    """True if its arrival was counted as the next use."""
    is_forgotten: bool = False

    @property
    def is_idle(self) -> bool:
        """True if it is on the device, and no request waits for it or runs with it."""
        return self.stage is Stage.DEVICE and not self.holds and not self.running

    @property
    def tier(self) -> AdapterTier | Literal["loading"]:
        """Its place, as operators see it."""
        if self.stage is Stage.DEVICE:
            return "device"
        return "loading" if self.stage in (Stage.LOADING, Stage.COPYING) else "host"

    @property
    def slot(self) -> int:
        """Its adapter slot; -1 without pages."""
        return -1 if self.lease is None else self.lease.slot


class AdapterEntries(dict[str, AdapterEntry]):
    """All entries by digest, in the order in which they came, and by stage.

    Only its methods change it. A step looks only at entries on their way, because most entries are on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_stage: dict[Stage, dict[str, AdapterEntry]] = {stage: {} for stage in Stage}
        self.held_pages = 0
        """Device pages of adapters that only wait: they have holds and do not run."""

    def on_device(self, digest: str) -> AdapterEntry | None:
        """The entry of an adapter that is on the device."""
        return self.by_stage[Stage.DEVICE].get(digest)

    def coming(self) -> list[AdapterEntry]:
        """Entries that are not on the device yet."""
        return [
            entry
            for stage, those in self.by_stage.items()
            if stage is not Stage.DEVICE
            for entry in those.values()
        ]

    def in_turn(self, stage: Stage) -> list[AdapterEntry]:
        """Entries of one stage, in the order of need."""
        return sorted(self.by_stage[stage].values(), key=lambda entry: entry.turn)

    def num_under_way(self) -> Counter[AdapterTier]:
        """Number of entries that are loading or wait for pages, by the memory that they come from."""
        under_way = [*self.by_stage[Stage.LOADING].values(), *self.by_stage[Stage.PLACING].values()]
        return Counter(entry.origin for entry in under_way)

    def add(self, entry: AdapterEntry) -> None:
        """Add an entry."""
        self[entry.ref.digest] = self.by_stage[entry.stage][entry.ref.digest] = entry

    def remove(self, entry: AdapterEntry) -> None:
        """Forget an entry without holds."""
        del self[entry.ref.digest]
        del self.by_stage[entry.stage][entry.ref.digest]

    def advance(self, entry: AdapterEntry, stage: Stage) -> None:
        """Move an entry to another stage."""
        del self.by_stage[entry.stage][entry.ref.digest]
        entry.stage = stage
        self.by_stage[stage][entry.ref.digest] = entry

    def set_holds(self, entry: AdapterEntry, holds: int) -> None:
        """Set the number of requests that wait for an entry."""
        entry.holds = holds
        self.count_held(entry)

    def count_held(self, entry: AdapterEntry) -> None:
        """Update `held_pages` after a change of this entry's holds, requests or pages."""
        num_pages = entry.num_pages if entry.holds and not entry.running else 0
        self.held_pages += num_pages - entry.held_pages
        entry.held_pages = num_pages

    def check(self) -> None:
        """Verify stages and sums.

        Raises:
            PageAccountingError: They disagree with the entries.
        """
        staged = {
            digest: entry for those in self.by_stage.values() for digest, entry in those.items()
        }
        if staged != self or any(
            entry.stage is not stage
            for stage, those in self.by_stage.items()
            for entry in those.values()
        ):
            raise PageAccountingError("adapters are listed under a stage that is not theirs")
        waiting = sum(
            entry.num_pages for entry in self.values() if entry.holds and not entry.running
        )
        if self.held_pages != waiting:
            raise PageAccountingError(
                f"{self.held_pages} pages are counted as waiting for requests, but adapters have {waiting}"
            )
