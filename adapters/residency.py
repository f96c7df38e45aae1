"""Which adapters are on the device, in host memory, or on their way; their slots, pages and references.

Loader threads read blobs, pack images and copy pages; whatever the engine can see changes only in calls from the
engine's thread, mostly in `tick`. Knows digests, never names, tenants or requests.

    QUEUED --load--> LOADING --image--> PLACING --pages and slot--> COPYING --table row--> DEVICE --evict--> host

An adapter is idle on the device when no request runs with it and none that waits holds it. Only idle adapters are
evicted, least recently used first and pinned ones last. Pins keep a share of slots and pages at most, so that nobody's
pins keep everybody else out. A request that waits has a hold, never pages of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from weft.adapters.adapter_slots import AdapterSlots
from weft.adapters.adapter_slots import SlotLease as SlotLease
from weft.adapters.host_images import HostImage, HostImages
from weft.adapters.load_queue import LoadExecutor, LoadJob, LoadQueue
from weft.adapters.loading import AdapterLoader, BlobReader
from weft.adapters.ref import AdapterRef
from weft.adapters.resident import ResidentAdapter
from weft.adapters.tables import AdapterTables
from weft.errors import EngineError, PageAccountingError, WeftError
from weft.memory.arena import Arena
from weft.memory.copies import PageCopier
from weft.memory.host_slab import HostSlab
from weft.memory.pool import PagePool

HOLD_SHARE = 4
"""Adapters that only wait for their requests may have one in so many pages of the pool; one adapter always may."""
PIN_SHARE = 2
"""Pinned adapters may keep one in so many slots, and one in so many pages of the pool, for themselves."""
MAX_UNDER_WAY = 16
"""Adapters that are being loaded or have an image and no pages yet; it bounds the host memory that this takes."""
MAX_PAGE_COUNTS = 1 << 16
"""Adapters whose size is remembered after they left memory."""


class LoadFailure(NamedTuple):
    """An adapter that could not be loaded, told once."""

    digest: str
    error: WeftError


class _Stage(Enum):
    QUEUED = "queued"
    LOADING = "loading"
    PLACING = "placing"
    COPYING = "copying"
    DEVICE = "device"


@dataclass(eq=False, kw_only=True)
class _Entry:
    """An adapter that is on the device or on its way there."""

    ref: AdapterRef
    wanted_s: float
    stage: _Stage = _Stage.QUEUED
    origin: Literal["stored", "host"] = "stored"
    holds: int = 0
    running: int = 0
    job: LoadJob | None = None
    image: HostImage | None = None
    """In use from LOADING's end until it is on the device."""
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    last_step: int = 0
    """The last step that may have read its pages."""
    last_use: int = 0
    is_forgotten: bool = False


class Residency:
    """The adapters' places, driven by the engine's thread. All methods are called from that thread.

    Args:
        blobs: Where weights are stored.
        pool: Pages, shared with the KV cache.
        arena: The pages' memory.
        slab: Host memory of page images.
        tables: Where kernels find the weights.
        executor: Runs loads; closed by `close`.
        clock: Monotonic seconds.
        notify: Called by a loader thread when `tick` has something to take in.
    """

    def __init__(  # noqa: PLR0913 - it joins all parts of the adapters' memory
        self,
        blobs: BlobReader,
        pool: PagePool,
        arena: Arena,
        slab: HostSlab,
        tables: AdapterTables,
        executor: LoadExecutor,
        *,
        clock: Callable[[], float] = time.monotonic,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self._pool = pool
        self._tables = tables
        self._clock = clock
        self._images = HostImages(slab)
        self._copier = PageCopier(arena)
        self._queue = LoadQueue(executor, notify)
        self._slots = AdapterSlots(tables.slots)
        max_pages = pool.capacity - arena.geometry.num_groups
        self._loader = AdapterLoader(
            blobs, self._images, tables.base, arena.geometry, arena.dtype, tables.max_rank, max_pages
        )
        self._entries: dict[str, _Entry] = {}
        """In the order in which they were first wanted."""
        self._pinned: dict[str, None] = {}
        """In the order of pinning, the order in which they get their share."""
        self._page_counts: dict[str, int] = {}
        self._uses = 0
        self._loads: Counter[str] = Counter()
        self.load_seconds = 0.0
        """From the first hold to the device, summed over all loads."""
        self.evictions = 0
        """Adapters evicted from the device since start."""

    @property
    def loads(self) -> dict[str, int]:
        """Loads since start by `from>to:result`, for example `stored>device:ok` or `host>device:failed`."""
        return dict(self._loads)

    def state(self, digest: str) -> Literal["device", "host", "stored"]:
        """Where the adapter can be had from now."""
        entry = self._entries.get(digest)
        if entry is not None and entry.stage is _Stage.DEVICE:
            return "device"
        return "host" if digest in self._images or (entry is not None and entry.image is not None) else "stored"

    def waiting_reason(self, digest: str) -> Literal["LOADING", "NO_ROOM"]:
        """Why a wanted adapter is not on the device: it is on its way, or pages or a slot are lacking."""
        entry = self._entries.get(digest)
        return "LOADING" if entry is not None and entry.stage in (_Stage.LOADING, _Stage.COPYING) else "NO_ROOM"

    def pages_needed(self, ref: AdapterRef) -> int | None:
        """Pages of the adapter on the device; None before it was first loaded."""
        return self._page_counts.get(ref.digest)

    def want(self, ref: AdapterRef) -> None:
        """Take a hold on an adapter for a request that waits, and start to bring it to the device if need be."""
        entry = self._entries.setdefault(ref.digest, _Entry(ref=ref, wanted_s=self._clock()))
        entry.holds += 1
        entry.is_forgotten = False
        if entry.stage is _Stage.QUEUED and self._num_under_way() < MAX_UNDER_WAY:
            self._start(entry)

    def unwant(self, digest: str) -> None:
        """Drop one hold. Nothing happens without one: it may have gone with a failed load or `drop_holds`."""
        entry = self._entries.get(digest)
        if entry is not None and entry.holds > 0:
            entry.holds -= 1
            self._settle(entry)

    def drop_holds(self, keep: str | None = None) -> None:
        """Drop all holds but those on the adapter `keep`; those who wait take new ones with `want`."""
        for entry in list(self._entries.values()):
            if entry.ref.digest != keep and entry.holds:
                entry.holds = 0
                self._settle(entry)

    def acquire(self, digest: str) -> SlotLease | None:
        """Take a running reference, or None while the adapter is not on the device."""
        entry = self._entries.get(digest)
        if entry is None or entry.stage is not _Stage.DEVICE:
            return None
        entry.running += 1
        self._touch(entry)
        return self._slots.lease(entry.slot)

    def release(self, digest: str, last_step: int = 0) -> None:
        """Give a running reference back.

        Args:
            digest: The adapter.
            last_step: The last step that may still read its pages; 0 when none is under way.

        Raises:
            EngineError: There is none.
        """
        entry = self._entries.get(digest)
        if entry is None or entry.running == 0:
            raise EngineError(f"adapter {digest} was released more often than acquired")
        entry.running -= 1
        entry.last_step = max(entry.last_step, last_step)
        self._touch(entry)
        self._settle(entry)

    def check_slot(self, slot: int, generation: int, digest: str) -> None:
        """Verify that a slot still is what a lease says.

        Raises:
            StaleSlotError: The slot was reused or freed, or never held that adapter.
        """
        self._slots.check_lease(SlotLease(slot, generation, digest))

    def pin(self, digest: str, pinned: bool) -> None:
        """Set whether the adapter stays on the device once it is there, as far as the share of pins goes."""
        if pinned:
            self._pinned.setdefault(digest)
        else:
            self._pinned.pop(digest, None)

    def forget(self, digest: str) -> None:
        """Let go of a deleted adapter: at once where nobody uses it, otherwise when the last request is done."""
        self._pinned.pop(digest, None)
        self._page_counts.pop(digest, None)
        self._images.drop(digest)
        entry = self._entries.get(digest)
        if entry is not None:
            entry.is_forgotten = True
            self._settle(entry)

    def evict_idle(self, num_pages: int) -> int:
        """Evict idle adapters, least recently used first, until `num_pages` pages were freed or none is left.

        Returns:
            Pages freed; all can be allocated now.
        """
        freed = 0
        for entry in self._idle():
            if freed >= num_pages:
                break
            freed += len(entry.pages)
            self._evict(entry)
        return freed

    def tick(self, step: int) -> list[LoadFailure]:
        """Take in what the loader threads did, and give pages to adapters that wait for them.

        Args:
            step: The last completed step.

        Returns:
            Adapters that could not be loaded, with their holds gone; a later `want` tries again.
        """
        self._pool.complete(step)
        self._slots.complete(self._pool.completed_step)
        failures: list[LoadFailure] = []
        for job in self._queue.take_done():
            failure = self._take_in(job)
            if failure is not None:
                failures.append(failure)
        for entry in list(self._entries.values()):
            if entry.stage is _Stage.PLACING:
                self._place(entry)
        self._start_queued()
        return failures

    def residents(self) -> list[ResidentAdapter]:
        """Adapters in memory or on their way there, those of the device first."""
        page_counts = self._images.page_counts()
        found = []
        for digest, entry in sorted(self._entries.items(), key=lambda item: item[1].stage is not _Stage.DEVICE):
            if entry.stage is _Stage.QUEUED:
                continue
            on_the_way = entry.stage in (_Stage.LOADING, _Stage.COPYING)
            tier: Literal["device", "host", "loading"] = "loading" if on_the_way else "host"
            found.append(
                ResidentAdapter(
                    digest=digest,
                    tier="device" if entry.stage is _Stage.DEVICE else tier,
                    pages=self._page_counts.get(digest) or len(entry.pages),
                    running=entry.running,
                    pinned=digest in self._pinned,
                )
            )
        found.extend(
            ResidentAdapter(digest=digest, tier="host", pages=pages, running=0, pinned=digest in self._pinned)
            for digest, pages in page_counts.items()
            if digest not in self._entries or self._entries[digest].stage is _Stage.QUEUED
        )
        return found

    def check(self) -> None:
        """Verify that pages, slots and host pages are those of the adapters.

        Raises:
            PageAccountingError: Pages or slots were lost or doubled.
        """
        pages = [page for entry in self._entries.values() for page in entry.pages]
        if len(set(pages)) != len(pages) or len(pages) != self._pool.counts()["adapter"]:
            raise PageAccountingError(f"adapters hold {len(pages)} pages, the pool says {self._pool.counts()}")
        self._slots.check({entry.slot: digest for digest, entry in self._entries.items() if entry.slot >= 0})
        self._images.check()
        for digest, entry in self._entries.items():
            on_device = entry.stage is _Stage.DEVICE
            if (entry.slot >= 0) != bool(entry.pages) or (entry.running and not on_device) or entry.holds < 0:
                raise PageAccountingError(f"adapter {digest} is {entry.stage.name} with what that does not allow")

    def close(self) -> None:
        """Drop loads that wait, and return when those that run are done."""
        self._queue.close()

    def _num_under_way(self) -> int:
        return sum(entry.stage in (_Stage.LOADING, _Stage.PLACING) for entry in self._entries.values())

    def _start_queued(self) -> None:
        room = MAX_UNDER_WAY - self._num_under_way()
        queued = [entry for entry in self._entries.values() if entry.stage is _Stage.QUEUED]
        for entry in queued[: max(room, 0)]:
            self._start(entry)

    def _start(self, entry: _Entry) -> None:
        ref = entry.ref
        entry.image = self._images.hold(ref.digest)
        if entry.image is not None:
            entry.origin, entry.stage = "host", _Stage.PLACING
            self._place(entry)
            return
        entry.origin, entry.stage = "stored", _Stage.LOADING
        entry.job = LoadJob(ref.digest, lambda: self._loader.load(ref))
        self._queue.submit(entry.job)

    def _take_in(self, job: LoadJob) -> LoadFailure | None:
        entry = self._entries[job.digest]
        entry.job = None
        if job.image is None:
            return self._fail(entry, job.error)
        if entry.stage is _Stage.LOADING:
            self._images.add(job.image, keep=not entry.is_forgotten)
            entry.image = job.image
            entry.stage = _Stage.PLACING
            self._remember_pages(job.digest, len(job.image.pages))
        else:
            self._arrive(entry, job.image)
        self._settle(entry)
        return None

    def _fail(self, entry: _Entry, error: WeftError | None) -> LoadFailure | None:
        self._loads[f"{entry.origin}>device:failed"] += 1
        was_wanted = entry.holds > 0
        entry.holds = 0
        self._remove(entry)
        return LoadFailure(entry.ref.digest, error) if was_wanted and error is not None else None

    def _place(self, entry: _Entry) -> None:
        """Start the copy to the device if there is room for all of it."""
        image = entry.image
        if image is None or not self._may_hold(len(image.pages)) or not self._make_room(len(image.pages)):
            return
        pages = self._pool.allocate(len(image.pages), "adapter")
        slot = self._slots.take(entry.ref.digest) if pages is not None else None
        if pages is None or slot is None:
            raise PageAccountingError("room that was made for an adapter is not there")
        entry.pages, entry.slot, entry.stage = pages, slot, _Stage.COPYING
        fence = self._copier.fence()

        def copy() -> HostImage:
            self._copier.copy(image.pages, pages, fence)
            return image

        entry.job = LoadJob(entry.ref.digest, copy)
        self._queue.submit(entry.job, urgent=True)

    def _arrive(self, entry: _Entry, image: HostImage) -> None:
        self._tables.write(entry.slot, image.layout, entry.pages, image.ranks, image.scalings)
        entry.stage = _Stage.DEVICE
        entry.image = None
        self._images.release(image)
        self._touch(entry)
        self._loads[f"{entry.origin}>device:ok"] += 1
        self.load_seconds += self._clock() - entry.wanted_s

    def _may_hold(self, num_pages: int) -> bool:
        """Whether an adapter of so many pages may join those that only wait for their requests."""
        held = sum(len(entry.pages) for entry in self._entries.values() if entry.holds and not entry.running)
        return held == 0 or held + num_pages <= self._pool.capacity // HOLD_SHARE

    def _make_room(self, num_pages: int) -> bool:
        """Evict idle adapters so that pages and a slot are free; nothing is evicted where that would not do."""
        lacking = num_pages - self._pool.num_free
        lacks_slot = self._slots.num_free == 0
        victims: list[_Entry] = []
        idle = iter(self._idle())
        while lacking > 0 or lacks_slot:
            victim = next(idle, None)
            if victim is None:
                return False
            victims.append(victim)
            lacking -= len(victim.pages)
            lacks_slot = False
        for victim in victims:
            self._evict(victim)
        return True

    def _idle(self) -> list[_Entry]:
        """Adapters whose pages can be had at once, in the order of eviction."""
        kept = self._kept_by_pins()
        idle = [
            entry
            for entry in self._entries.values()
            if entry.stage is _Stage.DEVICE
            and not entry.running
            and not entry.holds
            and entry.ref.digest not in kept
            and entry.last_step <= self._pool.completed_step
        ]
        return sorted(idle, key=lambda entry: (entry.ref.digest in self._pinned, entry.last_use))

    def _kept_by_pins(self) -> set[str]:
        """Pinned adapters that stay: those pinned first, as many as the share of slots and pages holds."""
        slots, pages = self._tables.slots // PIN_SHARE, self._pool.capacity // PIN_SHARE
        kept: set[str] = set()
        for digest in self._pinned:
            entry = self._entries.get(digest)
            if entry is not None and entry.stage is _Stage.DEVICE and len(kept) < slots and len(entry.pages) <= pages:
                kept.add(digest)
                pages -= len(entry.pages)
        return kept

    def _settle(self, entry: _Entry) -> None:
        """Let go of what an adapter has and nobody needs any more."""
        if entry.holds or entry.running:
            return
        if entry.stage is _Stage.DEVICE:
            if entry.is_forgotten:
                self._evict(entry)
        elif entry.stage in (_Stage.QUEUED, _Stage.PLACING) or (
            entry.stage is _Stage.LOADING and entry.job is not None and self._queue.cancel(entry.job)
        ):
            self._remove(entry)

    def _evict(self, entry: _Entry) -> None:
        self.evictions += 1
        self._remove(entry)

    def _remove(self, entry: _Entry) -> None:
        """Forget an entry, with its pages, slot and image given back."""
        del self._entries[entry.ref.digest]
        if entry.image is not None:
            self._images.release(entry.image)
        if entry.slot >= 0:
            self._pool.free(entry.pages, entry.last_step)
            self._slots.give_back(entry.slot, entry.last_step)

    def _touch(self, entry: _Entry) -> None:
        self._uses += 1
        entry.last_use = self._uses

    def _remember_pages(self, digest: str, count: int) -> None:
        self._page_counts[digest] = count
        if len(self._page_counts) > MAX_PAGE_COUNTS:
            del self._page_counts[next(iter(self._page_counts))]
