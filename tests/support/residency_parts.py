"""A small residency with real parts: tiny base, poisoned arena, blobs in a folder, and executors on a leash."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from adapters_factory import RandomLora, random_lora, tiny_base
from manylora.adapters.base_shape import BaseShape
from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.lora.step import AdapterTables
from manylora.adapters.ref import AdapterRef
from manylora.adapters.residency.images import HostImage, HostImages
from manylora.adapters.residency.load_threads import LoadQueue, TaskExecutor
from manylora.adapters.residency.loader import AdapterLoader
from manylora.adapters.residency.residency import Residency
from manylora.adapters.residency.transfers import Transfers
from manylora.lora_rows import PITCH_BYTES
from manylora.memory.arena import Arena, HostSlab, PageCopier
from manylora.memory.eviction import Evictor, PageCosts
from manylora.memory.geometry import PageGeometry, page_geometry
from manylora.memory.pool import PagePool
from manylora.memory.prefix_cache import PrefixBlock, PrefixCache, TokenChain, chain_seed
from stored_adapters import store_adapter

COSTS = PageCosts(copy_s=0.001, load_s=0.01, token_s=0.02)


def tiny_geometry(base: BaseShape, dtype: torch.dtype = torch.float32) -> PageGeometry:
    """Pages of 16 or 32 KiB: an adapter of rank 8 takes three."""
    return page_geometry(
        num_layers=base.num_layers,
        num_kv_heads=4,
        head_dim=32,
        dtype_bytes=dtype.itemsize,
        largest_row_features=base.largest_row_features,
    )


class StepwiseExecutor:
    """Runs submitted work only when told to, in order."""

    def __init__(self) -> None:
        self.pending: deque[tuple[Callable[[], None], Future[None]]] = deque()

    def submit(self, fn: Callable[[], None], /) -> Future[None]:
        future: Future[None] = Future()
        self.pending.append((fn, future))
        return future

    def run_one(self) -> bool:
        if not self.pending:
            return False
        fn, future = self.pending.popleft()
        try:
            future.set_result(fn())
        except Exception as error:  # noqa: BLE001 - as a thread pool does
            future.set_exception(error)
        return True

    def run_all(self) -> None:
        while self.run_one():
            pass

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - a thread pool's signature
        self.pending.clear()


class CountingLoader(AdapterLoader):
    """The real loader, which counts what it packed."""

    num_loads = 0

    def load(self, ref: AdapterRef, *, is_paced: bool = True) -> HostImage:
        self.num_loads += 1
        return super().load(ref, is_paced=is_paced)


class WatchedCopier(PageCopier):
    """The real copier, which remembers the pages that it wrote and can be told to fail."""

    fails = False
    failures = 0

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.pages_at_once = 0
        """Every copy is a job of the executor, unless a test wants it otherwise."""
        self.copied: list[list[int]] = []

    def copy(
        self, sources: Sequence[torch.Tensor], pages: Sequence[int], fence: torch.cuda.Event | None
    ) -> None:
        self._note(pages)
        super().copy(sources, pages, fence)

    def copy_now(self, sources: Sequence[torch.Tensor], pages: Sequence[int]) -> None:
        self._note(pages)
        super().copy_now(sources, pages)

    def _note(self, pages: Sequence[int]) -> None:
        if self.fails:
            self.failures += 1
            raise RuntimeError("the device does not answer")
        self.copied.append(list(pages))


class CountingTables(AdapterTables):
    """The real tables, which count the rows written."""

    num_written = 0

    def write(self, *args: object) -> None:
        self.num_written += 1
        super().write(*args)  # type: ignore[arg-type]


class ResidencyParts:
    """All of a residency's parts; `clock` is the second it is, in its one element."""

    def __init__(
        self,
        folder: Path,
        *,
        num_pages: int = 24,
        slab_pages: int = 12,
        slots: int = 4,
        max_rank: int = 64,
        notify: Callable[[], None] | None = None,
        executors: tuple[TaskExecutor, TaskExecutor] | None = None,
    ) -> None:
        self.base = tiny_base()
        self.loras: dict[str, RandomLora] = {}
        """By digest."""
        self.clock = [0.0]
        geometry = tiny_geometry(self.base)
        self.arena = Arena(geometry, num_pages, torch.device("cpu"), torch.float32)
        self.arena.poison(range(1, num_pages))
        self.pool = PagePool(num_pages, on_release=self.arena.poison)
        self.slab = HostSlab(slab_pages, geometry.page_bytes, pinned=False)
        self.tables = CountingTables(slots, self.base, max_rank, geometry, self.arena.device)
        self.blobs = LocalBlobs(folder / "blobs")
        self.images = HostImages(self.slab)
        self.loader = CountingLoader(
            self.blobs,
            self.images,
            self.base,
            geometry,
            torch.float32,
            max_rank,
            self.pool.capacity - 1,
        )
        self.copier = WatchedCopier(self.arena)
        self.evictor = Evictor(self.pool, clock=lambda: self.clock[0])
        self.prefixes = PrefixCache(
            self.pool, self.evictor, block_s=COSTS.token_s, clock=lambda: self.clock[0]
        )
        self.loads, self.copies = StepwiseExecutor(), StepwiseExecutor()
        loads, copies = executors or (self.loads, self.copies)
        self.transfers = Transfers(
            self.loader,
            self.copier,
            self.pool,
            self.tables,
            self.evictor,
            load_queue=LoadQueue(loads, notify),
            copy_queue=LoadQueue(copies, notify),
            clock=lambda: self.clock[0],
        )
        self.residency = Residency(self.transfers, COSTS, self.prefixes)

    def settle(self, step: int = 0) -> list[str]:
        """Run all loads, copies and ticks there are to run; digests of failed loads."""
        failed = []
        for _ in range(8):
            self.loads.run_all()
            self.copies.run_all()
            failed += [failure.digest for failure in self.residency.tick(step)]
        return failed

    def load(self, ref: AdapterRef) -> int:
        """Bring an adapter to the device for a test, held by nobody, and return its slot."""
        self.residency.hold(ref)
        self.settle()
        lease = self.residency.acquire(ref.digest)
        assert lease is not None
        self.residency.release(ref.digest)
        self.residency.release_hold(ref.digest)
        return lease.slot

    def evict_all(self) -> int:
        """Have the evictor take all it can; returns the pages freed."""
        before = self.pool.num_free
        while self.evictor.make_room(self.pool.num_free + 1):
            pass
        return self.pool.num_free - before

    def cache_blocks(
        self, digest: str | None, count: int, *, seed: str = "", step: int = 0
    ) -> list[PrefixBlock]:
        """Cache a chain of blocks that were computed with an adapter (or the base), held by the caller."""
        chain = TokenChain(chain_seed(digest or "", seed), 1)
        chain.extend(range(count))
        blocks: list[PrefixBlock] = []
        for index in range(count):
            pages = self.pool.allocate(1, "kv")
            if pages is None:
                break
            block = self.prefixes.publish(
                chain, index, pages, blocks[-1] if blocks else None, digest
            )
            assert block is not None
            if block.pages != pages:
                self.pool.free(pages, step)
            blocks.append(block)
        return blocks

    def matches(self, slot: int, lora: RandomLora) -> bool:
        """Whether the arena holds exactly this adapter where the tables say."""
        unit = PITCH_BYTES // self.arena.geometry.dtype_bytes
        elements = self.arena.elements.view(-1)
        for (layer, module), a in lora.lora_a.items():
            for part, rows in ((0, a), (1, lora.lora_b[layer, module].t())):
                pitch = -(-rows.shape[1] // unit) * unit
                for group in range(-(-len(rows) // 8)):
                    wanted = rows[8 * group : 8 * group + 8].to(self.arena.dtype)
                    start = int(self.tables.host_offsets[slot, layer, module, part, group]) * unit
                    found = elements[start : start + 8 * pitch].view(8, pitch)
                    if (
                        not torch.equal(found[: len(wanted), : rows.shape[1]], wanted)
                        or found[len(wanted) :].any()
                    ):
                        return False
        return True


def store(parts: ResidencyParts, folder: Path, loras: Sequence[RandomLora]) -> list[AdapterRef]:
    """Write and store adapters, as PEFT folders and then as blobs."""
    refs = []
    for index, lora in enumerate(loras):
        ref = store_adapter(
            parts.blobs, lora.save(folder / f"adapter-{index}"), parts.base, max_rank=256
        )
        parts.loras[ref.digest] = lora
        refs.append(ref)
    return refs


def prepare(
    folder: Path, count: int = 3, *, rank: int = 8, **sizes: Any
) -> tuple[ResidencyParts, list[AdapterRef], int]:
    """Parts, stored adapters of equal size, and the pages of one."""
    parts = ResidencyParts(folder, **sizes)
    refs = store(parts, folder, [random_lora(parts.base, rank, seed=seed) for seed in range(count)])
    probe = ResidencyParts(folder / "probe", num_pages=200)
    probe.blobs.root = parts.blobs.root
    probe.load(refs[0])
    pages = probe.residency.pages_needed(refs[0])
    assert pages is not None
    return parts, refs, pages
