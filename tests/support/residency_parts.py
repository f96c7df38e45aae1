"""A small residency with real parts: tiny base, poisoned arena, blobs in a folder, and an executor on a leash."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch

from adapters_factory import RandomLora, tiny_base
from stored_adapters import store_adapter
from weft.adapters.base_shape import BaseShape
from weft.adapters.blobs import LocalBlobs
from weft.adapters.ref import AdapterRef
from weft.adapters.residency import Residency
from weft.adapters.tables import AdapterTables
from weft.memory.arena import Arena
from weft.memory.geometry import PageGeometry, page_geometry
from weft.memory.host_slab import HostSlab
from weft.memory.pool import PagePool


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
    """Runs submitted work only when told to, in order; or at once when `eager`."""

    def __init__(self, eager: bool = False) -> None:
        self.eager = eager
        self.pending: deque[tuple[Callable[[], None], Future[None]]] = deque()

    def submit(self, fn: Callable[[], None], /) -> Future[None]:
        future: Future[None] = Future()
        self.pending.append((fn, future))
        if self.eager:
            self.run_all()
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


@dataclass
class ResidencyParts:
    base: BaseShape
    blobs: LocalBlobs
    pool: PagePool
    arena: Arena
    slab: HostSlab
    tables: AdapterTables
    executor: StepwiseExecutor
    residency: Residency
    loras: dict[str, RandomLora] = field(default_factory=dict)
    """By digest."""

    def settle(self, step: int = 0) -> list[str]:
        """Run all loads and ticks there are to run; digests of failed loads."""
        failed = []
        for _ in range(8):
            self.executor.run_all()
            failed += [failure.digest for failure in self.residency.tick(step)]
        return failed

    def load(self, ref: AdapterRef) -> int:
        """Bring an adapter to the device for a test, held by nobody, and return its slot."""
        self.residency.want(ref)
        self.settle()
        lease = self.residency.acquire(ref.digest)
        assert lease is not None
        self.residency.release(ref.digest)
        self.residency.unwant(ref.digest)
        return lease.slot

    def matches(self, slot: int, lora: RandomLora) -> bool:
        """Whether the arena holds exactly this adapter where the tables say."""
        unit = self.arena.geometry.unit_elements
        elements = self.arena.elements.view(-1)
        for (layer, module), a in lora.lora_a.items():
            for part, rows in ((0, a), (1, lora.lora_b[layer, module].t())):
                pitch = -(-rows.shape[1] // unit) * unit
                for group in range(-(-len(rows) // 8)):
                    wanted = rows[8 * group : 8 * group + 8].to(self.arena.dtype)
                    start = int(self.tables.host_offsets[slot, layer, module, part, group]) * unit
                    found = elements[start : start + 8 * pitch].view(8, pitch)
                    if not torch.equal(found[: len(wanted), : rows.shape[1]], wanted) or found[len(wanted) :].any():
                        return False
        return True


def make_residency(
    folder: Path,
    *,
    num_pages: int = 24,
    slab_pages: int = 12,
    slots: int = 4,
    dtype: torch.dtype = torch.float32,
    base: BaseShape | None = None,
    max_rank: int = 64,
    eager: bool = False,
    poison: bool = True,
) -> ResidencyParts:
    base = base or tiny_base()
    geometry = tiny_geometry(base, dtype)
    arena = Arena(geometry, num_pages, torch.device("cpu"), dtype)
    if poison:
        arena.poison(range(1, num_pages))
    pool = PagePool(num_pages, on_release=arena.poison if poison else None)
    slab = HostSlab(slab_pages, geometry.page_bytes, pinned=False)
    tables = AdapterTables(slots, base, max_rank, geometry, arena.device)
    blobs = LocalBlobs(folder / "blobs")
    executor = StepwiseExecutor(eager)
    residency = Residency(blobs, pool, arena, slab, tables, executor, clock=lambda: 0.0)
    return ResidencyParts(base, blobs, pool, arena, slab, tables, executor, residency)


def store(parts: ResidencyParts, folder: Path, loras: Sequence[RandomLora]) -> list[AdapterRef]:
    """Write and store adapters, as PEFT folders and then as blobs."""
    refs = []
    for index, lora in enumerate(loras):
        ref = store_adapter(parts.blobs, lora.save(folder / f"adapter-{index}"), parts.base, max_rank=256)
        parts.loras[ref.digest] = lora
        refs.append(ref)
    return refs
