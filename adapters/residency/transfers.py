"""Transfers of adapters: from the store to host memory, from there to the device, and off the device.

Loader threads read blobs and pack images, another thread copies pages to the device. What they did is taken in by the
engine's thread. Knows neither what an adapter is wanted for nor pins; the residency decides that.

    QUEUED --load--> LOADING --image--> PLACING --pages and slot--> COPYING --table row--> DEVICE
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

from manylora.adapters.lora.step import AdapterTables
from manylora.adapters.ref import AdapterTier
from manylora.adapters.residency.entry import (
    AdapterEntries,
    AdapterEntry,
    AdapterSlots,
    LoadTimes,
    Stage,
)
from manylora.adapters.residency.images import HostImage
from manylora.adapters.residency.load_threads import LoadJob, LoadQueue
from manylora.adapters.residency.loader import AdapterLoader
from manylora.errors import ManyloraError, PageAccountingError
from manylora.memory.arena import PageCopier
from manylora.memory.eviction import Evictable, Evictor
from manylora.memory.pool import PagePool

HOLD_DIVISOR = 4
"""Adapters that only wait for requests may have 1 / HOLD_DIVISOR of the pool's pages. One adapter always may."""
MAX_UNDER_WAY = 16
"""Largest number of adapters from the store that are loading or have an image but no pages yet. It bounds their host
memory. Adapters from host memory have an equal number of their own, so that no copy waits behind loads."""
NUM_LOADS = 256
"""Number of last loads that count for `load_p95_s`, for the store and for host memory each."""


@dataclass(eq=False, repr=False)
class Transfers:
    """Brings adapters to the device, and frees what they had. All methods are called from the engine's thread."""

    loader: AdapterLoader
    """Makes page images of stored adapters."""
    copier: PageCopier
    """Copies page images to the device."""
    pool: PagePool
    """Pages, shared with the KV cache."""
    tables: AdapterTables
    """Places of the weights, for the kernels."""
    evictor: Evictor
    """Makes room."""
    _: KW_ONLY
    load_queue: LoadQueue
    """Runs loads, and tells when there is something to take in. `close` closes it."""
    copy_queue: LoadQueue
    """Runs copies beside the loads, so that no copy waits behind a load. `close` closes it."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""

    def __post_init__(self) -> None:
        self.images = self.loader.images
        """Page images in host memory."""
        self.slots = AdapterSlots(self.tables.slots)
        self.entries = AdapterEntries()
        self.on_end: Callable[[AdapterEntry, ManyloraError | None], None]
        """Called when a load or a copy has ended, with its error if it failed; set by the residency."""
        self.copied_pages = 0
        """Pages that the engine's thread copied since the last tick."""
        self.loads: Counter[str] = Counter()
        """Loads since start by `from>to:result`, for example `stored>device:ok` or `host>device:failed`."""
        self._load_times: dict[str, LoadTimes] = {}
        self.load_seconds = 0.0
        """Sum of all load times, each from the first hold to the device."""
        self.reserve_pages = 0
        """Free or evictable pages that are left to running requests when an adapter gets its pages."""

    @property
    def load_p95_s(self) -> dict[str, float]:
        """95th percentile of the last 256 load times in seconds, by `from>to` of loads that occurred."""
        return {
            path: times.p95_s for path, times in self._load_times.items() if times.p95_s is not None
        }

    @property
    def is_copying(self) -> bool:
        """True while an adapter is being copied to the device: its pages cannot be used or freed yet."""
        return bool(self.entries.by_stage[Stage.COPYING])

    @property
    def lacks_slot(self) -> bool:
        """True if no slot is free, cooling down, or owned by an adapter that can go."""
        on_device = self.entries.by_stage[Stage.DEVICE].values()
        return self.slots.all_taken and not any(entry in self.evictor for entry in on_device)

    def start_queued(self, queued: Sequence[AdapterEntry]) -> None:
        """Start those of these entries, in their order, for which there is room among those under way."""
        num_under_way = self.entries.num_under_way()
        for entry in queued:
            origin: AdapterTier = "host" if entry.ref.digest in self.images else "stored"
            if num_under_way[origin] < MAX_UNDER_WAY:
                num_under_way[origin] += 1
                self.start(entry)

    def start(self, entry: AdapterEntry, *, is_paced: bool = True) -> None:
        """Start to bring a queued adapter to the device; its load gives way to steps if it is paced."""
        ref = entry.ref
        image = self.images.hold(ref.digest)
        if image is not None:
            entry.origin = "host"
            self._has_image(entry, image)
            self.place(entry)
            return
        entry.origin = "stored"
        self.entries.advance(entry, Stage.LOADING)
        entry.known.num_runs = 0
        load = partial(self.loader.load, ref, is_paced=is_paced)
        entry.job = LoadJob(ref.digest, load, turn=entry.turn)
        self.load_queue.submit(entry.job)

    def place(self, entry: AdapterEntry) -> None:
        """Start the copy to the device if there is room for the whole adapter."""
        image = entry.image
        if image is None or (entry.holds and not self._may_hold(len(image.pages))):
            return
        if not self._make_room(len(image.pages)):
            return
        lease = self.slots.take(entry.ref.digest)
        pages = (
            self.pool.allocate(len(image.pages), "adapter", lease.slot)
            if lease is not None
            else None
        )
        if pages is None:
            raise PageAccountingError("the pages that were freed for an adapter are not free")
        entry.pages = pages
        entry.lease = lease
        self.entries.advance(entry, Stage.COPYING)
        self.entries.count_held(entry)
        is_small = self.copied_pages + len(pages) <= self.copier.pages_at_once
        fence = None if is_small else self.copier.fence()

        def copy() -> HostImage:
            if is_small:
                self.copier.copy_now(image.pages, pages)
            else:
                self.copier.copy(image.pages, pages, fence)
            return image

        entry.job = LoadJob(entry.ref.digest, copy, turn=entry.turn)
        if is_small:
            self.copied_pages += len(pages)
            self.copy_queue.run_now(entry.job)
            self.take_in(entry.job)
        else:
            self.copy_queue.submit(entry.job)

    def take_in(self, job: LoadJob) -> None:
        """Take the result of a load or a copy.

        Raises:
            Exception: It failed because the device is lost; see `is_device_lost`.
        """
        if job.device_error is not None:
            raise job.device_error
        entry = self.entries[job.digest]
        entry.job = None
        if job.image is None:
            self.loads[f"{entry.origin}>device:failed"] += 1
        elif entry.stage is Stage.LOADING:
            self.images.add(job.image, keep=not entry.is_forgotten)
            self._has_image(entry, job.image)
        else:
            self._arrive(entry, job.image)
        self.on_end(entry, job.error)

    def drop(self, entry: AdapterEntry) -> None:
        """Forget an entry, and free its pages, slot and use of an image."""
        self.entries.remove(entry)
        if entry.image is not None:
            self.images.release(entry.image)
        if entry.slot >= 0:
            self.pool.free(entry.pages, entry.last_step)
            self.slots.complete(self.pool.completed_step)
            self.slots.free(entry.slot, entry.last_step)

    def has_room(self, num_pages: int) -> bool:
        """True if an adapter of `num_pages` pages has room beside everything that is in use."""
        return self.evictor.num_available - num_pages >= self.reserve_pages and (
            self.slots.num_free > 0 or self._slot_victim() is not None
        )

    def close(self) -> None:
        """Drop waiting work, and return when running work is done."""
        self.load_queue.close()
        self.copy_queue.close()

    def _has_image(self, entry: AdapterEntry, image: HostImage) -> None:
        entry.image = image
        entry.known.num_pages = len(image.pages)
        self.entries.advance(entry, Stage.PLACING)

    def _arrive(self, entry: AdapterEntry, image: HostImage) -> None:
        self.tables.write(entry.slot, image.layout, entry.pages, image.ranks, image.scalings)
        self.entries.advance(entry, Stage.DEVICE)
        entry.image = None
        self.images.release(image)
        self.evictor.used(entry)
        entry.is_counted = True
        self.loads[f"{entry.origin}>device:ok"] += 1
        seconds = self.clock() - entry.entered_s
        self.load_seconds += seconds
        entry.known.loads.note(seconds)
        self._load_times.setdefault(f"{entry.origin}>device", LoadTimes(NUM_LOADS)).note(seconds)

    def _may_hold(self, num_pages: int) -> bool:
        """True if an adapter of `num_pages` pages may join those that only wait for their requests."""
        held_pages = self.entries.held_pages
        return held_pages == 0 or held_pages + num_pages <= self.pool.capacity // HOLD_DIVISOR

    def _make_room(self, num_pages: int) -> bool:
        """Get pages and a slot free for one adapter. If eviction cannot free enough, nothing is evicted."""
        if self.evictor.num_available - num_pages < self.reserve_pages:
            return False
        self.slots.complete(self.pool.completed_step)
        if self.slots.num_free:
            return self.evictor.make_room(num_pages)
        victim = self._slot_victim()
        return victim is not None and self.evictor.make_room(num_pages, victim)

    def _slot_victim(self) -> Evictable | None:
        """The adapter that goes first if only a slot is lacking."""
        return self.evictor.first(self.entries.by_stage[Stage.DEVICE].values())
