"""Defects to plant one at a time, each of a kind that a change could bring in: the simulation must see every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import isfunction
from itertools import takewhile
from typing import Any

import pytest

from manylora.adapters.residency import images as host_images
from manylora.adapters.residency import load_threads, residency, transfers
from manylora.adapters.residency.entry import AdapterSlots, SlotLease, Stage
from manylora.engine.fairness.fair_order import FairOrder
from manylora.engine.fairness.shares import FairShare
from manylora.engine.scheduling import kv_pages
from manylora.engine.scheduling.kv_pages import KvPages, PrefixHit
from manylora.engine.scheduling.plan import PlanBuilder, StepPlan
from manylora.engine.scheduling.preemption import Preemption
from manylora.engine.scheduling.request_pages import RequestPages
from manylora.engine.scheduling.request_state import RequestState
from manylora.engine.scheduling.request_table import RequestTable
from manylora.engine.scheduling.scheduler import Scheduler
from manylora.memory import prefix_cache
from manylora.memory.arena import HostSlab, SwapSpace
from manylora.memory.eviction import Evictor
from manylora.memory.pool import NO_OWNER, PageKind, PagePool
from manylora.memory.prefix_cache import PrefixBlock, PrefixCache, TokenChain

Plant = Callable[[pytest.MonkeyPatch], None]


def publish_before_the_step_is_complete(patch: pytest.MonkeyPatch) -> None:
    plan = Scheduler.plan

    def early(self: Scheduler) -> StepPlan | None:
        planned = plan(self)
        for chunk in planned.chunks if planned is not None else []:
            state = self.table.requests[chunk.request_id]
            num_tokens = chunk.start + len(chunk.token_ids)
            self.table.kv.publish(state, num_tokens // state.pages.geometry.page_tokens)
        return planned

    patch.setattr(Scheduler, "plan", early)


def hold_found_blocks_only_after_making_room(patch: pytest.MonkeyPatch) -> None:
    start, take = KvPages.start, KvPages._take
    late: list[Sequence[PrefixBlock]] = []

    def take_first(self: KvPages, state: RequestState, count: int) -> list[int] | None:
        pages = take(self, state, count)
        while late:
            PrefixCache.hold(self.prefixes, late.pop())
        return pages

    def start_late(self: KvPages, *args: Any) -> bool:
        with patch.context() as starting:
            starting.setattr(self.prefixes, "hold", late.append)
            return start(self, *args)

    patch.setattr(KvPages, "start", start_late)
    patch.setattr(KvPages, "_take", take_first)


def leave_the_prefixes_of_an_evicted_adapter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "evict_group", lambda *_: None)


def free_host_pages_before_they_are_read(patch: pytest.MonkeyPatch) -> None:
    free = HostSlab.free
    patch.setattr(HostSlab, "free", lambda self, pages, *_: free(self, pages))


def lease_an_older_generation(patch: pytest.MonkeyPatch) -> None:
    acquire = residency.Residency.acquire
    patch.setattr(
        residency.Residency,
        "acquire",
        lambda self, digest: (
            (at := acquire(self, digest)) and at._replace(generation=at.generation - 1)
        ),
    )


def reuse_pages_at_once(patch: pytest.MonkeyPatch) -> None:
    free = PagePool.free
    patch.setattr(PagePool, "free", lambda self, pages, _: free(self, pages, 0))


def share_prefixes_between_tenants(patch: pytest.MonkeyPatch) -> None:
    seed = prefix_cache.chain_seed
    patch.setattr(kv_pages, "chain_seed", lambda _, *fields: seed("", *fields))


def share_prefixes_between_adapters(patch: pytest.MonkeyPatch) -> None:
    seed = prefix_cache.chain_seed
    patch.setattr(kv_pages, "chain_seed", lambda tenant, *_: seed(tenant))


def find_all_of_a_prompt(patch: pytest.MonkeyPatch) -> None:
    def find(self: KvPages, state: RequestState) -> list[PrefixBlock]:
        num_blocks = state.num_tokens // self.geometry.page_tokens
        if not self.is_sharing or state.first_output.keeps_prompt_logprobs or not num_blocks:
            return []
        return self.prefixes.find(self._chain(state, num_blocks), num_blocks)

    patch.setattr(KvPages, "_find", find)


def trust_names_that_leave_out_what_is_before(patch: pytest.MonkeyPatch) -> None:
    class Forgetful(TokenChain):
        def extend(self, token_ids: Sequence[int]) -> None:
            seed = self._last
            for start in range(0, len(token_ids) - self._block_tokens + 1, self._block_tokens):
                self._last = seed
                super().extend(token_ids[start : start + self._block_tokens])
            self._last = seed

    def find(
        self: PrefixCache, chain: TokenChain, most: int, known: object = ()
    ) -> list[PrefixBlock]:
        blocks = map(self._blocks.get, chain.digests[:most])
        return [block for block in takewhile(bool, blocks) if block is not None]

    patch.setattr(kv_pages, "TokenChain", Forgetful)
    patch.setattr(PrefixCache, "find", find)


def fork_without_the_partial_page(patch: pytest.MonkeyPatch) -> None:
    fill = KvPages._fill

    def lazy(self: KvPages, hit: PrefixHit, own: list[int], draft: PlanBuilder) -> int:
        filled = fill(self, hit, own, draft)
        draft.plan.copies = []
        return filled

    patch.setattr(KvPages, "_fill", lazy)


def leave_pages_as_they_were_found(patch: pytest.MonkeyPatch) -> None:
    plan = Scheduler.plan

    def unzeroed(self: Scheduler) -> StepPlan | None:
        planned = plan(self)
        return replace(planned, zero_pages=[]) if planned is not None else None

    patch.setattr(Scheduler, "plan", unzeroed)


def swap_pages_in_out_of_order(patch: pytest.MonkeyPatch) -> None:
    take = SwapSpace.take
    patch.setattr(
        SwapSpace,
        "take",
        lambda self, count: pages and pages[::-1] if (pages := take(self, count)) else pages,
    )
    swap_out = KvPages._swap_out

    def crossed(self: KvPages, state: RequestState, draft: PlanBuilder) -> Any:
        swapped = swap_out(self, state, draft)
        if swapped is not None:
            swapped.host_pages.reverse()
        return swapped

    patch.setattr(KvPages, "_swap_out", crossed)


def keep_the_host_pages_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvPages, "forget_swapped", lambda *_: None)


def keep_the_lease_of_the_preempted(patch: pytest.MonkeyPatch) -> None:
    release = RequestTable.release_lease

    def forgetful(self: RequestTable, state: RequestState) -> None:
        if state.request_id in self.requests and state in self.running:
            state.adapter.lease = None
        else:
            release(self, state)

    patch.setattr(RequestTable, "release_lease", forgetful)


def preempt_whoever_is_newest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestPages, "is_protected", False)


def use_an_adapter_before_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    place = transfers.Transfers.place

    def eager(self: transfers.Transfers, entry: Any) -> None:
        place(self, entry)
        if entry.stage is Stage.COPYING:
            self.entries.advance(entry, Stage.DEVICE)
            self.tables.write(entry.slot, entry.image.layout, entry.pages, {}, {})

    patch.setattr(transfers.Transfers, "place", eager)


def forget_who_uses_an_image(patch: pytest.MonkeyPatch) -> None:
    hold = host_images.HostImages.hold

    def unused(self: host_images.HostImages, digest: str) -> Any:
        image = hold(self, digest)
        if image is not None:
            image.users -= 1
        return image

    patch.setattr(host_images.HostImages, "hold", unused)
    patch.setattr(host_images.HostImages, "release", lambda *_: None)


def lose_the_pages_of_a_failed_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host_images.HostImages, "cancel", lambda *_: None)


def take_a_slot_twice(patch: pytest.MonkeyPatch) -> None:
    take = AdapterSlots.take

    def generous(self: AdapterSlots, digest: str) -> SlotLease | None:
        lease = take(self, digest)
        if lease is not None:
            self._pool._free.append(lease.slot)
        return lease

    patch.setattr(AdapterSlots, "take", generous)


def point_at_pages_in_another_order(patch: pytest.MonkeyPatch) -> None:
    arrive = transfers.Transfers._arrive

    def shuffled(self: transfers.Transfers, entry: Any, image: Any) -> None:
        entry.pages.reverse()
        arrive(self, entry, image)

    patch.setattr(transfers.Transfers, "_arrive", shuffled)


def drop_a_finished_load(patch: pytest.MonkeyPatch) -> None:
    take_done = load_threads.LoadQueue.take_done
    patch.setattr(load_threads.LoadQueue, "take_done", lambda self: take_done(self)[1:])


def evict_what_is_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evictor, "withdraw", lambda *_: None)


def count_a_release_twice(patch: pytest.MonkeyPatch) -> None:
    release = PrefixCache.release

    def double(self: PrefixCache, blocks: Sequence[PrefixBlock], last_step: int) -> None:
        release(self, blocks, last_step)
        release(self, [block for block in blocks[:1] if block.refs > 0], last_step)

    patch.setattr(PrefixCache, "release", double)


def forget_a_token_on_preemption(patch: pytest.MonkeyPatch) -> None:
    restart = RequestState.restart

    def lossy(self: RequestState) -> None:
        restart(self)
        if self.output_token_ids:
            self.output_token_ids.pop()

    patch.setattr(RequestState, "restart", lossy)


def believe_in_a_swap_that_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestTable, "lose_swapped", lambda *_: None)


def tell_kv_pages_of_an_adapter_as_those_of_the_base(patch: pytest.MonkeyPatch) -> None:
    allocate = PagePool.allocate

    def forgetful(
        self: PagePool, count: int, kind: PageKind, owner: int = NO_OWNER
    ) -> list[int] | None:
        return allocate(self, count, kind, NO_OWNER if kind == "kv" else owner)

    patch.setattr(PagePool, "allocate", forgetful)


def let_the_paused_lose_a_page(patch: pytest.MonkeyPatch) -> None:
    pause = Preemption.pause

    def careless(self: Preemption, state: RequestState, draft: PlanBuilder) -> None:
        pause(self, state, draft)
        table = state.pages.table
        if state in self._table.paused and table.num_blocks > len(state.pages.held):
            self._kv.pool.free(table.by_block(table.num_blocks - 1), state.pages.last_step)
            table.pages[:] = [pages[:-1] for pages in table.pages]

    patch.setattr(Preemption, "pause", careless)


def compute_for_the_paused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestTable, "rows", lambda self: list(self.running))


def forget_the_counters_of_the_idle(patch: pytest.MonkeyPatch) -> None:
    retire = FairShare.retire

    def forgetful(self: FairShare, child: FairShare) -> None:
        retire(self, child)
        self.idle.clear()
        self._ceiling = 0.0

    patch.setattr(FairShare, "retire", forgetful)


def charge_a_counter_backwards(patch: pytest.MonkeyPatch) -> None:
    charge = FairOrder.charge
    patch.setattr(
        FairOrder,
        "charge",
        lambda self, charges: charge(self, [(place, -units) for place, units in charges]),
    )


def give_out_more_rows_than_there_are(patch: pytest.MonkeyPatch) -> None:
    num_rows = RequestTable.num_rows
    patch.setattr(RequestTable, "num_rows", property(lambda self: max(num_rows.fget(self) - 1, 0)))  # type: ignore[attr-defined]


DEFECTS: tuple[Plant, ...] = tuple(
    plant
    for plant in list(globals().values())
    if isfunction(plant) and plant.__module__ == __name__
)
