"""Builds an engine, from settings to a core that is ready for its first request.

This is the only place that knows all parts. No part knows it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from manylora.adapters.base_shape import BaseShape
from manylora.adapters.blobs.memory import MemoryBlobs
from manylora.adapters.blobs.store import open_blobs
from manylora.adapters.lora.step import AdapterTables, PagedLora
from manylora.adapters.residency.images import HostImages
from manylora.adapters.residency.load_threads import (
    LoadPace,
    LoadQueue,
    copier_thread,
    loader_threads,
)
from manylora.adapters.residency.loader import AdapterLoader
from manylora.adapters.residency.residency import Residency
from manylora.adapters.residency.transfers import Transfers
from manylora.config import Config
from manylora.engine.core import EngineCore
from manylora.engine.execution.costs import StartMeasures, slowness
from manylora.engine.execution.memory_plan import (
    REFERENCE_RANK,
    format_plan,
    free_memory,
    max_model_len,
    plan_memory,
)
from manylora.engine.execution.runner import ModelRunner
from manylora.engine.execution.sampler import Sampler
from manylora.engine.execution.step_program import StepDevice
from manylora.engine.execution.step_programs import StepPrograms, bucket_rows, cuda_graphs
from manylora.engine.fairness.service import Prices
from manylora.engine.grammar.compiler import Grammars
from manylora.engine.grammar.matcher import GrammarTokens
from manylora.engine.model.checkpoint.weights import base_digest, load_decoder
from manylora.engine.model.decoder import Decoder
from manylora.engine.model.device import (
    choose_device,
    choose_dtype,
    choose_threads,
    has_idle_core,
    keep_freed_memory,
)
from manylora.engine.model.spec import (
    base_shape,
    model_geometry,
    read_spec,
    resolve_model,
)
from manylora.engine.scheduling.kv_pages import KvPages
from manylora.engine.scheduling.request_state import ModelLimits
from manylora.engine.scheduling.scheduler import Scheduler
from manylora.engine.status import EngineReady, MemoryPlan
from manylora.engine.text.tokenizer import read_eos_token_ids
from manylora.errors import ConfigError
from manylora.kernels.dispatch import kernels_for
from manylora.kernels.triton.compiles import CompileWatch
from manylora.memory.arena import Arena, HostSlab, PageCopier, SwapSpace
from manylora.memory.eviction import Evictor, PageCosts
from manylora.memory.pool import PagePool
from manylora.memory.prefix_cache import PrefixCache

logger = logging.getLogger(__name__)

SWAP_DIVISOR = 2
"""KV of preempted requests may take 1 / SWAP_DIVISOR of the host pages; the rest is for page images of adapters."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine, and the parts of it that its owner uses."""

    core: EngineCore
    ready: EngineReady
    tokenizer_path: Path
    """Folder of the checkpoint with the tokenizer's files."""
    memory: MemoryBlobs
    """Weights of ephemeral versions."""
    grammar_tokens: GrammarTokens


def build_engine(
    config: Config, *, notify: Callable[[], None] | None = None, costs: PageCosts | None = None
) -> EngineParts:
    """Load the model and build everything around it.

    Args:
        config: All settings.
        notify: Called by a loader thread when a load has finished, which the core must take.
        costs: Times to bring a page back; None measures them.

    Raises:
        ConfigError: The model, the device or the memory does not allow the settings.
    """
    folder = resolve_model(config.model.path)
    spec = read_spec(folder)
    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, spec.dtype, device)

    # The digest is known once the weights are read.
    shape = base_shape(spec, "", trained_on_quantised=config.model.adapters_trained_on_quantised)
    geometry = model_geometry(spec, shape, dtype.itemsize, config.memory.kv_dtype)
    plan = plan_memory(
        config, spec, shape, geometry, free_memory(device), on_cpu=device.type == "cpu"
    )
    if device.type == "cpu":
        torch.set_num_threads(choose_threads(config.model.threads, plan.weight_bytes))
    longest = max_model_len(config, spec, plan)
    decoder, base = _load(
        folder,
        shape,
        partial(
            load_decoder,
            folder,
            spec,
            dtype,
            device,
            weights=plan.weights,
            num_positions=longest,
        ),
    )

    num_pages = plan.num_pages + 1  # with the zero page
    arena = Arena(geometry, num_pages, device, dtype)
    pool = PagePool(num_pages, arena.poison if config.memory.poison else None)
    slab = HostSlab(plan.host_pages, geometry.page_bytes, pinned=device.type == "cuda")
    # Steps of a GPU or of a tiny model leave cores to others.
    idle_core = has_idle_core()
    pace = LoadPace(config.adapter.load_share if device.type == "cpu" and not idle_core else 1.0)
    copier = PageCopier(arena, pace.pause)
    if device.type == "cpu" and not keep_freed_memory():
        logger.debug(
            "the C library does not keep memory that is freed; steps of many tokens take longer"
        )
    measures = StartMeasures(decoder, arena, pool, max_tokens=longest)
    costs = costs or measures.costs(slab, copier)
    prices = measures.prices(
        costs,
        lora_bytes_per_rank=plan.rank16_pages * geometry.page_bytes // REFERENCE_RANK,
        prompt_context=2 * spec.num_layers * spec.num_heads * spec.head_dim / spec.num_parameters,
    )

    evictor = Evictor(pool)
    prefixes = PrefixCache(pool, evictor, block_s=geometry.page_tokens * costs.token_s)
    images = HostImages(slab)
    tables = AdapterTables(plan.slots, base, config.adapter.max_rank, geometry, device)
    loader = AdapterLoader(
        open_blobs(config.registry, config.server.data_dir),
        images,
        base,
        geometry,
        dtype,
        tables.max_rank,
        max_pages=pool.capacity - geometry.num_groups,
        pause=pace.pause,
    )
    transfers = Transfers(
        loader,
        copier,
        pool,
        tables,
        evictor,
        load_queue=LoadQueue(
            loader_threads(config.adapter.load_threads, has_idle_core=idle_core), notify
        ),
        copy_queue=LoadQueue(copier_thread(), notify),
    )
    residency = Residency(transfers, costs, prefixes)
    ready = EngineReady(
        boot_id=secrets.token_hex(8),
        model_path=config.model.path,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=longest,
        vocab_size=spec.vocab_size,
        base=base,
        geometry=geometry,
        memory=plan,
        max_rank=config.adapter.max_rank,
        token_s=costs.token_s,
    )
    kv = KvPages(
        geometry,
        pool,
        evictor,
        prefixes=prefixes,
        swap=SwapSpace(slab, images.make_room, max_pages=slab.num_pages // SWAP_DIVISOR),
        costs=costs,
        is_sharing=config.memory.prefix_cache,
    )
    limits = ModelLimits(
        max_model_len=longest, vocab_size=spec.vocab_size, eos_token_ids=read_eos_token_ids(folder)
    )
    runner = _runner(config, decoder, PagedLora(arena, tables, base), slab, residency, limits, plan)
    grammar_tokens = GrammarTokens(folder, limits.eos_token_ids)
    grammars = Grammars(grammar_tokens.compile, loader_threads(1, has_idle_core=idle_core), notify)
    scheduler = Scheduler(
        config.scheduler,
        kv,
        residency,
        limits,
        step_tokens=plan.step_tokens,
        prices=prices,
        grammars=grammars,
    )
    core = EngineCore(
        scheduler,
        runner,
        boot_id=ready.boot_id,
        overlaps=config.scheduler.overlap == "on"
        or (config.scheduler.overlap == "auto" and runs_beside_host(device)),
        set_stepping=pace.set_stepping,
        compiles=CompileWatch().begin(),
    )
    _tell(plan, ready, costs, prices)
    return EngineParts(core, ready, folder, loader.memory, grammar_tokens)


def _tell(plan: MemoryPlan, ready: EngineReady, costs: PageCosts, prices: Prices) -> None:
    """Log how the memory is divided, and a CPU that is slow for this model."""
    logger.debug("%s", format_plan(plan, ready))
    if ready.device == "cpu" and (slow := slowness(costs, prices, plan.weights)):
        logger.warning("%s", slow)


def _load(folder: Path, shape: BaseShape, load: Callable[[], Decoder]) -> tuple[Decoder, BaseShape]:
    """Load the weights while a second thread hashes the same files, so they are read from disk once."""
    with ThreadPoolExecutor(1, "base-digest") as hashing:
        digest = hashing.submit(base_digest, folder)
        return load(), replace(shape, digest=digest.result())


def runs_beside_host(device: torch.device) -> bool:
    """True if a step runs while the host does other work. Then it is a step program."""
    return device.type == "cuda"


def _runner(
    config: Config,
    decoder: Decoder,
    lora: PagedLora,
    slab: HostSlab,
    residency: Residency,
    limits: ModelLimits,
    plan: MemoryPlan,
) -> ModelRunner:
    """Make the runner, and compile all kernels that its programs launch.

    Raises:
        ConfigError: The device has too little memory for the largest step.
    """
    arena = lora.arena
    device = lora.arena.device
    sampler = Sampler(kernels_for(device, torch.float32), limits.eos_token_ids)
    programs = None
    if runs_beside_host(device):
        step_device = StepDevice(
            decoder=decoder,
            arena=arena,
            lora=lora,
            sampler=sampler,
            max_samples=bucket_rows(config.scheduler.max_running),
            max_rows=bucket_rows(plan.step_tokens + config.scheduler.max_running),
            max_model_len=limits.max_model_len,
        )
        capture = cuda_graphs() if config.model.cuda_graphs else None
        programs = StepPrograms(
            step_device, max_running=config.scheduler.max_running, capture=capture
        )
        try:
            programs.prepare()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"memory.gib: beside weights and pages the device has no memory for a step of {plan.step_tokens:,} "
                f"tokens ({error}); set memory.gib to less, or lower scheduler.step_tokens",
                param="memory.gib",
            ) from error
    return ModelRunner(
        decoder=decoder,
        arena=arena,
        slab=slab,
        lora=lora,
        check_lease=residency.slots.check_lease,
        sampler=sampler,
        programs=programs,
    )
