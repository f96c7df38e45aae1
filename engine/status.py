"""The engine's reports: one when it is ready, and snapshots while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from manylora.adapters.base_shape import BaseShape
from manylora.adapters.ref import ResidentAdapter as ResidentAdapter
from manylora.engine.fairness.service import Prices, TenantLoad
from manylora.kernels.weight_format import WeightFormat, number_format
from manylora.memory.geometry import PageGeometry
from manylora.memory.pool import PageMap

PauseMode = Literal["keep", "wait"]
"""Kind of pause. With `keep` the engine computes nothing, and requests keep their state. With `wait` started requests
run to their end first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedBytes:
    """Bytes of a GPU that are neither for weights nor for pages; a CPU reserves none."""

    graphs: int = 0
    """Bytes for CUDA graphs."""
    workspaces: int = 0
    """Bytes for matrix products, partial results of attention, and the code of kernels."""
    activations: int = 0
    """Bytes for the activations of the largest step, and the tables of positions."""

    @property
    def total(self) -> int:
        """Sum of all reserved bytes."""
        return self.graphs + self.workspaces + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Division of the device's memory. It depends on the machine, so it is a result and not a setting."""

    weight_bytes: int
    """Bytes of the base model."""
    weights: WeightFormat = "bf16"
    """Format of its linear layers; bf16 stands for the dtype of the engine, whatever that is."""
    reserved: ReservedBytes = ReservedBytes()
    arena_bytes: int
    num_pages: int
    """Pages that can be handed out, without the zero page."""
    kv_tokens: int
    """Tokens of KV cache that fit when no adapter is resident."""
    rank16_pages: int
    """Pages of one adapter of rank 16 on all linear layers."""
    rank16_adapters: int
    """Number of such adapters that can be on the device at once without KV cache."""
    slots: int
    """Largest number of adapters on the device at once, if there are pages for them."""
    table_bytes: int
    """Bytes of the tables with the places of the adapters' weights."""
    host_pages: int
    """Pages of the host slab."""
    step_tokens: int
    """Largest number of tokens in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """Report of a ready engine, before its first request."""

    boot_id: str
    """Id of this start of the engine process."""
    model_path: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    base: BaseShape
    geometry: PageGeometry
    memory: MemoryPlan
    max_rank: int
    token_s: float = 0.0
    """Seconds per token of a prompt, measured at the start."""

    @property
    def number_format(self) -> str:
        """Name of the number formats for people."""
        return number_format(self.dtype, self.memory.weights, self.geometry.is_kv_int8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Figures of one step."""

    step: int
    seconds: float
    requests: int
    tokens: int
    prefill_tokens: int
    adapters: int
    """Number of distinct adapters in the step, without the base."""
    base_requests: int
    """Number of requests of the base model in the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """Adapters of the last steps."""

    adapters: list[str]
    """Digests of the adapters with the most requests in these steps, at most 8, most requests first."""
    steps: list[list[int]]
    """Steps, oldest first, at most 64: number of the step, requests of the base, of each of `adapters`, of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Work of the engine. It reports this several times a second while it works, and once when it becomes idle."""

    rate: float = 0.0
    """Units per second of the engine with full steps; 0 until it was measured."""
    rows: int = 0
    """Number of requests that a step has room for."""
    tenants: dict[str, TenantLoad] = field(default_factory=dict)
    """Loads of the tenants with requests in the engine, by tenant id."""
    prices: Prices = field(default_factory=Prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A snapshot."""

    boot_id: str
    running: int
    waiting: int
    pause: PauseMode | None = None
    """Kind of the pause; `wait` becomes `keep` when all started requests have ended."""
    base_running: int = 0
    """Number of running requests of the base model; those of adapters are in `residents`."""
    waiting_reasons: dict[str, int] = field(default_factory=dict)
    """Number of waiting requests by reason: LOADING, GRAMMAR, NO_ROOM, NO_PAGES, FORK, NEW."""
    pages: dict[str, int] = field(default_factory=dict)
    """Number of pages by kind: free, kv, prefix, adapter, quarantine. The sum is `MemoryPlan.num_pages`."""
    available_pages: int = 0
    """Pages that are free or can be evicted, now or when the running steps are complete."""
    residents: list[ResidentAdapter] = field(default_factory=list)
    last_steps: list[StepStats] = field(default_factory=list)
    """Last steps, oldest first, at most 256."""
    last_step_age_s: float | None = None
    num_steps: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)
    """Preemptions since the start, by the way in which the request gets its KV back: recompute, swap."""
    loads: dict[str, int] = field(default_factory=dict)
    """Adapter loads since the start by `from>to:result`, for example `stored>device:ok`."""
    load_seconds: float = 0.0
    """Sum of the times of all loads."""
    load_p95_s: dict[str, float] = field(default_factory=dict)
    """95th percentile of the times of the last 256 successful loads of each path, in seconds from the first hold to the
    device, by `from>to`, for example `stored>device`. A path without loads is absent."""
    evictions: dict[str, int] = field(default_factory=dict)
    """Evictions from the device since the start, by kind: adapter (adapters), prefix (blocks of cached KV)."""
    prefix_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache since the start."""
    prefix_hits: int = 0
    """Prompt tokens that were found in the prefix cache since the start."""
    kernel_compiles: int = 0
    """Kernels that were compiled since the engine was ready. Each held up all requests, so there should be none."""
    host_pages: dict[str, int] = field(default_factory=dict)
    """Pages of the host slab by kind: free, adapter, kv. The sum is `MemoryPlan.host_pages`."""
    tenants: dict[str, TenantLoad] = field(default_factory=dict)
    """Loads of the tenants with requests in the engine, by tenant id."""
    service_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that were computed since the start, by tenant id, of the 256 busiest tenants."""
    page_map: PageMap | None = None
    """Map of the pool. An owner is an adapter slot as in `residents`; -1 is the base or nobody. Only a detailed
    snapshot has it and `batches`."""
    batches: StepBatches | None = None
