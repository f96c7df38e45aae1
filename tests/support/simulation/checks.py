"""Checks of an engine after every pump and at every plan.

Pages, adapters, requests, rows, pauses and counters of service. How far the service of two tenants may differ is a goal
of `fairness`: here tenants wait for loads and pages all the time, which no order can make up for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from manylora.adapters.residency.entry import Stage
from manylora.engine.core import EngineCore
from manylora.engine.scheduling.plan import StepPlan
from manylora.engine.scheduling.request_table import MAX_BYPASSES
from manylora.errors import ManyloraError
from manylora.memory.pool import PAGE_STATES, PageState
from manylora.memory.prefix_cache import PrefixBlock
from simulation.build import SimulatedEngine
from simulation.pages import DevicePages, Fail, Keys, weights_of
from simulation.scenario import Scenario

MAX_BARREN_STEPS = 64
"""Steps in a row that compute nothing: each has a preemption that a request is protected from for a page of tokens."""
MAX_PAUSED_S = 5.0
"""Longest time without a step while requests have pages; copies and steps are much shorter."""
MAX_IDLE_S = 30.0
"""Longest time without a step while a request could run; a load that hangs takes ten times as long."""
STATUS_EVERY = 16
"""Pumps from one look at the engine's report of itself to the next; it takes longer than all other checks."""
RUNNING = "with pages"
UNOWNED = bytes(
    0 if state == "quarantine" else code for code, state in enumerate(PAGE_STATES)
).ljust(256)
"""Takes pages in quarantine for free ones."""
Owners = dict[int, tuple[PageState, int]]
"""Kind and adapter slot of each page that somebody has."""
Standing = tuple[list[list[int]], int, int]
"""Pages, computed tokens and preemptions of a request."""


class Checks:
    """Watches one engine.

    Args:
        engine: With its real parts.
        scenario: What it is asked.
        device: What its pages hold.
        fail: Takes note of what must not happen.
    """

    def __init__(
        self, engine: SimulatedEngine, scenario: Scenario, device: DevicePages, fail: Fail
    ) -> None:
        self._engine = engine
        self._scenario = scenario
        self._device = device
        self._fail = fail
        self._table = engine.scheduler.table
        self._num_looks = 0
        self._progress: dict[str, tuple[int, int]] = {}
        """By request: where it stood when preempted last, and how often it was."""
        self._idle_since: dict[str, float] = {}
        """Since when requests could have run while nothing was computed; `RUNNING` stands for those with pages."""
        self._published: dict[PrefixBlock, list[list[int]]] = {}
        """Contents of the pages of each cached block when it was first seen."""
        self._paused: dict[str, Standing] = {}
        self._counters: dict[tuple[object, ...], float] = {}
        self._service: dict[str, float] = {}
        self._ran: set[str] = set()
        """Requests of the last plan."""
        self._bypasses: dict[str, int] = {}
        self._num_barren = 0
        self.num_pauses = 0

    def see(self, plan: StepPlan) -> None:
        """At a plan, before it is carried out: its requests have rows, and it is no larger than a step may be."""
        self._idle_since.clear()
        self._ran = {chunk.request_id for chunk in plan.chunks}
        for chunk in plan.chunks:
            state = self._table.requests.get(chunk.request_id)
            if state is None or state.status != "running" or not state.place.has_row:
                self._fail(f"{chunk.request_id} is in the step without a row: {state}")
        if len(self._ran) != len(plan.chunks) or len(plan.chunks) > self._scenario.max_running:
            self._fail(
                f"step {plan.step} has {len(plan.chunks)} chunks for {len(self._ran)} requests"
            )
        if plan.num_tokens > self._scenario.step_tokens:
            self._fail(f"step {plan.step} computes {plan.num_tokens} tokens")
        self._num_barren = 0 if plan.chunks else self._num_barren + 1
        if self._num_barren > MAX_BARREN_STEPS:
            self._fail(
                f"{self._num_barren} steps in a row computed nothing, up to step {plan.step}"
            )

    def look(self, core: EngineCore, open_requests: Set[str]) -> None:
        """After a pump; `open_requests` are those that clients wait for."""
        try:
            core.check()
        except ManyloraError as error:
            self._fail(f"check: {error}")
        if self._table.requests.keys() != open_requests:
            self._fail(
                f"known to scheduler or client alone: {self._table.requests.keys() ^ open_requests}"
            )
        self._check_owners()
        self._check_contents()
        self._check_uses()
        self._check_progress()
        self._check_places()
        self._check_paused()
        self._check_service()
        self._num_looks += 1
        if self._num_looks % STATUS_EVERY == 0:
            self._check_status(core)

    def look_idle(self, now_s: float) -> None:
        """After a pump that computed nothing: nobody may be able to run.

        A load that hangs is in the way of its own requests alone. What only waits is dropped first, for which the
        engine may take its time while something else is under way.
        """
        engine = self._engine
        if self._table.running:
            since_s = self._idle_since.get(RUNNING, now_s)
            self._idle_since = {RUNNING: since_s}
            if now_s - since_s > MAX_PAUSED_S:
                self._fail(
                    f"nothing was computed for {MAX_PAUSED_S} seconds, but requests have pages"
                )
            return
        entries = engine.residency.entries.values()
        waiting = sum(
            entry.num_pages for entry in entries if entry.stage is Stage.DEVICE and entry.holds
        )
        available = engine.evictor.num_available + waiting - engine.pool.capacity // 8
        able: dict[str, float] = {}
        for state in self._table.waiting:
            digest = state.adapter.digest
            size = 0 if digest is None else self._scenario.adapters[digest]
            count = engine.geometry.pages(max(state.num_tokens, state.pages.progress_mark)) + size
            is_read = digest is None or engine.residency.state(digest) != "stored"
            if is_read and count <= available and state.waiting_reason != "FORK":
                able[state.request_id] = self._idle_since.get(state.request_id, now_s)
        self._idle_since = able
        overlooked = [key for key, since_s in able.items() if now_s - since_s > MAX_IDLE_S]
        if overlooked:
            self._fail(
                f"nothing was computed for {MAX_IDLE_S} seconds, but these could run: {overlooked}"
            )

    def _check_owners(self) -> Owners:
        """Every page that the pool does not count as free has exactly one owner, of the kind that the pool says."""
        entries = self._engine.residency.entries.values()
        slots = {entry.ref.digest: entry.slot for entry in entries}
        owners: Owners = {}
        num_owned = 0
        for block in self._engine.prefixes.blocks:
            num_owned += len(block.pages)
            owners |= dict.fromkeys(block.pages, ("prefix", slots.get(block.group or "", -1)))
        for state in self._table.running:
            own = state.pages.own_pages()
            num_owned += len(own)
            owners |= dict.fromkeys(own, ("kv", slots.get(state.adapter.digest or "", -1)))
        for entry in entries:
            num_owned += len(entry.pages)
            owners |= dict.fromkeys(entry.pages, ("adapter", entry.slot))
        if num_owned != len(owners):
            self._fail(f"{num_owned} pages are owned, {len(owners)} different ones")
        states = bytes(self._engine.pool.marks()[0]).translate(UNOWNED)
        expected = bytearray(len(states))
        for page, (kind, _) in owners.items():
            expected[page - 1] = PAGE_STATES.index(kind)
        if states != expected:
            wrong = [
                page
                for page, codes in enumerate(zip(states, expected, strict=True), 1)
                if len(set(codes)) > 1
            ]
            self._fail(
                f"the pool has {[(page, self._engine.pool.state(page), owners.get(page)) for page in wrong]}"
            )
        return owners

    def _check_contents(self) -> None:
        """Cached blocks never change, and the pages of an adapter on the device hold its weights."""
        contents = self._device.contents
        published = {}
        for block in self._engine.prefixes.blocks:
            cells = [
                content.cells if isinstance(content := contents[page], Keys) else []
                for page in block.pages
            ]
            before = self._published.get(block)
            if before is None:
                before = [list(row) for row in cells]
                if any(len(row) != self._scenario.page_tokens for row in cells):
                    self._fail(f"a block is cached that is not full: {cells}")
            elif cells != before:
                self._fail(f"a cached block held {before} and now holds {cells}")
            published[block] = before
        self._published = published
        for entry in self._engine.residency.entries.by_stage[Stage.DEVICE].values():
            held = [contents[page] for page in entry.pages]
            if held != weights_of(entry.ref.digest, len(held)):
                self._fail(f"{entry.ref.digest[:14]} is on the device, but its pages hold {held}")

    def _check_uses(self) -> None:
        """Adapters are counted as used by as many requests as use them."""
        residency = self._engine.residency
        running = Counter(
            lease.digest
            for state in self._table.running
            if (lease := state.adapter.lease) is not None
        )
        holding = Counter(
            state.adapter.digest for state in self._table.waiting if state.adapter.is_holding
        )
        for digest in self._scenario.adapters:
            entry = residency.entries.get(digest)
            if running[digest] != (entry.running if entry is not None else 0):
                self._fail(f"{running[digest]} requests run with {digest[:14]}: {entry}")
            if (
                holding[digest] != (entry.holds if entry is not None else 0)
                and digest not in residency.untold
            ):
                self._fail(f"{holding[digest]} requests hold {digest[:14]}: {entry}")

    def _check_status(self, core: EngineCore) -> None:
        """The report of the engine agrees with the owners, page for page."""
        status = core.status(is_detailed=True)  # takes in the step in flight
        owners = self._check_owners()
        pool = self._engine.pool
        if status.base_running != sum(
            state.adapter.digest is None for state in self._table.running
        ):
            self._fail(f"the status has {status.base_running} running requests of the base")
        waiting = {tenant: load.waiting for tenant, load in status.tenants.items() if load.waiting}
        if waiting != Counter(state.place.key.tenant for state in self._table.waiting):
            self._fail(f"the status has waiting requests {waiting}")
        slots = {
            resident.digest: resident.slot for resident in status.residents if resident.slot >= 0
        }
        if slots != {
            entry.ref.digest: entry.slot
            for entry in self._engine.residency.entries.values()
            if entry.pages
        }:
            self._fail(f"the status has slots {slots}")
        expected = [owners.get(page, (pool.state(page), -1)) for page in range(1, pool.num_pages)]
        told = status.page_map
        assert told is not None
        shown = [
            (use.kind, use.owner)
            for count, index in told.runs
            for use in [told.uses[index]] * count
        ]
        if shown != expected or told.pages_per_cell != 1:
            self._fail(f"the status shows {shown}, not {expected}")
        if Counter(kind for kind, _ in shown) != Counter(
            {kind: n for kind, n in status.pages.items() if n}
        ):
            self._fail(f"the status shows {Counter(shown)} and counts {status.pages}")

    def _check_progress(self) -> None:
        """No request is preempted twice without a page of progress in between."""
        for state in self._table.waiting:
            mark, num_preemptions = self._progress.get(state.request_id, (0, 0))
            pages = state.pages
            if pages.num_preemptions > num_preemptions:
                made = pages.progress_mark - mark
                if num_preemptions and made < self._scenario.page_tokens:
                    self._fail(f"{state.request_id} is preempted again after {made} tokens")
                self._progress[state.request_id] = pages.progress_mark, pages.num_preemptions

    def _check_places(self) -> None:
        """Every request is in exactly one of waiting, paused and in the step."""
        table = self._table
        waiting = [state.request_id for state in table.waiting]
        paused = [state.request_id for state in table.paused]
        rows = [state.request_id for state in table.running if state.place.has_row]
        if sorted(waiting + paused + rows) != sorted(table.requests):
            self._fail(
                f"waiting {waiting}, paused {paused}, in the step {rows}: not each request once"
            )
        if {state.request_id for state in table.running if not state.place.has_row} != set(paused):
            self._fail(f"paused are {paused}, without a row are others")
        if len(rows) > self._scenario.max_running or len(rows) != table.num_rows:
            self._fail(
                f"{rows} have rows, of {self._scenario.max_running}; told are {table.num_rows}"
            )
        before, self._bypasses = self._bypasses, {}
        for state in table.waiting:
            was = before.get(state.request_id, 0)
            if state.num_bypasses > was >= MAX_BYPASSES and state.num_bypasses < was + MAX_BYPASSES:
                self._fail(
                    f"{state.request_id} was overtaken in {state.num_bypasses} steps"
                )  # a stall adds the limit
            self._bypasses[state.request_id] = state.num_bypasses

    def _check_paused(self) -> None:
        """A request that was paused and sat the step out has what it had, or gave all of it up."""
        before, self._paused = self._paused, {}
        for state in self._table.paused:
            standing = (
                [pages.tolist() for pages in state.pages.table.pages],
                state.pages.num_computed,
                state.pages.num_preemptions,
            )
            self._paused[state.request_id] = standing
            held = before.get(state.request_id)
            if held is None:
                self.num_pauses += 1
            elif (
                held != standing
                and held[2] == state.pages.num_preemptions
                and state.request_id not in self._ran
            ):
                self._fail(f"{state.request_id} was paused with {held}, and now has {standing}")
            if state.pages.num_computed and not state.pages.table.num_blocks:
                self._fail(f"{state.request_id} is paused without pages")
        self._ran = set()

    def _check_service(self) -> None:
        """Counters of service only grow, whatever becomes of requests, weights and idle tenants.

        Those of lanes, tenants and adapters are looked at while they have requests, by parent and name. A parent that
        comes back after it had nothing left to remember is another one: its tickets tell.
        """
        for tenant in self._scenario.tenants:
            known = self._table.service.tenants.get(tenant)
            units = 0.0 if known is None else known.service
            if units < self._service.get(tenant, 0.0):
                self._fail(f"{tenant} was served {self._service[tenant]} units and now {units}")
            self._service[tenant] = units
        left = [self._table.order.root]
        while left:
            share = left.pop()
            for name, child in share.children.items():
                key = (share.ticket, name)
                if child.counter < self._counters.get(key, 0.0) - 1e-9:
                    self._fail(
                        f"the counter of {key} fell from {self._counters.get(key, 0.0)} to {child.counter}"
                    )
                self._counters[key] = child.counter
                left.append(child)
