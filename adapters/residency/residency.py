"""Places of the adapters: on the device, in host memory, or on their way; the references to them, and what stays.

Knows digests, never names, tenants or requests. State that the engine can see changes only in calls from the engine's
thread, mostly in `tick`.

An adapter on the device is idle if no request runs with it and no waiting request holds it. Idle adapters are offered
to the evictor, except those that a pin keeps. A waiting request has a hold, never pages of its own. Keys and values
that were computed with an adapter leave the prefix cache with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from manylora.adapters.ref import AdapterRef, AdapterTier, ResidentAdapter
from manylora.adapters.residency.entry import (
    AdapterEntry,
    KnownAdapters,
    LoadFailure,
    SlotLease,
    Stage,
)
from manylora.adapters.residency.load_threads import LAST_TURN
from manylora.adapters.residency.pins import Pins
from manylora.adapters.residency.transfers import Transfers
from manylora.errors import EngineError, ManyloraError, PageAccountingError
from manylora.memory.eviction import PageCosts
from manylora.memory.prefix_cache import PrefixCache

logger = logging.getLogger(__name__)

MAX_KNOWN = 1 << 16
"""Number of adapters whose size and uses are remembered after they left memory."""


@dataclass(eq=False, repr=False)
class Residency:
    """Places of the adapters. All methods are called from the engine's thread."""

    transfers: Transfers
    """Brings adapters to the device, and frees what they had. The residency sets its `on_end`."""
    costs: PageCosts
    """Times to bring an adapter back."""
    prefixes: PrefixCache
    """Cached KV, which goes with its adapter. The residency sets its `on_group_change`."""

    def __post_init__(self) -> None:
        transfers = self.transfers
        transfers.on_end = self._note_end
        self.prefixes.on_group_change = self._rescore
        self._pool = transfers.pool
        self._images = transfers.images
        self._evictor = transfers.evictor
        self.slots = transfers.slots
        self.entries = transfers.entries
        self._pins = Pins(transfers.tables.slots, self._pool.capacity)
        self.known = KnownAdapters(MAX_KNOWN)
        self._failures: list[LoadFailure] = []
        """Failures that the next tick returns."""

    def state(self, digest: str) -> AdapterTier:
        """Nearest memory that has the adapter now."""
        entry = self.entries.get(digest)
        if entry is not None and entry.stage is Stage.DEVICE:
            return "device"
        return (
            "host"
            if digest in self._images or (entry is not None and entry.image is not None)
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
        self._evictor.withdraw(entry)
        if entry.stage is Stage.QUEUED:
            self.transfers.start_queued([entry])

    def warm(self, ref: AdapterRef) -> None:
        """Bring an adapter to host memory, and to the device if it has room beside what is in use.

        Requests for it are expected, but nothing keeps it there. Its load does not give way to steps, because it is
        only one load.
        """
        if ref.digest not in self.entries:
            self.transfers.start(self._enter(ref, is_unrequested=True), is_paced=False)

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
        if not coming:
            return
        turns = {digest: turn for turn, digest in enumerate(dict.fromkeys(digests))}
        for entry in coming:
            entry.turn = turns.get(entry.ref.digest, LAST_TURN)
            if entry.job is not None:
                entry.job.turn = entry.turn

    def acquire(self, digest: str) -> SlotLease | None:
        """Take a running reference; None while the adapter is not on the device."""
        entry = self.entries.on_device(digest)
        if entry is None:
            return None
        entry.running += 1
        self.entries.count_held(entry)
        self._evictor.withdraw(entry)
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
            self._evictor.used(entry, weight=0.0 if entry.is_counted else 1.0)
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
        self._images.drop(digest)
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
        self._pool.complete(step)
        self.slots.complete(self._pool.completed_step)
        transfers = self.transfers
        transfers.copied_pages = 0
        for job in [*transfers.copy_queue.take_done(), *transfers.load_queue.take_done()]:
            transfers.take_in(job)
        for digest in self._images.take_gone():
            self._rescore(digest)
        for entry in self.entries.in_turn(Stage.PLACING):
            if entry.holds:
                transfers.place(entry)
        queued = self.entries.in_turn(Stage.QUEUED)
        if queued:
            transfers.start_queued(queued)
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
        pages = self._images.page_counts()
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
        self._images.check(num_swap_pages)
        self.slots.check(
            {entry.slot: entry.ref.digest for entry in self.entries.values() if entry.slot >= 0}
        )
        pages = [page for entry in self.entries.values() for page in entry.pages]
        if len(set(pages)) != len(pages) or len(pages) != self._pool.counts()["adapter"]:
            raise PageAccountingError(
                f"adapters hold {len(pages)} pages, the pool says {self._pool.counts()}"
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
            if (entry in self._evictor) != (entry.is_idle and not entry.is_kept):
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
            if entry.ref.digest in self._images
            else self.costs.copy_s + self.costs.load_s
        )
        group_s, group_pages = self.prefixes.group_reload_cost(entry.ref.digest)
        return entry.num_pages * page_s + group_s, entry.num_pages + group_pages

    def evict(self, entry: AdapterEntry) -> None:
        """Take an adapter off the device, or stop bringing it. An entry ends nowhere else.

        Its pages, slot, image and cached KV are freed. The evictor calls this.
        """
        if entry.stage is Stage.DEVICE:
            self.prefixes.evict_group(entry.ref.digest)
        self._pins.left(entry.ref.digest)
        self.transfers.drop(entry)

    def _enter(self, ref: AdapterRef, *, is_unrequested: bool = False) -> AdapterEntry:
        known = self.known[ref.digest]
        entry = AdapterEntry(
            ref=ref,
            known=known,
            uses=known.uses,
            entered_s=self.transfers.clock(),
            owner=self,
            is_unrequested=is_unrequested,
        )
        self.entries.add(entry)
        self._pins.entered(ref.digest)
        return entry

    def _bring_pinned(self) -> None:
        """Bring one pinned adapter at a time, while no held adapter lacks room or a loader."""
        placing = list(self.entries.by_stage[Stage.PLACING].values())
        if not placing and not self._pins.absent:
            return
        has_room = not any(
            entry.holds for entry in (*placing, *self.entries.by_stage[Stage.QUEUED].values())
        )
        for entry in [entry for entry in placing if not entry.holds]:
            if has_room and self._has_room_for_pin(entry.known.num_pages or 0):
                self.transfers.place(entry)
            if entry.stage is Stage.PLACING:
                self.evict(entry)  # its image may stay in the slab; it is tried again later
        if has_room and not any(entry.is_unrequested for entry in self.entries.coming()):
            ref = next(
                (
                    ref
                    for ref in self._pins.missing()
                    if self._has_room_for_pin(self.pages_needed(ref) or 1)
                ),
                None,
            )
            if ref is not None:
                self.transfers.start(self._enter(ref, is_unrequested=True))

    def _note_end(self, entry: AdapterEntry, error: ManyloraError | None) -> None:
        """Take note that a load or a copy has ended."""
        digest = entry.ref.digest
        if error is not None:
            self._pins.note_load(digest, succeeded=False)
            was_held = entry.holds > 0
            self.entries.set_holds(entry, 0)
            self.evict(entry)
            if was_held:
                self._failures.append(LoadFailure(digest, error))
            else:
                logger.warning("adapter %s could not be loaded: %s", digest, error)
            return
        if entry.stage is Stage.DEVICE and digest in self._pins:
            self._pins.note_load(digest, succeeded=True)
            self._apply_pins()
        self._settle(entry)

    def _has_room_for_pin(self, num_pages: int) -> bool:
        """True if a pin may keep an adapter of `num_pages` pages, and it has room beside everything that is in use."""
        return self._pins.has_share(num_pages) and self.transfers.has_room(num_pages)

    def _rescore(self, digest: str) -> None:
        """Renew the offer of an adapter, if there is one: its reload cost has changed."""
        entry = self.entries.get(digest)
        if entry is not None and entry in self._evictor:
            self._evictor.offer(entry)

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
                self._evictor.take(entry)
            elif entry.is_kept:
                self._evictor.withdraw(entry)
            else:
                self._evictor.offer(entry)
        elif entry.is_unrequested:
            return
        elif entry.stage in (Stage.QUEUED, Stage.PLACING) or (
            entry.stage is Stage.LOADING
            and entry.job is not None
            and self.transfers.load_queue.cancel(entry.job)
        ):
            self.evict(entry)
