"""The adapters that are on the device or on their way there, as the evictor sees them, and what is remembered of them.

An adapter's size, its use and the times of its loads are remembered also while it is in no memory.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

from manylora.adapters.ref import AdapterRef, AdapterTier
from manylora.adapters.residency.images import HostImage
from manylora.adapters.residency.load_threads import LAST_TURN, LoadJob
from manylora.adapters.residency.slots import SlotLease
from manylora.errors import ManyloraError, PageAccountingError
from manylora.memory.eviction import Evictable, UseCount
from manylora.memory.pool import PageKind

if TYPE_CHECKING:
    from manylora.adapters.residency.residency import Residency

NUM_LOADS = 32
"""The last so many loads of each adapter count in its load times."""
PERCENT = 95
"""Share of the last loads that `LoadTimes.p95_s` covers."""


class LoadTimes:
    """Seconds of loads that succeeded.

    Args:
        limit: How many of the last loads count for `p95_s`.
    """

    __slots__ = ("_last", "_p95_s", "count")

    def __init__(self, limit: int) -> None:
        self._last: deque[float] = deque(maxlen=limit)
        self._p95_s: float | None = None
        """None if a load was noted since it was last computed."""
        self.count = 0
        """All loads that were noted."""

    def note(self, seconds: float) -> None:
        """Count a load."""
        self.count += 1
        self._last.append(seconds)
        self._p95_s = None

    @property
    def p95_s(self) -> float | None:
        """The smallest of the last times that 95 % of them do not exceed; None before the first."""
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
    """Requests that ran with it and are done, since it was last read from the store."""
    loads: LoadTimes = field(default_factory=lambda: LoadTimes(NUM_LOADS))
    """Its loads onto the device."""


class KnownAdapters:
    """The last `limit` adapters that were asked for. One that was forgotten starts from zero when it comes back.

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


class LoadFailure(NamedTuple):
    """An adapter that could not be loaded; reported once."""

    digest: str
    error: ManyloraError


class Stage(Enum):
    """How far an adapter is on its way to the device."""

    QUEUED = "queued"
    LOADING = "loading"
    PLACING = "placing"
    COPYING = "copying"
    DEVICE = "device"


@dataclass(eq=False, kw_only=True)
class Entry(Evictable):
    """An adapter with its pages, slot and references. Changed by the residency alone."""

    ref: AdapterRef
    known: KnownAdapter
    entered_s: float
    residency: Residency
    kind: PageKind = "adapter"
    stage: Stage = Stage.QUEUED
    origin: AdapterTier = "stored"
    holds: int = 0
    running: int = 0
    held_pages: int = 0
    """What it counts in the residency's sum of pages that only wait for requests."""
    turn: int = LAST_TURN
    """When it is needed, the least first."""
    job: LoadJob | None = None
    image: HostImage | None = None
    """In use from LOADING's end until it is on the device."""
    lease: SlotLease | None = None
    """Its slot, while it has pages."""
    comes_unasked: bool = False
    """It was started because it is pinned or was just pushed; it is loaded even if no request wants it."""
    is_kept: bool = False
    """Its pin keeps it on the device; pinned ones beyond the share that pins may keep have `evict_last`."""
    is_counted: bool = False
    """The first use that follows was counted when it arrived."""
    is_forgotten: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether it is on the device and no request waits for it or runs with it."""
        return self.stage is Stage.DEVICE and not self.holds and not self.running

    @property
    def tier(self) -> AdapterTier | Literal["loading"]:
        """Where it is, as operators see it."""
        if self.stage is Stage.DEVICE:
            return "device"
        return "loading" if self.stage in (Stage.LOADING, Stage.COPYING) else "host"

    @property
    def slot(self) -> int:
        """Its adapter slot; -1 without pages."""
        return -1 if self.lease is None else self.lease.slot

    def reload_cost(self) -> tuple[float, int]:
        """Seconds to have it and its cached prefixes again, and their pages."""
        return self.residency.reload_cost(self)

    def evict(self) -> None:
        """Leave the device, its cached prefixes with it."""
        self.residency.evict(self)


class Entries(dict[str, Entry]):
    """All entries by digest, in the order in which they came; also by stage.

    Changed by its methods alone. A step looks at the entries under way, not at all of them: most are on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_stage: dict[Stage, dict[str, Entry]] = {stage: {} for stage in Stage}
        self.held_pages = 0
        """Device pages of adapters that have holds and do not run."""

    def on_device(self, digest: str) -> Entry | None:
        """The entry of an adapter that is on the device."""
        return self.by_stage[Stage.DEVICE].get(digest)

    def coming(self) -> list[Entry]:
        """Those that are not on the device yet."""
        return [
            entry
            for stage, those in self.by_stage.items()
            if stage is not Stage.DEVICE
            for entry in those.values()
        ]

    def in_turn(self, stage: Stage) -> list[Entry]:
        """Those of one stage, the one that is needed first at the beginning."""
        return sorted(self.by_stage[stage].values(), key=lambda entry: entry.turn)

    def num_under_way(self) -> Counter[AdapterTier]:
        """How many are loaded or wait for pages, by where they come from."""
        under_way = [*self.by_stage[Stage.LOADING].values(), *self.by_stage[Stage.PLACING].values()]
        return Counter(entry.origin for entry in under_way)

    def add(self, entry: Entry) -> None:
        """Take in an entry."""
        self[entry.ref.digest] = self.by_stage[entry.stage][entry.ref.digest] = entry

    def remove(self, entry: Entry) -> None:
        """Forget an entry without holds."""
        del self[entry.ref.digest]
        del self.by_stage[entry.stage][entry.ref.digest]

    def advance(self, entry: Entry, stage: Stage) -> None:
        """Move an entry to another stage."""
        del self.by_stage[entry.stage][entry.ref.digest]
        entry.stage = stage
        self.by_stage[stage][entry.ref.digest] = entry

    def set_holds(self, entry: Entry, holds: int) -> None:
        """Change how many requests wait for an entry."""
        entry.holds = holds
        self.count_held(entry)

    def count_held(self, entry: Entry) -> None:
        """Keep the sum over entries with holds, after a change of this entry's holds, requests or pages."""
        num_pages = entry.num_pages if entry.holds and not entry.running else 0
        self.held_pages += num_pages - entry.held_pages
        entry.held_pages = num_pages

    def check(self) -> None:
        """Verify stages and sums.

        Raises:
            PageAccountingError: They do not agree with the entries.
        """
        staged = {
            digest: entry for those in self.by_stage.values() for digest, entry in those.items()
        }
        if staged != self or any(
            entry.stage is not stage
            for stage, those in self.by_stage.items()
            for entry in those.values()
        ):
            raise PageAccountingError("adapters are listed under stages that they are not in")
        waiting = sum(
            entry.num_pages for entry in self.values() if entry.holds and not entry.running
        )
        if self.held_pages != waiting:
            raise PageAccountingError(
                f"{self.held_pages} pages are said to wait for requests, adapters have {waiting}"
            )
