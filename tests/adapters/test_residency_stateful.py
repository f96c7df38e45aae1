"""Any order of calls, loads, copies, failures and completed steps keeps the accounts right and the weights true."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adapters_factory import Q_AND_V, random_lora, tiny_base
from residency_parts import make_residency, store
from weft.adapters.residency import SlotLease

LORAS = [
    random_lora(tiny_base(), 8, seed=0),
    random_lora(tiny_base(), 16, seed=1),
    random_lora(tiny_base(), 4, seed=2, modules=Q_AND_V),
    random_lora(tiny_base(), 8, seed=3),
    random_lora(tiny_base(), 8, seed=4, layers=(1,)),
    random_lora(tiny_base(), 64, seed=5),
]
NEVER_FITS = 5
BROKEN = 3
"""An adapter whose blob comes and goes."""
adapters = st.integers(0, len(LORAS) - 1)


class ResidencyMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        self.parts = make_residency(folder, num_pages=14, slab_pages=9, slots=3)
        self.refs = store(self.parts, folder, LORAS)
        self.residency = self.parts.residency
        self.index = {ref.digest: index for index, ref in enumerate(self.refs)}
        self.holds: Counter[int] = Counter()
        self.leases: list[tuple[int, SlotLease]] = []
        self.kv: list[list[int]] = []
        self.pinned: dict[int, None] = {}
        self.step = 0
        broken = self.parts.blobs.path(self.refs[BROKEN].weights_sha256)
        self.broken_path, self.broken_bytes = broken, broken.read_bytes()

    def teardown(self) -> None:
        self.finish_everything()
        self.folder.cleanup()

    @rule(index=adapters)
    def want(self, index: int) -> None:
        self.residency.want(self.refs[index])
        self.holds[index] += 1

    @rule(index=adapters)
    def unwant(self, index: int) -> None:
        self.residency.unwant(self.refs[index].digest)
        self.holds[index] = max(self.holds[index] - 1, 0)

    @rule(index=st.none() | adapters)
    def drop_holds(self, index: int | None) -> None:
        self.residency.drop_holds(None if index is None else self.refs[index].digest)
        self.holds = Counter({index: self.holds[index]}) if index is not None else Counter()

    @rule(index=adapters)
    def acquire(self, index: int) -> None:
        on_device = self.residency.state(self.refs[index].digest) == "device"
        lease = self.residency.acquire(self.refs[index].digest)
        assert (lease is not None) == on_device
        if lease is not None:
            self.leases.append((index, lease))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), in_flight=st.booleans())
    def release(self, data: st.DataObject, in_flight: bool) -> None:
        _, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.residency.release(lease.digest, self.step + 1 if in_flight else 0)

    @rule(index=adapters)
    def forget(self, index: int) -> None:
        self.residency.forget(self.refs[index].digest)
        self.pinned.pop(index, None)

    @rule(index=adapters, pinned=st.booleans())
    def pin(self, index: int, pinned: bool) -> None:
        self.residency.pin(self.refs[index].digest, pinned)
        if pinned:
            self.pinned.setdefault(index)
        else:
            self.pinned.pop(index, None)

    @rule(num_pages=st.integers(0, 14))
    def evict_idle(self, num_pages: int) -> None:
        free = self.parts.pool.num_free
        kept = {index for index in self.on_device() if self.holds[index]} | self.kept_by_a_pin()
        assert self.residency.evict_idle(num_pages) == self.parts.pool.num_free - free
        assert kept <= self.on_device()

    @rule()
    def run_a_job(self) -> None:
        self.parts.executor.run_one()

    @rule(completes=st.booleans())
    def tick(self, completes: bool) -> None:
        self.step += completes
        for failure in self.residency.tick(self.step):
            index = self.index[failure.digest]
            assert index in (NEVER_FITS, BROKEN)
            assert self.holds[index]
            self.holds[index] = 0

    @rule(count=st.integers(1, 6))
    def kv_cache_grows(self, count: int) -> None:
        pages = self.parts.pool.allocate(count, "kv")
        if pages is not None:
            self.kv.append(pages)

    @precondition(lambda self: self.kv)
    @rule()
    def kv_cache_shrinks(self) -> None:
        self.parts.pool.free(self.kv.pop(0), self.step)

    @rule(missing=st.booleans())
    def break_or_mend_a_blob(self, missing: bool) -> None:
        self.broken_path.unlink(missing_ok=True)
        if not missing:
            self.broken_path.write_bytes(self.broken_bytes)

    @invariant()
    def the_accounts_are_right(self) -> None:
        self.parts.pool.check()
        self.residency.check()
        assert not self.parts.arena.bytes[0].any()

    @invariant()
    def every_lease_points_at_its_own_weights(self) -> None:
        for index, lease in self.leases:
            self.residency.check_slot(*lease)
            assert self.parts.matches(lease.slot, LORAS[index])

    def kept_by_a_pin(self) -> set[int]:
        """Of three slots pins keep one, for the first pinned whose pages are no more than half of all."""
        pages = {adapter.digest: adapter.pages for adapter in self.residency.residents()}
        share = self.parts.pool.capacity // 2
        small = [index for index in self.pinned if pages.get(self.refs[index].digest, 0) <= share]
        return set([index for index in small if index in self.on_device()][:1])

    def on_device(self) -> set[int]:
        return {index for index, ref in enumerate(self.refs) if self.residency.state(ref.digest) == "device"}

    def finish_everything(self) -> None:
        """Once nobody wants anything, all pages can be had, and any adapter can be brought in again."""
        for _, lease in self.leases:
            self.residency.release(lease.digest)
        self.residency.drop_holds()
        for index in self.pinned:
            self.residency.pin(self.refs[index].digest, False)
        for pages in self.kv:
            self.parts.pool.free(pages, 0)
        self.step += 2
        self.parts.settle(self.step)
        self.residency.evict_idle(1000)
        assert self.parts.pool.num_free == self.parts.pool.capacity
        self.residency.check()
        assert self.parts.matches(self.parts.load(self.refs[1]), LORAS[1])


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)
