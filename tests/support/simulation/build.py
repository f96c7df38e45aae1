"""Builds an engine around a simulated device and store: the one place in tests that joins an engine's parts by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from manylora.adapters.residency.images import HostImages
from manylora.adapters.residency.load_threads import LoadQueue, TaskExecutor
from manylora.adapters.residency.residency import Residency
from manylora.adapters.residency.transfers import Transfers
from manylora.config import SchedulerConfig
from manylora.engine.core import EngineCore
from manylora.engine.execution.memory_plan import CPU_STEP_TOKENS
from manylora.engine.execution.runner import ModelRunner
from manylora.engine.fairness.service import Prices
from manylora.engine.grammar.compiler import Grammars
from manylora.engine.grammar.matcher import Matcher
from manylora.engine.scheduling.kv_pages import KvPages
from manylora.engine.scheduling.request_state import ModelLimits
from manylora.engine.scheduling.scheduler import Scheduler
from manylora.memory.arena import SwapSpace
from manylora.memory.eviction import Evictor, PageCosts
from manylora.memory.geometry import PageGeometry
from manylora.memory.pool import PagePool
from manylora.memory.prefix_cache import PrefixBlock, PrefixCache
from simulation.adapters import SimulatedTables
from simulation.pages import SimulatedSlab


def small_geometry(page_tokens: int, num_groups: int = 1) -> PageGeometry:
    """Pages of `page_tokens` tokens, in layer groups of one layer."""
    return PageGeometry(
        page_bytes=1024,
        page_tokens=page_tokens,
        num_groups=num_groups,
        layers_per_group=1,
        num_layers=num_groups,
        num_kv_heads=1,
        head_dim=32,
        dtype_bytes=4,
    )


def no_grammar(text: str) -> Matcher:
    """No request of a simulation has a grammar."""
    raise AssertionError(f"a request of a simulation asks for a grammar: {text}")


class WatchedResidency(Residency):
    """Shows what it has."""

    @property
    def untold(self) -> set[str]:
        """Adapters whose failure the next tick tells, which ends those who wait."""
        return {failure.digest for failure in self._failures}


class WatchedPrefixCache(PrefixCache):
    """Shows what it has."""

    @property
    def blocks(self) -> Collection[PrefixBlock]:
        return self._blocks.values()


class SimulatedEngine:
    """The real scheduler, residency, pool and caches; store, copies, tables of the kernels and runner are simulated.

    An heir makes the runner and gives it to `start`.

    Args:
        clock: What the engine sees of the time.
        config: Of the scheduler.
        geometry: Sizes of the pages.
        limits: What the model bounds.
        costs: What it takes to have a page again.
        num_pages: Pages of the pool; the zero page comes on top.
        host_pages: Pages of the host slab.
        max_swap_pages: Those that preempted requests may have; 0 is without swapping.
        slots: Adapters on the device.
        make_loader: Makes the loader of adapters.
        copier: Copies adapters to the device.
        executors: Run loads and copies.
        is_caching: Whether there is a prefix cache.
        prices: Of the work of a step.
        poison: Told of pages that come free.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        config: SchedulerConfig,
        geometry: PageGeometry,
        limits: ModelLimits,
        costs: PageCosts,
        num_pages: int,
        host_pages: int,
        max_swap_pages: int,
        slots: int,
        make_loader: Callable[[HostImages, SimulatedSlab], Any],
        copier: object,
        executors: tuple[TaskExecutor, TaskExecutor],
        is_caching: bool = True,
        prices: Prices | None = None,
        poison: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.clock = clock
        self.geometry = geometry
        self.pool = PagePool(num_pages + 1, on_release=poison)
        self.slab = SimulatedSlab(host_pages)
        self.images = HostImages(self.slab)
        self.tables = SimulatedTables(slots)
        self.evictor = Evictor(self.pool, clock)
        block_s = geometry.page_tokens * costs.token_s
        self.prefixes = WatchedPrefixCache(self.pool, self.evictor, block_s, clock)
        self.swap = SwapSpace(self.slab, self.images.make_room, max_swap_pages)
        self.loader = make_loader(self.images, self.slab)
        transfers = Transfers(
            self.loader,
            cast(Any, copier),
            self.pool,
            cast(Any, self.tables),
            self.evictor,
            load_queue=LoadQueue(executors[0]),
            copy_queue=LoadQueue(executors[1]),
            clock=clock,
        )
        self.residency = WatchedResidency(transfers, costs, self.prefixes)
        kv = KvPages(
            geometry,
            self.pool,
            self.evictor,
            prefixes=self.prefixes,
            swap=self.swap,
            costs=costs,
            is_sharing=is_caching,
        )
        self.scheduler = Scheduler(
            config,
            kv,
            self.residency,
            limits,
            step_tokens=config.step_tokens or CPU_STEP_TOKENS,
            prices=prices or Prices(),
            grammars=Grammars(no_grammar, executors[0]),
            clock=clock,
            draw_seed=lambda: 7,
        )

    def start(
        self,
        runner: object,
        set_stepping: Callable[[int, int], None] = lambda _running, _held_up: None,
        *,
        overlaps: bool = False,
    ) -> EngineCore:
        """The core, around a runner."""
        return EngineCore(
            self.scheduler,
            cast(ModelRunner, runner),
            boot_id="boot",
            overlaps=overlaps,
            set_stepping=set_stepping,
            clock=self.clock,
        )
