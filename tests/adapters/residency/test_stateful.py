"""Any order of calls, loads, copies, failures and completed steps keeps the accounts right and the weights true."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adapters_factory import Q_AND_V, random_lora, tiny_base
from manylora.adapters.ref import AdapterRef
from manylora.adapters.residency.entry import SlotLease, Stage
from manylora.memory.arena import SwapSpace
from manylora.memory.prefix_cache import PrefixBlock
from residency_parts import ResidencyParts, store

pytestmark = pytest.mark.no_cover

LORAS = [
    random_lora(tiny_base(), 8, seed=0),
    random_lora(tiny_base(), 16, seed=1),
    random_lora(tiny_base(), 4, seed=2, modules=Q_AND_V),
    random_lora(tiny_base(), 8, seed=3),
    random_lora(tiny_base(), 8, seed=4, layers=(1,)),
    random_lora(tiny_base(), 8, seed=5, modules=Q_AND_V),
    random_lora(tiny_base(), 64, seed=6),
]
SMALL = 4
BROKEN = 3
"""An adapter whose blob comes and goes."""
NEVER_FITS = 6
NUM_PAGES = 16
MAX_SWAPPED = 6
adapters = st.integers(0, len(LORAS) - 1)


@cache
def stored() -> tuple[tempfile.TemporaryDirectory[str], list[AdapterRef]]:
    """The adapters in a blob store, written once; the folder lives as long as the process."""
    folder = tempfile.TemporaryDirectory()
    parts = ResidencyParts(Path(folder.name))
    return folder, store(parts, Path(folder.name), LORAS)


class ResidencyMachine(RuleBasedStateMachine):
    @initialize(
        at_first=st.lists(adapters, unique=True, max_size=4),
    )
    def start(self, at_first: list[int]) -> None:
        folder, self.refs = stored()
        self.parts = ResidencyParts(Path(folder.name), num_pages=NUM_PAGES, slab_pages=9, slots=3)
        self.residency = self.parts.residency
        self.swap = SwapSpace(self.parts.slab, self.parts.images.make_room, MAX_SWAPPED)
        self.index = {ref.digest: index for index, ref in enumerate(self.refs)}
        self.holds: Counter[int] = Counter()
        self.untold: set[int] = set()
        """Adapters whose copy failed at once, which the next tick tells."""
        self.running: list[tuple[int | None, SlotLease | None, list[PrefixBlock]]] = []
        """Requests: their adapter, its lease, the cached blocks that they hold."""
        self.kv: list[list[int]] = []
        self.swapped: list[list[int]] = []
        self.pinned: dict[int, None] = {}
        self.blocks_read = 0
        """The last step that reads a cached block."""
        self.read: list[tuple[int, SlotLease, list[int]]] = []
        """Adapters that steps may still read: the last step, slot and pages."""
        self.step = 0
        broken = self.parts.blobs.path(self.refs[BROKEN].weights_sha256)
        self.broken_path, self.broken_bytes = broken, broken.read_bytes()
        for index in at_first:
            self.a_request_comes_and_runs(index, prompt=0, count=1, stays=False)

    def teardown(self) -> None:
        try:
            self.finish_everything()
        finally:
            self.broken_path.write_bytes(self.broken_bytes)

    @rule(seconds=st.integers(1, 500))
    def time_passes(self, seconds: int) -> None:
        self.parts.clock[0] += seconds

    @rule(count=st.sampled_from([0, 3, 20]))
    def few_pages_are_copied_at_once(self, count: int) -> None:
        self.parts.copier.pages_at_once = count

    @rule(indices=st.lists(adapters))
    def expect(self, indices: list[int]) -> None:
        self.residency.expect([self.refs[index].digest for index in indices])

    @rule(index=adapters, fails=st.integers(0, 5).map(lambda draw: draw == 0))
    def hold(self, index: int, fails: bool = False) -> None:
        placed = self.placed()
        self.parts.copier.fails = fails
        self.residency.hold(self.refs[index])
        self.parts.copier.fails = False
        self.holds[index] += 1
        if (
            fails and self.refs[index].digest not in self.residency.entries
        ):  # a small image, copied at once
            self.holds[index] = 0
            self.untold.add(index)
        assert (
            self.placed() == placed
            or self.parts.evictor.num_available >= self.residency.transfers.reserve_pages
        )

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data())
    def release_hold(self, data: st.DataObject) -> None:
        self.drop_one_hold(data.draw(st.sampled_from(sorted(self.holds))))

    def drop_one_hold(self, index: int) -> None:
        self.residency.release_hold(self.refs[index].digest)
        self.holds[index] = max(self.holds[index] - 1, 0)

    @rule(index=st.none() | adapters)
    def drop_holds(self, index: int | None) -> None:
        for held in [held for held in self.holds if held != index]:
            while self.holds[held]:
                self.drop_one_hold(held)

    @precondition(lambda self: self.on_device())
    @rule(data=st.data())
    def acquire_one_that_is_there(self, data: st.DataObject) -> None:
        self.acquire(data.draw(st.sampled_from(sorted(self.on_device()))))

    @rule(index=adapters)
    def acquire(self, index: int) -> None:
        on_device = self.residency.state(self.refs[index].digest) == "device"
        lease = self.residency.acquire(self.refs[index].digest)
        assert (lease is not None) == on_device
        if lease is not None:
            self.running.append((index, lease, []))

    @rule(prompt=st.integers(0, 2), count=st.integers(1, 4), stays=st.booleans())
    def the_base_runs(self, prompt: int, count: int, stays: bool) -> None:
        held = self.parts.cache_blocks(None, count, seed=str(prompt), step=self.step)
        if stays:
            self.running.append((None, None, held))
        else:
            self.parts.prefixes.release(held, self.step)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), prompt=st.integers(0, 2), count=st.integers(1, 4))
    def cache_a_prefix(self, data: st.DataObject, prompt: int, count: int) -> None:
        index, _, held = data.draw(st.sampled_from(self.running))
        if not held:
            digest = None if index is None else self.refs[index].digest
            held += self.parts.cache_blocks(digest, count, seed=str(prompt), step=self.step)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), in_flight=st.booleans())
    def finish(self, data: st.DataObject, in_flight: bool) -> None:
        _, lease, held = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        last_step = self.step + 1 if in_flight else self.step
        self.parts.prefixes.release(held, last_step)
        self.blocks_read = max(self.blocks_read, last_step if held else 0)
        if lease is not None:
            if in_flight:
                self.read.append(
                    (last_step, lease, list(self.residency.entries[lease.digest].pages))
                )
            self.residency.release(lease.digest, last_step)

    @rule(index=adapters)
    def forget(self, index: int) -> None:
        self.residency.forget(self.refs[index].digest)
        self.pinned.pop(index, None)

    @rule(index=adapters, pinned=st.booleans())
    def pin(self, index: int, pinned: bool) -> None:
        self.residency.pin(self.refs[index], pinned)
        if pinned:
            self.pinned.setdefault(index)
        else:
            self.pinned.pop(index, None)

    @rule(count=st.integers(0, 6))
    def reserve(self, count: int) -> None:
        self.residency.transfers.reserve_pages = count

    @rule(num_free=st.integers(1, NUM_PAGES - 1))
    def make_room(self, num_free: int) -> None:
        pool, evictor = self.parts.pool, self.parts.evictor
        before, available = pool.counts(), evictor.num_available
        in_use = (
            {index for index in self.on_device() if self.holds[index]}
            | self.runs()
            | self.kept_by_a_pin()
        )
        if evictor.make_room(num_free):
            assert pool.num_free >= num_free
        else:
            assert pool.counts() == before
            assert num_free > available or self.is_something_read()
        assert in_use <= self.on_device()

    @precondition(lambda self: self.parts.loads.pending)
    @rule()
    def run_a_load(self) -> None:
        self.parts.loads.run_one()

    @precondition(lambda self: self.parts.copies.pending)
    @rule(fails=st.integers(0, 5).map(lambda draw: draw == 0))
    def run_a_copy(self, fails: bool) -> None:
        self.parts.copier.fails = fails
        self.parts.copies.run_one()
        self.parts.copier.fails = False

    @rule()
    def everything_under_way_ends(self) -> None:
        for _ in range(5):
            self.parts.loads.run_all()
            self.parts.copies.run_all()
            self.tick(completes=False)

    @rule(index=adapters, prompt=st.integers(0, 2), count=st.integers(0, 4), stays=st.booleans())
    def a_request_comes_and_runs(self, index: int, prompt: int, count: int, stays: bool) -> None:
        self.hold(index)
        self.everything_under_way_ends()
        lease = self.residency.acquire(self.refs[index].digest)
        self.drop_one_hold(index)
        if lease is None:
            return
        held = self.parts.cache_blocks(lease.digest, count, seed=str(prompt), step=self.step)
        if stays:
            self.running.append((index, lease, held))
        else:
            self.parts.prefixes.release(held, self.step)
            self.residency.release(lease.digest, self.step)

    @rule(completes=st.booleans())
    def tick(self, completes: bool) -> None:
        self.step += completes
        placed, kept = self.placed(), self.kept_by_a_pin()
        for failure in self.residency.tick(self.step):
            index = self.index[failure.digest]
            assert index in (NEVER_FITS, BROKEN) or self.parts.copier.failures
            assert self.holds[index] or index in self.untold
            self.holds[index] = 0
        self.untold.clear()
        assert (
            self.placed() <= placed
            or self.parts.evictor.num_available >= self.residency.transfers.reserve_pages
        )
        assert kept <= self.on_device()

    @rule(count=st.integers(-1, 6))
    def kv_cache_grows_or_shrinks(self, count: int) -> None:
        if count > 0:
            pages = self.parts.pool.allocate(count, "kv")
            if pages is not None:
                self.kv.append(pages)
        elif self.kv:
            self.parts.pool.free(self.kv.pop(0), self.step)

    @rule(count=st.integers(-1, MAX_SWAPPED))
    def kv_is_swapped_out_or_in(self, count: int) -> None:
        if count > 0:
            pages = self.swap.take(count)
            if pages is not None:
                self.parts.slab.pages[pages] = 0xFF
                self.swapped.append(pages)
        elif self.swapped:
            self.parts.slab.free(self.swapped.pop(0))

    @rule(missing=st.booleans())
    def break_or_mend_a_blob(self, missing: bool) -> None:
        self.broken_path.unlink(missing_ok=True)
        if not missing:
            self.broken_path.write_bytes(self.broken_bytes)

    @invariant()
    def the_accounts_are_right(self) -> None:
        self.parts.pool.check()
        self.residency.check(self.swap.num_used)
        self.parts.evictor.check()
        self.parts.prefixes.check([held for _, _, held in self.running])
        assert not self.parts.arena.bytes[0].any()
        counts = self.parts.pool.counts()
        assert counts["kv"] == sum(len(pages) for pages in self.kv)
        assert counts["adapter"] == sum(
            len(entry.pages) for entry in self.residency.entries.values()
        )

    @invariant()
    def references_equal_their_holders(self) -> None:
        running = Counter(index for index, _, _ in self.running if index is not None)
        for digest, entry in self.residency.entries.items():
            assert (entry.holds, entry.running) == (
                self.holds[self.index[digest]],
                running[self.index[digest]],
            )
        absent = [
            index for index, ref in enumerate(self.refs) if ref.digest not in self.residency.entries
        ]
        assert not any(self.holds[index] or running[index] for index in absent)

    @invariant()
    def who_waits_has_no_pages_and_who_is_away_no_cached_blocks(self) -> None:
        for entry in self.residency.entries.values():
            assert bool(entry.pages) == (entry.stage in (Stage.COPYING, Stage.DEVICE))
        for group in self.parts.prefixes.groups():
            assert group is None or self.residency.state(group) == "device"

    @invariant()
    def every_lease_points_at_its_own_weights(self) -> None:
        for index, lease, _ in self.running:
            if lease is not None and index is not None:
                self.residency.slots.check_lease(lease)
                assert self.parts.matches(lease.slot, LORAS[index])

    @invariant()
    def nothing_is_used_again_before_the_step_that_reads_it_is_complete(self) -> None:
        for last_step, lease, pages in self.read:
            if last_step > self.parts.pool.completed_step:
                assert {self.parts.pool.state(page) for page in pages} <= {"adapter", "quarantine"}
                assert all(
                    entry.slot != lease.slot
                    for entry in self.residency.entries.values()
                    if entry.pages != pages
                )

    @invariant()
    def pins_keep_what_their_share_holds(self) -> None:
        kept = self.kept_by_a_pin()
        for digest, entry in self.residency.entries.items():
            index = self.index[digest]
            assert entry.is_kept == (index in kept)
            assert entry.evict_last == (
                index in self.pinned and entry.stage is Stage.DEVICE and index not in kept
            )

    def kept_by_a_pin(self) -> set[int]:
        """Of three slots pins keep one, for the first pinned whose pages are no more than half of all."""
        share = self.parts.pool.capacity // 2
        entries = self.residency.entries
        small = [index for index in self.pinned if index in self.on_device()]
        return set(
            [index for index in small if len(entries[self.refs[index].digest].pages) <= share][:1]
        )

    def on_device(self) -> set[int]:
        return {
            index
            for index, ref in enumerate(self.refs)
            if self.residency.state(ref.digest) == "device"
        }

    def runs(self) -> set[int]:
        return {index for index, _, _ in self.running if index is not None}

    def placed(self) -> set[tuple[str, int]]:
        return {
            (digest, entry.slot) for digest, entry in self.residency.entries.items() if entry.pages
        }

    def is_something_read(self) -> bool:
        completed = self.parts.pool.completed_step
        adapters_read = [
            entry for entry in self.residency.entries.values() if entry.last_step > completed
        ]
        return bool(adapters_read) or self.blocks_read > completed

    def finish_everything(self) -> None:
        """Once nobody wants anything, what is pinned comes by itself, the rest can be had, and any adapter again."""
        for _, lease, held in self.running:
            self.parts.prefixes.release(held, 0)
            if lease is not None:
                self.residency.release(lease.digest)
        self.drop_holds(None)
        for pages in self.kv:
            self.parts.pool.free(pages, 0)
        for pages in self.swapped:
            self.parts.slab.free(pages)
        self.residency.transfers.reserve_pages = 0
        self.parts.settle(self.step)  # a copy may have failed that nobody was told of
        for index in range(len(LORAS)):
            self.residency.pin(self.refs[index], False)
        self.residency.pin(self.refs[SMALL], True)
        self.step += 2
        self.parts.settle(self.step)
        assert SMALL in self.on_device()
        self.parts.evict_all()
        assert self.on_device() == {SMALL}
        self.residency.pin(self.refs[SMALL], False)
        self.parts.evict_all()
        assert self.parts.pool.num_free == self.parts.pool.capacity
        self.residency.check()
        assert self.parts.matches(self.parts.load(self.refs[1]), LORAS[1])


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, derandomize=True
)
