"""What the engine tells about itself: once when it is ready, and as snapshots while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.adapters.base_shape import BaseShape
from weft.adapters.resident import ResidentAdapter as ResidentAdapter
from weft.memory.geometry import PageGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How the device's memory was divided; the machine decides it, so it is a result and not a setting."""

    weight_bytes: int
    """Bytes of the base model."""
    arena_bytes: int
    num_pages: int
    """Pages that can be handed out (the zero page is not among them)."""
    kv_tokens: int
    """Tokens of KV cache that fit when no adapter is resident."""
    rank16_pages: int
    """Pages of one adapter of rank 16 on all linear layers."""
    rank16_adapters: int
    """How many such adapters fit when there is no KV cache."""
    host_pages: int
    """Pages of the host slab."""


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
class EngineStatus:
    """A snapshot; of two with one `boot_id`, the one with the larger `seq` is newer."""

    boot_id: str
    seq: int
    running: int
    waiting: int
    waiting_reasons: dict[str, int] = field(default_factory=dict)
    """Requests that wait, by reason: LOADING, NO_ROOM, NO_PAGES, FORK, NEW."""
    pages: dict[str, int] = field(default_factory=dict)
    """Pages by kind: free, kv, prefix, adapter, quarantine; they sum to `MemoryPlan.num_pages`."""
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
    evictions: dict[str, int] = field(default_factory=dict)
    """What was dropped from the device since start, by kind: adapter (adapters), prefix (blocks of cached KV)."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache since start."""
    prefix_hits: int = 0
    """Of these, the tokens that were found."""
    host_pages: dict[str, int] = field(default_factory=dict)
    """Pages of the host slab by kind: free, adapter, kv; they sum to `MemoryPlan.host_pages`."""
    backlog_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens still to compute for waiting and running requests, by tenant id."""
    service_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens computed since start, by tenant id (the 256 busiest)."""
