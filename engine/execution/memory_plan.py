"""How the device's memory is divided between the base model and the page pool, before anything is loaded.

The sizes follow from the model's config and from what is free, so a machine that is too small is told at once, with
the numbers. `format_plan` writes the plan for people.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.adapters.base_shape import BaseShape
from weft.adapters.lora.layout import adapter_pages, slot_bytes
from weft.config import GIB, MAX_SLOTS, MIB, Config, SchedulerConfig
from weft.engine.model.spec import DecoderSpec
from weft.engine.model.weight_bytes import choose_weights, model_bytes
from weft.engine.status import EngineReady, MemoryPlan
from weft.errors import ConfigError
from weft.memory.geometry import PageGeometry

if TYPE_CHECKING:
    import torch

MAX_CPU_ARENA_BYTES = 4 * GIB
MAX_HOST_SLAB_BYTES = 2 * GIB
GPU_ARENA_FRACTION = 0.85
"""Of what the weights leave free; the rest is for activations and the allocator."""
CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 2048
"""With these, a GPU computes a step of prompts for longer than the host takes to launch it."""
REFERENCE_RANK = 16
"""Rank of the adapters that the plan counts for people."""
SMALL_RANK = 8
SMALL_MODULES = ("q_proj", "v_proj")
"""An adapter of this rank on these modules is the smallest that slots are counted for: PEFT's default."""
MIN_SLOTS = 256
TABLE_DIVISOR = 50
"""Beyond `MIN_SLOTS`, tables take at most 1 / TABLE_DIVISOR of the bytes of the arena."""
_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that may be taken."""

    device: int
    host: int
    """The same number on a CPU."""


def free_memory(device: torch.device | None = None) -> FreeMemory:
    """Measure what is free now, on the device (None: the CPU) and on the host (within this process's control group)."""
    host = _free_host_bytes()
    if device is None or device.type == "cpu":
        return FreeMemory(host, host)
    import torch  # late: what is checked before the engine starts needs none of it

    return FreeMemory(torch.cuda.mem_get_info(device)[0], host)


def plan_memory(
    config: Config, spec: DecoderSpec, base: BaseShape, geometry: PageGeometry, free: FreeMemory, *, on_cpu: bool
) -> MemoryPlan:
    """Divide the memory.

    Args:
        config: Its sections memory, model, adapter and scheduler count.
        spec: The base model.
        base: Its shape for adapters.
        geometry: Of the arena's pages.
        free: What may be taken, before the model is loaded.
        on_cpu: Whether the model runs on the CPU.

    Raises:
        ConfigError: The model and the arena do not fit, or the arena does not hold one request of
            `model.max_model_len` tokens; with the numbers. Or the device does not compute `model.weights`.
    """
    weights = choose_weights(config.model.weights, spec, on_cpu=on_cpu)
    weight_bytes = model_bytes(spec, weights, geometry.dtype_bytes, on_cpu=on_cpu)
    left = free.device - weight_bytes
    if left <= 0:
        raise ConfigError(
            f"model.path: the weights take {_gib(weight_bytes)}, but only {_gib(free.device)} are free on the device"
        )
    host_left = free.host - (weight_bytes if on_cpu else 0)
    arena_bytes = _wanted_bytes(config.memory.gib, min(MAX_CPU_ARENA_BYTES, left // 4) if on_cpu else None, left)
    host_bytes = _wanted_bytes(config.memory.host_gib, min(MAX_HOST_SLAB_BYTES, host_left // 8), host_left)
    num_pages = arena_bytes // geometry.page_bytes - 1  # the zero page is not handed out
    row_bytes = slot_bytes(base, config.adapter.max_rank)
    slots = config.adapter.slots or _slots(num_pages, arena_bytes // TABLE_DIVISOR // row_bytes, base, geometry)
    table_bytes = slots * row_bytes
    _check_free(arena_bytes + table_bytes + (host_bytes if on_cpu else 0), weight_bytes, free.device)

    rank16_pages = adapter_pages(_ranks(base, REFERENCE_RANK), base, geometry)
    plan = MemoryPlan(
        weight_bytes=weight_bytes,
        weights=weights,
        arena_bytes=arena_bytes // geometry.page_bytes * geometry.page_bytes,
        num_pages=num_pages,
        kv_tokens=max(num_pages, 0) // geometry.num_groups * geometry.page_tokens,
        rank16_pages=rank16_pages,
        rank16_adapters=min(max(num_pages, 0) // rank16_pages, slots),
        slots=slots,
        table_bytes=table_bytes,
        host_pages=host_bytes // geometry.page_bytes,
        step_tokens=_step_tokens(config.scheduler, on_cpu=on_cpu),
    )
    _check_room(plan, geometry, config.model.max_model_len)
    return plan


def max_model_len(config: Config, spec: DecoderSpec, plan: MemoryPlan) -> int:
    """Longest prompt plus output: what is asked for, or else the model's own limit as far as the pool can hold it.

    Raises:
        ConfigError: More is asked for than the model was made for.
    """
    asked = config.model.max_model_len
    check_max_model_len(asked, spec)
    return asked or min(spec.max_positions, plan.kv_tokens)


def check_max_model_len(asked: int | None, spec: DecoderSpec) -> None:
    """Refuse more tokens per request than the model was made for.

    Raises:
        ConfigError: With both numbers.
    """
    if asked is not None and asked > spec.max_positions:
        raise ConfigError(
            f"model.max_model_len must be at most the model's {spec.max_positions} positions, got {asked}",
            param="model.max_model_len",
        )


def format_plan(plan: MemoryPlan, ready: EngineReady) -> str:
    """The plan in a few lines for people."""
    geometry = ready.geometry
    layers = f" of {geometry.layers_per_group} layers" if geometry.num_groups > 1 else ""
    return "\n".join(
        (
            f"{ready.model_path} on {ready.device} in {ready.number_format}, "
            f"at most {ready.max_model_len:,} tokens a request",
            f"  weights  {_gib(plan.weight_bytes)}",
            f"  pool     {_gib(plan.arena_bytes)}: {plan.num_pages:,} pages of {geometry.page_bytes / 1024:,.0f} KiB, "
            f"each {geometry.page_tokens} tokens of KV cache{layers}",
            f"           room for {plan.kv_tokens:,} tokens, or {plan.rank16_adapters:,} adapters of rank "
            f"{REFERENCE_RANK} ({plan.rank16_pages} pages each), or any mix",
            f"  tables   {_gib(plan.table_bytes)}: at most {plan.slots:,} adapters of any size on the device at once",
            f"  host     {_gib(plan.host_pages * geometry.page_bytes)}: "
            f"{plan.host_pages // plan.rank16_pages:,} adapters of rank {REFERENCE_RANK} kept ready",
        )
    )


def _wanted_bytes(gib: float | None, default: int | None, left: int) -> int:
    if gib is not None:
        return int(gib * GIB)
    return int(left * GPU_ARENA_FRACTION) if default is None else default


def _step_tokens(scheduler: SchedulerConfig, *, on_cpu: bool) -> int:
    usual = CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS
    return scheduler.step_tokens or max(usual, scheduler.max_running)


def _check_free(pool_bytes: int, weight_bytes: int, free_bytes: int) -> None:
    if pool_bytes + weight_bytes > free_bytes:
        raise ConfigError(
            f"memory.gib: weights of {_gib(weight_bytes)} and pages and buffers of {_gib(pool_bytes)} need "
            f"{_gib(weight_bytes + pool_bytes)}, but only {_gib(free_bytes)} are free",
            param="memory.gib",
        )


def _check_room(plan: MemoryPlan, geometry: PageGeometry, asked: int | None) -> None:
    num_tokens = asked or geometry.page_tokens
    needed = geometry.pages(num_tokens)
    if plan.num_pages < needed:
        raise ConfigError(
            f"memory.gib: the arena of {_gib(plan.arena_bytes)} has {max(plan.num_pages, 0)} pages of "
            f"{geometry.page_bytes:,} bytes, but one request of {num_tokens:,} tokens needs {needed}; "
            f"{_gib((needed + 1) * geometry.page_bytes)} are the least",
            param="memory.gib",
        )


def _ranks(base: BaseShape, rank: int, only: Sequence[str] = ()) -> dict[tuple[int, int], int]:
    modules = [index for index, module in enumerate(base.modules) if not only or module.name in only]
    return {(layer, index): rank for layer in range(base.num_layers) for index in modules}


def _slots(num_pages: int, affordable: int, base: BaseShape, geometry: PageGeometry) -> int:
    """As many as the pool may hold small adapters, as far as their tables cost little."""
    small_pages = adapter_pages(_ranks(base, SMALL_RANK, SMALL_MODULES), base, geometry)
    return min(max(min(num_pages // small_pages, affordable), MIN_SLOTS), MAX_SLOTS)


def _free_host_bytes() -> int:
    free = _meminfo_available()
    for limit_file, used_file in _CGROUP_FILES:
        limit, used = _whole_number(limit_file), _whole_number(used_file)
        if limit is not None and used is not None:
            free = min(free, max(limit - used, 0))
    return free


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 * GIB  # systems without /proc do not say; the defaults then take 2 GiB


def _whole_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max" for no limit
        return None


def _gib(num_bytes: int) -> str:
    return (
        f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 or num_bytes == 0 else f"{math.ceil(num_bytes / MIB)} MiB"
    )
