"""Division of the device's memory between the base model and the page pool, before anything is loaded.

The sizes follow from the model's config and the free memory. `check_start` needs neither torch nor weights, so on a
machine that is too small, or with a wrong setting, the error comes at once, with the numbers. The engine makes the
checks that need torch. `format_plan` writes the plan for people.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manylora.adapters.base_shape import SITES, BaseShape
from manylora.adapters.lora.layout import adapter_pages, slot_bytes
from manylora.config import GIB, MAX_SLOTS, MIB, Config, Weights
from manylora.engine.model.spec import (
    SPEC_FILES,
    DecoderSpec,
    base_shape,
    expected_tensors,
    model_geometry,
    module_shapes,
    read_spec,
    resolve_model,
)
from manylora.engine.model.weight_files import HEAD
from manylora.engine.status import EngineReady, MemoryPlan, ReservedBytes
from manylora.errors import ConfigError
from manylora.kernels.weight_format import HEAD_FORMAT, WEIGHT_FORMATS, WeightFormat, layer_bytes
from manylora.memory.geometry import PageGeometry

if TYPE_CHECKING:
    import torch

CUDA_DRIVER = "libcuda.so.1"
MAX_CPU_ARENA_BYTES = 4 * GIB
MAX_CPU_SLAB_BYTES = 2 * GIB
MAX_GPU_SLAB_BYTES = 64 * GIB
GRAPH_BYTES = GIB
"""Memory of CUDA graphs, beside the activations of the largest graph."""
WORKSPACE_BYTES = GIB // 2
LOGIT_COPIES = 3
"""Copies of the logits in float32 that a step may hold at once: for sampling, before penalties, and for
log-probabilities."""
LOGPROB_ROWS = 64
"""Largest number of prompt rows whose logits are held at once."""
CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 2048
"""Default of step tokens on a GPU. Such a step takes longer on the GPU than its launch on the host."""
REFERENCE_RANK = 16
"""Rank of the adapters that the plan counts, for people."""
SMALL_RANK = 8
SMALL_MODULES = ("q_proj", "v_proj")
"""The number of slots is counted for adapters of `SMALL_RANK` on these modules, PEFT's default."""
MIN_SLOTS = 256
TABLE_DIVISOR = 50
"""Beyond `MIN_SLOTS`, tables take at most 1 / TABLE_DIVISOR of the bytes of the arena."""
_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def check_start(config: Config) -> None:
    """Refuse settings with which the engine cannot start.

    For a model on the Hugging Face hub, only the config is downloaded.

    Raises:
        ConfigError: There is no such model or it is not supported, `model.device` is cuda and there is no CUDA device,
            the device does not compute `model.weights`, `model.max_model_len` is more than the model's positions, or
            there is not enough memory.
    """
    on_cpu = config.model.device == "cpu" or count_cuda_devices() == 0
    if on_cpu and config.model.device == "cuda":
        raise ConfigError(
            "model.device: cuda is asked for, but this machine has no CUDA device that its driver shows "
            "(see nvidia-smi); take auto or cpu",
            param="model.device",
        )
    spec = read_spec(resolve_model(config.model.path, files=SPEC_FILES))
    check_max_model_len(config.model.max_model_len, spec)
    choose_weights(config.model.weights, spec, on_cpu=on_cpu)
    if on_cpu:
        # A CPU without kernels takes float32. Only torch knows, so the smaller of the two is checked.
        asked = spec.dtype if config.model.dtype == "auto" else config.model.dtype
        num_bytes = 2 if asked in ("bfloat16", "float16") else 4
        base = base_shape(spec, "")
        geometry = model_geometry(spec, base, num_bytes, config.memory.kv_dtype)
        plan_memory(config, spec, base, geometry, free_memory(), on_cpu=True)


def count_cuda_devices() -> int:
    """Number of CUDA devices that the driver shows to this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def choose_weights(setting: Weights, spec: DecoderSpec, *, on_cpu: bool) -> WeightFormat:
    """Choose the format of the layers for `model.weights`. On a CPU, auto keeps a checkpoint of up to 8 bits in 8 bits.

    Raises:
        ConfigError: The device does not compute the format.
    """
    if setting in ("int8", "int4") and not on_cpu:
        raise ConfigError(
            f"model.weights: {setting} is computed on a CPU only; take auto or bf16, or model.device cpu",
            param="model.weights",
        )
    if setting != "auto":
        return setting
    return (
        "int8"
        if on_cpu and spec.quantisation is not None and spec.quantisation.bits <= 8
        else "bf16"
    )


def model_bytes(spec: DecoderSpec, weights: WeightFormat, dtype_bytes: int, *, on_cpu: bool) -> int:
    """Bytes of a loaded model.

    Args:
        spec: The model.
        weights: Format of its layers.
        dtype_bytes: Bytes of a number that is not quantised.
        on_cpu: True on a CPU, which keeps a tied head beside the embedding, because a packed weight cannot be indexed.
    """
    head = (spec.vocab_size, spec.hidden_size)
    sizes = {name: math.prod(shape) for name, shape in expected_tensors(spec).items()}
    if on_cpu and spec.is_tied:
        sizes[HEAD] = math.prod(head)
    if weights == "bf16":
        return sum(sizes.values()) * dtype_bytes
    del sizes[HEAD]
    total = layer_bytes(HEAD_FORMAT, *head)
    modules = module_shapes(spec)
    for site in SITES:
        width = sum(modules[index].out_features for index in site.modules)
        total += spec.num_layers * layer_bytes(weights, width, modules[site.modules[0]].in_features)
    return total + dtype_bytes * sum(size for name, size in sizes.items() if "_proj." not in name)


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free memory in bytes."""

    device: int
    host: int
    """Free host memory; on a CPU, equal to `device`."""


def free_memory(device: torch.device | None = None) -> FreeMemory:
    """Measure the free memory on the device (None is the CPU) and on the host (within this process's control group)."""
    host = _free_host_bytes()
    if device is None or device.type == "cpu":
        return FreeMemory(host, host)
    import torch  # late: the checks before the engine starts do without torch

    return FreeMemory(torch.cuda.mem_get_info(device)[0], host)


def plan_memory(
    config: Config,
    spec: DecoderSpec,
    base: BaseShape,
    geometry: PageGeometry,
    free: FreeMemory,
    *,
    on_cpu: bool,
) -> MemoryPlan:
    """Divide the memory.

    Args:
        config: Settings, of which the sections memory, model, adapter and scheduler are used.
        spec: The base model.
        base: Its shape for adapters.
        geometry: Geometry of the arena's pages.
        free: Free memory before the model is loaded.
        on_cpu: True if the model runs on the CPU.

    Raises:
        ConfigError: The model and the arena do not fit, the arena has no room for one request of `model.max_model_len`
            tokens, there is less host memory than the settings ask for, or the device does not compute
            `model.weights`.
    """
    weights = choose_weights(config.model.weights, spec, on_cpu=on_cpu)
    weight_bytes = model_bytes(spec, weights, geometry.dtype_bytes, on_cpu=on_cpu)
    usual_tokens = CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS
    step_tokens = config.scheduler.step_tokens or max(usual_tokens, config.scheduler.max_running)
    reserved = (
        ReservedBytes() if on_cpu else _reserved(config, spec, step_tokens, geometry.dtype_bytes)
    )
    fixed_bytes = weight_bytes + reserved.total
    left = max(free.device - fixed_bytes, 0)

    # More pages may hold more adapters, whose tables leave fewer pages. The tables of the largest pool have room.
    row_bytes = slot_bytes(base, config.adapter.max_rank)
    asked_slots = config.adapter.slots
    largest_tables = (asked_slots or _slots(left, row_bytes, base, geometry)) * row_bytes
    arena_default = min(MAX_CPU_ARENA_BYTES, left // 4) if on_cpu else max(left - largest_tables, 0)
    arena_bytes = _whole_pages(_wanted_bytes(config.memory.gib, arena_default), geometry)
    slots = asked_slots or _slots(arena_bytes, row_bytes, base, geometry)
    table_bytes = slots * row_bytes
    host_default = (
        min(MAX_CPU_SLAB_BYTES, left // 8) if on_cpu else min(MAX_GPU_SLAB_BYTES, free.host // 4)
    )
    host_bytes = _wanted_bytes(config.memory.host_gib, host_default)
    pool_bytes = arena_bytes + table_bytes + (host_bytes if on_cpu else 0)
    if fixed_bytes + pool_bytes > free.device:
        setting = "memory.gib" if left else "model.path"
        reserve = (
            f", a reserve of {format_reserved(reserved, step_tokens)}" if reserved.total else ""
        )
        raise ConfigError(
            f"{setting}: weights of {_gib(weight_bytes)}{reserve} and pages and buffers of {_gib(pool_bytes)} need "
            f"{_gib(fixed_bytes + pool_bytes)}, but only {_gib(free.device)} are free on the device"
            + (
                _smaller_weights(spec, weights, geometry.dtype_bytes, free.device) if on_cpu else ""
            ),
            param=setting,
        )
    if host_bytes > free.host:
        raise ConfigError(
            f"memory.host_gib: {_gib(host_bytes)} are asked for, but only {_gib(free.host)} are free on the host",
            param="memory.host_gib",
        )
    num_pages = arena_bytes // geometry.page_bytes - 1  # the zero page is not handed out

    rank16_pages = adapter_pages(_ranks(base, REFERENCE_RANK), base, geometry)
    plan = MemoryPlan(
        weight_bytes=weight_bytes,
        weights=weights,
        reserved=reserved,
        arena_bytes=arena_bytes,
        num_pages=num_pages,
        kv_tokens=max(num_pages, 0) // geometry.num_groups * geometry.page_tokens,
        rank16_pages=rank16_pages,
        rank16_adapters=min(max(num_pages, 0) // rank16_pages, slots),
        slots=slots,
        table_bytes=table_bytes,
        host_pages=host_bytes // geometry.page_bytes,
        step_tokens=step_tokens,
    )
    _check_room(plan, geometry, config.model.max_model_len)
    return plan


def max_model_len(config: Config, spec: DecoderSpec, plan: MemoryPlan) -> int:
    """Longest prompt plus output: the setting, or else the model's own limit as far as the pool has room.

    Raises:
        ConfigError: The setting is more than the model was made for.
    """
    asked = config.model.max_model_len
    check_max_model_len(asked, spec)
    return asked or min(spec.max_positions, plan.kv_tokens)


def check_max_model_len(asked: int | None, spec: DecoderSpec) -> None:
    """Refuse more tokens per request than the model was made for.

    Raises:
        ConfigError: `asked` is more than the model's positions.
    """
    if asked is not None and asked > spec.max_positions:
        raise ConfigError(
            f"model.max_model_len must be at most the model's {spec.max_positions} positions, got {asked}",
            param="model.max_model_len",
        )


def format_plan(plan: MemoryPlan, ready: EngineReady) -> str:
    """Write the plan in a few lines for people."""
    geometry = ready.geometry
    layers = f" of {geometry.layers_per_group} layers" if geometry.num_groups > 1 else ""
    reserve = (
        (f"  reserve  {format_reserved(plan.reserved, plan.step_tokens)}",)
        if plan.reserved.total
        else ()
    )
    return "\n".join(
        (
            f"{ready.model_path} on {ready.device} in {ready.number_format}, "
            f"at most {ready.max_model_len:,} tokens a request",
            f"  weights  {_gib(plan.weight_bytes)}",
            *reserve,
            f"  pool     {_gib(plan.arena_bytes)}: {plan.num_pages:,} pages of {geometry.page_bytes / 1024:,.0f} KiB, "
            f"each {geometry.page_tokens} tokens of KV cache{layers}",
            f"           room for {plan.kv_tokens:,} tokens, or {plan.rank16_adapters:,} adapters of rank "
            f"{REFERENCE_RANK} ({plan.rank16_pages} pages each), or any mix",
            f"  tables   {_gib(plan.table_bytes)}: at most {plan.slots:,} adapters of any size on the device at once",
            f"  host     {_gib(plan.host_pages * geometry.page_bytes)}: "
            f"{plan.host_pages // plan.rank16_pages:,} adapters of rank {REFERENCE_RANK} kept ready",
        )
    )


def format_reserved(reserved: ReservedBytes, step_tokens: int) -> str:
    """Write the reserve of a GPU for people."""
    return (
        f"{_gib(reserved.total)} ({_gib(reserved.graphs)} for CUDA graphs, {_gib(reserved.workspaces)} for workspaces, "
        f"{_gib(reserved.activations)} for a step of {step_tokens:,} tokens)"
    )


def _reserved(
    config: Config, spec: DecoderSpec, step_tokens: int, dtype_bytes: int
) -> ReservedBytes:
    """Memory that a GPU needs beside weights and pages."""
    import numpy as np  # late, as above

    from manylora.kernels.attention_batch import PARTIAL_PAD, most_partials

    # Up to four tensors of hidden rows are in use at once: residual, normed, and the outputs of attention and MLP.
    attention = (
        2 * spec.q_features + 2 * spec.kv_features
    )  # queries, keys, values, and the output of attention
    row = (
        4 * spec.hidden_size + attention + 3 * spec.intermediate_size
    )  # gate, up, and their product
    max_running = config.scheduler.max_running
    longest = config.model.max_model_len or spec.max_positions
    logits = max(max_running, LOGPROB_ROWS) * spec.vocab_size * (dtype_bytes + 4 * LOGIT_COPIES)
    partials = (
        max_running
        * most_partials(np.array([longest]))
        * spec.num_heads
        * (spec.head_dim + PARTIAL_PAD)
        * 4
    )
    graph = GRAPH_BYTES + max_running * (row + spec.vocab_size * 3) * dtype_bytes + partials
    return ReservedBytes(
        graphs=graph if config.model.cuda_graphs else 0,
        workspaces=WORKSPACE_BYTES,
        activations=step_tokens * row * dtype_bytes
        + logits
        + partials
        + 4 * longest * spec.head_dim,
    )


def _smaller_weights(
    spec: DecoderSpec, weights: WeightFormat, dtype_bytes: int, free_bytes: int
) -> str:
    """Settings whose weights fit into the memory, for an error."""
    sizes = {
        name: model_bytes(spec, name, dtype_bytes, on_cpu=True)
        for name in WEIGHT_FORMATS[WEIGHT_FORMATS.index(weights) + 1 :]
    }
    fitting = [f"{name} ({_gib(size)})" for name, size in sizes.items() if size < free_bytes]
    return f"; weights fit with model.weights {' or '.join(fitting)}" if fitting else ""


def _wanted_bytes(gib: float | None, default: int) -> int:
    return default if gib is None else int(gib * GIB)


def _whole_pages(num_bytes: int, geometry: PageGeometry) -> int:
    return num_bytes // geometry.page_bytes * geometry.page_bytes


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
    modules = [
        index for index, module in enumerate(base.modules) if not only or module.name in only
    ]
    return {(layer, index): rank for layer in range(base.num_layers) for index in modules}


def _slots(arena_bytes: int, row_bytes: int, base: BaseShape, geometry: PageGeometry) -> int:
    """Number of slots: as many as the pool has room for small adapters, while the tables stay small."""
    small_bytes = (
        adapter_pages(_ranks(base, SMALL_RANK, SMALL_MODULES), base, geometry) * geometry.page_bytes
    )
    small = (arena_bytes - geometry.page_bytes) // small_bytes
    affordable = arena_bytes // TABLE_DIVISOR // row_bytes
    return min(max(min(small, affordable), MIN_SLOTS), MAX_SLOTS)


def _free_host_bytes() -> int:
    free = _meminfo_available()
    for limit_file, used_file in _CGROUP_FILES:
        limit = _whole_number(limit_file)
        used = _whole_number(used_file)
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
    return 8 * GIB  # a guess for systems without /proc; the defaults then take 2 GiB


def _whole_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max" for no limit
        return None


def _gib(num_bytes: int) -> str:
    return (
        f"{num_bytes / GIB:.2f} GiB"
        if num_bytes >= GIB / 10 or num_bytes == 0
        else f"{math.ceil(num_bytes / MIB)} MiB"
    )
