"""The engine's reports: one when it is ready, and snapshots while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from manylora.adapters.base_shape import BaseShape
from manylora.adapters.ref import ResidentAdapter as ResidentAdapter
from manylora.engine.fairness.prices import Prices
from manylora.engine.fairness.tenant_load import TenantLoad
from manylora.kernels.weight_format import WeightFormat, number_format
from manylora.memory.geometry import PageGeometry
from manylora.memory.page_map import PageMap

PauseMode = Literal["keep", "wait"]
"""How an engine is paused: with `keep` it computes nothing, and requests keep what they have; with `wait` those that
have started go on to their end first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedBytes:
    """Memory of a GPU that is neither for weights nor for pages; a CPU reserves none."""

    graphs: int = 0
    """For CUDA graphs."""
    workspaces: int = 0
    """For matrix products, partial results of attention, and the code of kernels."""
    activations: int = 0
    """For what the largest step computes, and the tables of positions."""

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.graphs + self.workspaces + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How the device's memory was divided; the machine decides it, so it is a result and not a setting."""

    weight_bytes: int
    """Bytes of the base model."""
    weights: WeightFormat = "bf16"
    """What its linear layers are kept in; bf16 is the dtype of the engine, whatever that is."""
    reserved: ReservedBytes = ReservedBytes()
    arena_bytes: int
    num_pages: int
    """Pages that can be handed out (the zero page is not among them)."""
    kv_tokens: int
    """Tokens of KV cache that fit when no adapter is resident."""
    rank16_pages: int
    """Pages of one adapter of rank 16 on all linear layers."""
    rank16_adapters: int
    """How many such adapters can be on the device at once when there is no KV cache."""
    slots: int
    """Adapters of any size that can be on the device at once, as far as they have pages."""
    table_bytes: int
    """Bytes of the tables that say where the adapters' weights are."""
    host_pages: int
    """Pages of the host slab."""
    step_tokens: int
    """Most tokens in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """Sent once, before the first request is taken."""

    boot_id: str
    """Fresh for every start of the engine process."""
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
    """Seconds that a token of a prompt takes, as measured at the start."""

    @property
    def number_format(self) -> str:
        """What the model is computed in, and what is kept otherwise, for people."""
        return number_format(self.dtype, self.memory.weights, self.geometry.is_kv_int8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One of the last steps."""

    step: int
    seconds: float
    requests: int
    tokens: int
    prefill_tokens: int
    adapters: int
    """Distinct adapters in the step, the base not counted."""
    base_requests: int
    """Requests of the base model in the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """Who was in the last steps."""

    adapters: list[str]
    """Digests of the adapters with the most requests in these steps, at most 8, in this order."""
    steps: list[list[int]]
    """Oldest first, at most 64: a step's number, its requests of the base, of each of `adapters`, of all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What the engine has to do, sent by itself several times a second while it works, and once when it falls idle."""

    boot_id: str
    seq: int
    rate: float = 0.0
    """Units per second that the engine computes while it has full steps; 0 until it was measured."""
    rows: int = 0
    """Requests that a step has room for."""
    tenants: dict[str, TenantLoad] = field(default_factory=dict)
    """By tenant id; only those with requests in the engine."""
    prices: Prices = field(default_factory=Prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A snapshot; of two with one `boot_id`, the one with the larger `seq` is newer."""

    boot_id: str
    seq: int
    running: int
    waiting: int
    pause: PauseMode | None = None
    """How the engine is paused; `wait` becomes `keep` when all that had started has ended."""
    base_running: int = 0
    """Running requests of the base model; those of adapters are in `residents`."""
    waiting_reasons: dict[str, int] = field(default_factory=dict)
    """Requests that wait, by reason: LOADING, GRAMMAR, NO_ROOM, NO_PAGES, FORK, NEW."""
    pages: dict[str, int] = field(default_factory=dict)
    """Pages by kind: free, kv, prefix, adapter, quarantine; they sum to `MemoryPlan.num_pages`."""
    available_pages: int = 0
    """Pages that are free or can be evicted, now or when the steps under way are complete."""
    residents: list[ResidentAdapter] = field(default_factory=list)
    last_steps: list[StepStats] = field(default_factory=list)
    """Oldest first, at most 256."""
    last_step_age_s: float | None = None
    num_steps: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)
    """Preemptions since start, by how the request gets its KV back: recompute, swap."""
    loads: dict[str, int] = field(default_factory=dict)
    """Adapter loads since start, by `from>to:result`, for example `stored>device:ok`."""
    load_seconds: float = 0.0
    """Sum over all loads."""
    load_p95_s: dict[str, float] = field(default_factory=dict)
    """Of the last 256 loads of each path that were ok, 95 % took at most so many seconds, from the first hold to the
    device; by `from>to`, for example `stored>device`. A path without loads is absent."""
    evictions: dict[str, int] = field(default_factory=dict)
    """What was dropped from the device since start, by kind: adapter (adapters), prefix (blocks of cached KV)."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache since start."""
    prefix_hits: int = 0
    """Of these, the tokens that were found."""
    kernel_compiles: int = 0
    """Kernels that were compiled since the engine was ready. Each stopped all requests; there should be none."""
    host_pages: dict[str, int] = field(default_factory=dict)
    """Pages of the host slab by kind: free, adapter, kv; they sum to `MemoryPlan.host_pages`."""
    tenants: dict[str, TenantLoad] = field(default_factory=dict)
    """Tenants with requests in the engine, by tenant id."""
    service_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens computed since start, by tenant id (the 256 busiest)."""
    page_map: PageMap | None = None
    """Where in the pool which pages lie; an owner is an adapter slot as in `residents`, -1 the base or nobody. Like
    `batches`, only in a detailed snapshot."""
    batches: StepBatches | None = None
