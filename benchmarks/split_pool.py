"""An engine whose pages are divided for good: one half for KV cache, the other for adapters.

What Weft does not do, put together from its own parts so that the one pool can be measured against it. Both halves lie
in one arena, each with a pool and an evictor of its own; neither side gives pages to the other, nor leaves some to it.
For the CPU, and without a prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from weft.adapters.base_shape import BaseShape
from weft.adapters.blobs import LocalBlobs
from weft.adapters.host_images import HostImages
from weft.adapters.load_pace import LoadPace
from weft.adapters.load_threads import copier_thread, loader_threads
from weft.adapters.loading import AdapterLoader
from weft.adapters.paged_lora import PagedLora
from weft.adapters.residency import Residency
from weft.adapters.tables import AdapterTables
from weft.config import GIB, Config
from weft.engine.build import SWAP_SHARE
from weft.engine.core import EngineCore
from weft.engine.fit import ModelLimits
from weft.engine.model.device import choose_threads
from weft.engine.model.spec import base_shape, read_spec
from weft.engine.model.weights import load_decoder
from weft.engine.prefix_seed import prefix_seed
from weft.engine.runner import ModelRunner
from weft.engine.sampler import Sampler
from weft.engine.scheduler import Scheduler
from weft.kernels.dispatch import kernels_for
from weft.memory.arena import Arena
from weft.memory.copies import PageCopier
from weft.memory.eviction import Evictor, eviction_policy
from weft.memory.geometry import PageGeometry
from weft.memory.host_slab import HostSlab
from weft.memory.page_costs import PageCosts
from weft.memory.pool import PagePool
from weft.memory.swap_space import SwapSpace

CPU = torch.device("cpu")


class HalfResidency(Residency):
    """Adapters with pages of their own, which leave none for running requests to grow into."""

    @property
    def reserve_pages(self) -> int:
        """Always 0."""
        return 0

    @reserve_pages.setter
    def reserve_pages(self, value: int) -> None:
        pass


def build_split_engine(
    config: Config, geometry: PageGeometry, costs: PageCosts, notify: Callable[[], None]
) -> EngineCore:
    """An engine as `weft.engine.build` makes it, but for the two pools.

    Args:
        config: Of an engine that shares its pages; `memory.gib` and all else mean the same.
        geometry: Of its pages.
        costs: What it takes to have a page again.
        notify: Called when a load is done.
    """
    folder = Path(config.model.path)
    spec = read_spec(folder)
    dtype = torch.float32
    longest = config.model.max_model_len or spec.max_positions
    torch.set_num_threads(choose_threads(config.model.threads, spec.num_parameters * dtype.itemsize))
    decoder = load_decoder(folder, spec, dtype, CPU, num_positions=longest)
    base = base_shape(spec, "")

    num_pages = int((config.memory.gib or 0) * GIB) // geometry.page_bytes
    arena = Arena(geometry, num_pages, CPU, dtype)
    first_of_adapters = 1 + (num_pages - 1) // 2
    kv_pool = PagePool(first_of_adapters)
    adapter_pool = PagePool(num_pages, first_page=first_of_adapters)
    slab = HostSlab(int((config.memory.host_gib or 0) * GIB) // geometry.page_bytes, geometry.page_bytes, pinned=False)
    images = HostImages(slab)
    tables = AdapterTables(config.adapter.slots or first_of_adapters, base, config.adapter.max_rank, geometry, CPU)
    kv_evictor = Evictor(kv_pool, eviction_policy(config.memory.eviction))
    swap = SwapSpace(slab, images.make_room, max_pages=slab.num_pages // SWAP_SHARE)
    pace = LoadPace(config.adapter.load_share)
    residency = HalfResidency(
        _loader(config, images, base, arena, pace, adapter_pool.capacity),
        PageCopier(arena, pace.pause),
        adapter_pool,
        images,
        tables,
        Evictor(adapter_pool, eviction_policy(config.memory.eviction)),
        costs,
        loads=loader_threads(config.adapter.load_threads),
        copies=copier_thread(),
        notify=notify,
    )
    scheduler = Scheduler(
        config.scheduler,
        geometry,
        kv_pool,
        residency,
        ModelLimits(max_model_len=longest, vocab_size=spec.vocab_size, eos_token_ids=frozenset()),
        evictor=kv_evictor,
        prefixes=None,
        swap=swap,
        costs=costs,
        prefix_seed=prefix_seed(base.digest, "float32", spec.rope),
    )
    runner = ModelRunner(
        decoder=decoder,
        arena=arena,
        slab=slab,
        lora=PagedLora(arena, tables, base),
        check_slot=residency.check_slot,
        sampler=Sampler(kernels_for(CPU, torch.float32)),
    )
    return EngineCore(
        scheduler,
        runner,
        residency,
        kv_pool,
        evictor=kv_evictor,
        prefixes=None,
        swap=swap,
        boot_id="split",
        set_stepping=pace.set_stepping,
    )


def _loader(
    config: Config, images: HostImages, base: BaseShape, arena: Arena, pace: LoadPace, max_pages: int
) -> AdapterLoader:
    return AdapterLoader(
        LocalBlobs(config.blob_dir),
        images,
        base,
        arena.geometry,
        arena.dtype,
        config.adapter.max_rank,
        max_pages=max_pages,
        pause=pace.pause,
    )
