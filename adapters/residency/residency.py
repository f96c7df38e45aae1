"""Places of the adapters: on the device, in host memory, or on their way; their slots, pages and references.

Loader threads read blobs and pack images, another thread copies pages to the device. State that the engine can see
changes only in calls from the engine's thread, mostly in `tick`. Knows digests, never names, tenants or requests.

    QUEUED --load--> LOADING --image--> PLACING --pages and slot--> COPYING --table row--> DEVICE --evict--> host

An adapter on the device is idle if no request runs with it and no waiting request holds it. Idle adapters are offered
to the evictor, except those that a pin keeps. A waiting request has a hold, never pages of its own. Keys and values
that were computed with an adapter leave the prefix cache with it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Literal

from manylora.adapters.lora.tables import AdapterTables
from manylora.adapters.ref import AdapterRef, AdapterTier, ResidentAdapter
from manylora.adapters.residency.entry import (
    AdapterEntries,
    AdapterEntry,
    KnownAdapters,
    LoadFailure,
    LoadTimes,
    Stage,
)
from manylora.adapters.residency.images import HostImage, HostImages
from manylora.adapters.residency.load_threads import LAST_TURN, LoadJob, LoadQueue
from manylora.adapters.residency.loader import AdapterLoader
from manylora.adapters.residency.pins import Pins
from manylora.adapters.residency.slots import AdapterSlots, SlotLease
from manylora.errors import EngineError, ManyloraError, PageAccountingError
from manylora.memory.arena import PageCopier
from manylora.memory.eviction import Evictable, Evictor, PageCosts
from manylora.memory.pool import PagePool
from manylora.memory.prefix_cache import PrefixCache

logger = logging.getLogger(__name__)

HOLD_DIVISOR = 4
"""Adapters that only wait for requests may have 1 / HOLD_DIVISOR of the pool's pages. One adapter always may."""
MAX_UNDER_WAY = 16
"""Largest number of adapters from the store that are loading or have an image but no pages yet. It bounds their host
memory. Adapters from host memory have an equal number of their own, so that no copy waits behind loads."""
NUM_LOADS = 256
"""Number of last loads that count for `load_p95_s`, for the store and for host memory each."""
MAX_KNOWN = 1 << 16
"""Number of adapters whose size and uses are remembered after they left memory."""


@dataclass(eq=False, repr=False)
class Residency:
    """Places of the adapters. All methods are called from the engine's thread."""

    loader: AdapterLoader
    """Makes page images of stored adapters."""
    copier: PageCopier
    """Copies page images to the device."""
    pool: PagePool
    """Pages, shared with the KV cache."""
    images: HostImages
    """Page images in host memory."""
    tables: AdapterTables
    """Places of the weights, for the kernels."""
    evictor: Evictor
    """Makes room; idle adapters are offered to it."""
    costs: PageCosts
    """Times to bring an adapter back."""
    _: KW_ONLY
    load_queue: LoadQueue
    """Runs loads, and tells when `tick` has something to do. `close` closes it."""
    copy_queue: LoadQueue
    """Runs copies beside the loads, so that no copy waits behind a load. `close` closes it."""
    prefixes: PrefixCache
    """Cached KV, which goes with its adapter. The residency sets its `on_group_change`."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""

    def __post_init__(self) -> None:
        self.prefixes.on_group_change = self._rescore
        self.slots = AdapterSlots(self.tables.slots)
        self._pins = Pins(self.tables.slots, self.pool.capacity)
        self.known = KnownAdapters(MAX_KNOWN)
        self.entries = AdapterEntries()
        self._copied_pages = 0
        """Pages that the engine's thread copied since the last tick."""
        self._failures: list[LoadFailure] = []
        """Failures that the next tick returns."""
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

    def state(self, digest: str) -> AdapterTier:
        """Nearest memory that has the adapter now."""
        entry = self.entries.get(digest)
        if entry is not None and entry.stage is Stage.DEVICE:
            return "device"
        return (
            "host"
            if digest in self.images or (entry is not None and entry.image is not None)
            else "stored"
        )

    def waiting_reason(self, digest: str) -> Literal["LOADING", "NO_ROOM"]:
        """Reason why a held adapter is not on the device: it is on its way, or it lacks pages or a slot."""
        entry = self.entries.get(digest)
        return (
            "LOADING"
            if entry is not None and entry.stage in (Stage.LOADING, Stage.COPYING)
            else "NO_ROOM"
        )

    def pages_needed(self, ref: AdapterRef) -> int | None:
        """Pages of the adapter on the device; None before it was first loaded."""
        entry = self.entries.get(
            ref.digest
        )  # a deleted adapter is forgotten, but may still be in use
        return self.known.get(ref.digest).num_pages if entry is None else entry.known.num_pages

    def hold(self, ref: AdapterRef) -> None:
        """Take a hold on an adapter for a waiting request, and start to bring it to the device if it is not there."""
        entry = self.entries.get(ref.digest) or self._enter(ref)
        entry.is_forgotten = False
        self.entries.set_holds(entry, entry.holds + 1)
        self.evictor.withdraw(entry)
        if (
            entry.stage is Stage.QUEUED
            and self.entries.num_under_way()[self._origin(ref.digest)] < MAX_UNDER_WAY
        ):
            self._start(entry)

    def warm(self, ref: AdapterRef) -> None:
        """Bring an adapter to host memory, and to the device if it has room beside what is in use.

        Requests for it are expected, but nothing keeps it there. Its load does not give way to steps, because it is
        only one load.
        """
        if ref.digest not in self.entries:
            self._start(self._enter(ref, is_unrequested=True), is_paced=False)

    def release_hold(self, digest: str) -> None:
        """Drop one hold. Does nothing if there is none, because a failed load drops all holds."""
        entry = self.entries.get(digest)
        if entry is not None and entry.holds > 0:
            self.entries.set_holds(entry, entry.holds - 1)
            self._settle(entry)

    def expect(self, digests: Sequence[str]) -> None:
        """Set the order in which held adapters are loaded and get pages.

        Until the next call, all other adapters come after these, also those that are held later. The call costs almost
        nothing while no adapter is on its way.

        Args:
            digests: Adapters of waiting requests, in the order in which these are served; may repeat.
        """
        coming = self.entries.coming()
        for entry in coming:
            entry.turn = LAST_TURN
        num_left = len(coming)
        for turn, digest in enumerate(digests):
            if not num_left:
                break
            expected = self.entries.get(digest)
            if (
                expected is not None
                and expected.stage is not Stage.DEVICE
                and expected.turn == LAST_TURN
            ):
                expected.turn = turn
                num_left -= 1
        for entry in coming:
            if entry.job is not None:
                entry.job.turn = entry.turn

    def acquire(self, digest: str) -> SlotLease | None:
        """Take a running reference; None while the adapter is not on the device."""
        entry = self.entries.on_device(digest)
        if entry is None:
            return None
        entry.running += 1
        self.entries.count_held(entry)
        self.evictor.withdraw(entry)
        return entry.lease

    def release(self, digest: str, last_step: int = 0) -> None:
        """Give a running reference back. The cached blocks that were held with it must be released before.

        Args:
            digest: The adapter.
            last_step: The last step that may have read its pages. 0 means that no step did, which counts as no use.

        Raises:
            EngineError: There is no running reference.
        """
        entry = self.entries.get(digest)
        if entry is None or entry.running == 0:
            raise EngineError(f"adapter {digest} was released more often than acquired")
        entry.running -= 1
        self.entries.count_held(entry)
        if last_step:
            entry.last_step = max(entry.last_step, last_step)
            entry.known.num_runs += 1
            # Its arrival was counted for the first request that ran with it; this notes only the time of the last use.
            self.evictor.used(entry, weight=0.0 if entry.is_counted else 1.0)
            entry.is_counted = False
        self._settle(entry)

    def pin(self, ref: AdapterRef, pinned: bool) -> None:
        """Pin or unpin an adapter. A pinned one is brought to the device and stays there, within the share of pins."""
        if pinned:
            self._pins.add(ref, is_here=ref.digest in self.entries)
        else:
            self._unpin(ref.digest)
        self._apply_pins()

    def forget(self, digest: str) -> None:
        """Drop a deleted adapter: at once if it is not in use, otherwise when its last request ends."""
        self._unpin(digest)
        self._apply_pins()
        self.known.forget(digest)
        self.images.drop(digest)
        entry = self.entries.get(digest)
        if entry is not None:
            entry.is_forgotten = True
            self._settle(entry)

    def tick(self, step: int) -> list[LoadFailure]:
        """Take the results of other threads, and give pages to adapters that wait for them.

        Args:
            step: The last complete step.

        Returns:
            Adapters that could not be loaded. Their holds are gone; a later `hold` tries again.

        Raises:
            Exception: A load or a copy failed because the device is lost; see `is_device_lost`.
        """
        self.pool.complete(step)
        self.slots.complete(self.pool.completed_step)
        self._copied_pages = 0
        for job in [*self.copy_queue.take_done(), *self.load_queue.take_done()]:
            self._take_in(job)
        for digest in self.images.take_gone():
            self._rescore(digest)
        for entry in self.entries.in_turn(Stage.PLACING):
            if entry.holds:
                self._place(entry)
        self._start_queued()
        self._bring_pinned()
        failures, self._failures = self._failures, []
        for failure in (
            failures
        ):  # a copy may have failed since the last tick, and the adapter may be held again
            held_again = self.entries.get(failure.digest)
            if held_again is not None:
                self.entries.set_holds(held_again, 0)
                self._settle(held_again)
        return failures

    def residents(self) -> list[ResidentAdapter]:
        """Adapters in memory or on their way there, those on the device first."""
        pages = self.images.page_counts()
        entries = sorted(self.entries.values(), key=lambda entry: entry.stage is not Stage.DEVICE)
        started = [entry.ref.digest for entry in entries if entry.stage is not Stage.QUEUED]
        return [self._resident(digest, pages) for digest in dict.fromkeys([*started, *pages])]

    def _resident(self, digest: str, host_pages: Mapping[str, int]) -> ResidentAdapter:
        entry = self.entries.get(digest)
        is_started = entry is not None and entry.stage is not Stage.QUEUED
        known = self.known.get(digest) if entry is None else entry.known
        running = 0 if entry is None else entry.running
        return ResidentAdapter(
            digest=digest,
            tier="host" if entry is None else entry.tier,
            pages=known.num_pages or 0 if is_started else host_pages[digest],
            running=running,
            pinned=digest in self._pins,
            holds=0 if entry is None else entry.holds,
            uses=known.num_runs + running,
            prefix_pages=self.prefixes.group_reload_cost(digest)[1],
            slot=-1 if entry is None else entry.slot,
            loads=known.loads.count,
            load_p95_s=known.loads.p95_s,
        )

    def check(self, num_swap_pages: int = 0) -> None:
        """Verify that the adapters own the pages, slots and host pages that are in use.

        Args:
            num_swap_pages: Host pages with KV cache of preempted requests.

        Raises:
            PageAccountingError: Pages or slots were lost or doubled, or the evictor is offered other adapters than
                those that may be evicted.
        """
        self.entries.check()
        self.images.check(num_swap_pages)
        self.slots.check(
            {entry.slot: entry.ref.digest for entry in self.entries.values() if entry.slot >= 0}
        )
        pages = [page for entry in self.entries.values() for page in entry.pages]
        if len(set(pages)) != len(pages) or len(pages) != self.pool.counts()["adapter"]:
            raise PageAccountingError(
                f"adapters hold {len(pages)} pages, the pool says {self.pool.counts()}"
            )
        for entry in self.entries.values():
            on_device = entry.stage is Stage.DEVICE
            if (
                (entry.slot >= 0) != bool(entry.pages)
                or (entry.running and not on_device)
                or entry.holds < 0
            ):
                raise PageAccountingError(
                    f"adapter {entry.ref.digest} has other pages, slot or image than the stage {entry.stage.name} needs"
                )
            if (entry in self.evictor) != (entry.is_idle and not entry.is_kept):
                raise PageAccountingError(
                    f"adapter {entry.ref.digest} is both in use and evictable, or neither"
                )
        if (
            stray := self.prefixes.groups().keys()
            - self.entries.by_stage[Stage.DEVICE].keys()
            - {None}
        ):
            raise PageAccountingError(
                f"adapters that are not on the device have cached blocks: {stray}"
            )

    def reload_cost(self, entry: AdapterEntry) -> tuple[float, int]:
        """Seconds to bring an adapter and its cached KV back, and the pages of both."""
        page_s = (
            self.costs.copy_s
            if entry.ref.digest in self.images
            else self.costs.copy_s + self.costs.load_s
        )
        group_s, group_pages = self.prefixes.group_reload_cost(entry.ref.digest)
        return entry.num_pages * page_s + group_s, entry.num_pages + group_pages

    def evict(self, entry: AdapterEntry) -> None:
        """Take an adapter off the device, or stop bringing it. An entry ends nowhere else.

        Its pages, slot, image and cached KV are freed. The evictor calls this by `AdapterEntry.evict`.
        """
        if entry.stage is Stage.DEVICE:
            self.prefixes.evict_group(entry.ref.digest)
        self.entries.remove(entry)
        self._pins.left(entry.ref.digest)
        if entry.image is not None:
            self.images.release(entry.image)
        if entry.slot >= 0:
            self.pool.free(entry.pages, entry.last_step)
            self.slots.complete(self.pool.completed_step)
            self.slots.free(entry.slot, entry.last_step)

    def close(self) -> None:
        """Drop waiting work, and return when running work is done."""
        self.load_queue.close()
        self.copy_queue.close()

    def _enter(self, ref: AdapterRef, *, is_unrequested: bool = False) -> AdapterEntry:
        known = self.known[ref.digest]
        entry = AdapterEntry(
            ref=ref,
            known=known,
            uses=known.uses,
            entered_s=self.clock(),
            residency=self,
            is_unrequested=is_unrequested,
        )
        self.entries.add(entry)
        self._pins.entered(ref.digest)
        return entry

    def _origin(self, digest: str) -> AdapterTier:
        return "host" if digest in self.images else "stored"

    def _start_queued(self) -> None:
        queued = self.entries.in_turn(Stage.QUEUED)
        num_under_way = self.entries.num_under_way() if queued else Counter()
        for entry in queued:
            origin = self._origin(entry.ref.digest)
            if num_under_way[origin] < MAX_UNDER_WAY:
                num_under_way[origin] += 1
                self._start(entry)

    def _start(self, entry: AdapterEntry, *, is_paced: bool = True) -> None:
        ref = entry.ref
        entry.image = self.images.hold(ref.digest)
        if entry.image is not None:
            entry.origin = "host"
            self.entries.advance(entry, Stage.PLACING)
            entry.known.num_pages = len(entry.image.pages)
            self._place(entry)
            return
        entry.origin = "stored"
        self.entries.advance(entry, Stage.LOADING)
        entry.known.num_runs = 0
        load = (
            partial(self.loader.load, ref)
            if is_paced
            else partial(self.loader.load, ref, is_paced=False)
        )
        entry.job = LoadJob(ref.digest, load, turn=entry.turn)
        self.load_queue.submit(entry.job)

    def _bring_pinned(self) -> None:
        """Bring one pinned adapter at a time, while no held adapter lacks room or a loader."""
        placing = list(self.entries.by_stage[Stage.PLACING].values())
        missing = self._pins.missing()
        if not placing and not missing:
            return
        has_room = not any(
            entry.holds for entry in (*placing, *self.entries.by_stage[Stage.QUEUED].values())
        )
        for entry in [entry for entry in placing if not entry.holds]:
            if has_room and self._has_room_for_pin(entry.known.num_pages or 0):
                self._place(entry)
            if entry.stage is Stage.PLACING:
                self.evict(
                    entry
                )  # its image stays in the slab, if there is room; it is tried again later
        if has_room and not any(entry.is_unrequested for entry in self.entries.coming()):
            ref = next(
                (ref for ref in missing if self._has_room_for_pin(self.pages_needed(ref) or 1)),
                None,
            )
            if ref is not None:
                self._start(self._enter(ref, is_unrequested=True))

    def _take_in(self, job: LoadJob) -> None:
        if job.device_error is not None:
            raise job.device_error
        entry = self.entries[job.digest]
        entry.job = None
        if job.image is None:
            self._fail(entry, job.error)
            return
        if entry.stage is Stage.LOADING:
            self.images.add(job.image, keep=not entry.is_forgotten)
            entry.image = job.image
            self.entries.advance(entry, Stage.PLACING)
            entry.known.num_pages = len(job.image.pages)
        else:
            self._arrive(entry, job.image)
        self._settle(entry)

    def _fail(self, entry: AdapterEntry, error: ManyloraError | None) -> None:
        self.loads[f"{entry.origin}>device:failed"] += 1
        self._pins.note_load(entry.ref.digest, succeeded=False)
        was_held = entry.holds > 0
        self.entries.set_holds(entry, 0)
        self.evict(entry)
        if not was_held:
            logger.warning("adapter %s could not be loaded: %s", entry.ref.digest, error)
        elif error is not None:
            self._failures.append(LoadFailure(entry.ref.digest, error))

    def _place(self, entry: AdapterEntry) -> None:
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
        is_small = self._copied_pages + len(pages) <= self.copier.pages_at_once
        fence = None if is_small else self.copier.fence()

        def copy() -> HostImage:
            if is_small:
                self.copier.copy_now(image.pages, pages)
            else:
                self.copier.copy(image.pages, pages, fence)
            return image

        entry.job = LoadJob(entry.ref.digest, copy, turn=entry.turn)
        if is_small:
            self._copied_pages += len(pages)
            self.copy_queue.run_now(entry.job)
            self._take_in(entry.job)
        else:
            self.copy_queue.submit(entry.job)

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
        if entry.ref.digest in self._pins:
            self._pins.note_load(entry.ref.digest, succeeded=True)
            self._apply_pins()

    def _may_hold(self, num_pages: int) -> bool:
        """True if an adapter of `num_pages` pages may join those that only wait for their requests."""
        held_pages = self.entries.held_pages
        return held_pages == 0 or held_pages + num_pages <= self.pool.capacity // HOLD_DIVISOR

    def _has_room_for_pin(self, num_pages: int) -> bool:
        """True if a pin may keep an adapter of `num_pages` pages, and it has room beside everything that is in use."""
        return (
            self._pins.has_share(num_pages)
            and self.evictor.num_available - num_pages >= self.reserve_pages
            and (self.slots.num_free > 0 or self._slot_victim() is not None)
        )

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

    def _rescore(self, digest: str) -> None:
        """Renew the offer of an adapter, if there is one: its reload cost has changed."""
        entry = self.entries.get(digest)
        if entry is not None and entry in self.evictor:
            self.evictor.offer(entry)

    def _apply_pins(self) -> None:
        for entry in self._pins.apply(self.entries):
            self._settle(entry)

    def _unpin(self, digest: str) -> None:
        self._pins.discard(digest)
        entry = self.entries.get(digest)
        if entry is not None:
            entry.is_kept = entry.evict_last = entry.is_unrequested = False
            self._settle(entry)

    def _settle(self, entry: AdapterEntry) -> None:
        """Free everything of an adapter that no request and no pin needs."""
        if entry.holds or entry.running:
            return
        if entry.stage is Stage.DEVICE:
            if entry.is_forgotten:
                self.evictor.take(entry)
            elif entry.is_kept:
                self.evictor.withdraw(entry)
            else:
                self.evictor.offer(entry)
        elif entry.is_unrequested:
            return
        elif entry.stage in (Stage.QUEUED, Stage.PLACING) or (
            entry.stage is Stage.LOADING
            and entry.job is not None
            and self.load_queue.cancel(entry.job)
        ):
            self.evict(entry)
