"""A residency and a runner without a model, so that scheduler and core run in virtual time."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from weft.adapters.ref import AdapterRef, LoraSpec
from weft.config import SchedulerConfig
from weft.engine.core import EngineCore
from weft.engine.fit import ModelLimits
from weft.engine.plan import Chunk, ChunkResult, StepPlan
from weft.engine.request import GenerationRequest, RequestOutput, TokenLogprobs
from weft.engine.sampling_params import SamplingParams
from weft.engine.scheduler import Scheduler
from weft.engine.status import ResidentAdapter
from weft.errors import AdapterUnavailableError, EngineError, StaleSlotError, WeftError
from weft.memory.geometry import PageGeometry
from weft.memory.pool import PagePool

PAGE_TOKENS = 4
VOCAB_SIZE = 1000
GEOMETRY = PageGeometry(
    page_bytes=1024,
    page_tokens=PAGE_TOKENS,
    num_groups=1,
    layers_per_group=1,
    num_layers=1,
    num_kv_heads=1,
    head_dim=32,
    dtype_bytes=4,
)


def adapter(name: str, tenant: str = "t") -> AdapterRef:
    digest = "sha256:" + hashlib.sha256(name.encode()).hexdigest()
    return AdapterRef(
        tenant_id=tenant,
        adapter_id=name,
        version=1,
        digest=digest,
        weights_sha256=digest[7:],
        config=LoraSpec(rank=8, alpha=8.0),
    )


def next_token(digest: str | None, history: list[int]) -> int:
    """The simulated model: the next token is a function of the adapter and all tokens before."""
    content = repr((digest, history)).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little") % VOCAB_SIZE


def expected_tokens(request: GenerationRequest, count: int) -> list[int]:
    history = request.prompt_token_ids + request.generated_token_ids
    digest = request.adapter.digest if request.adapter else None
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token(digest, history + tokens))
    return tokens


@dataclass
class SimulatedRunner:
    """Keeps the tokens of every page, so that a token computed from wrong or freed pages is a wrong token."""

    pages: dict[int, dict[int, int]] = field(default_factory=dict)
    fail_on: set[int] = field(default_factory=set)
    plans: list[StepPlan] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> list[ChunkResult]:
        self.plans.append(plan)
        if plan.step in self.fail_on:
            raise RuntimeError("the device is on fire")
        for page in plan.zero_pages:
            self.pages[page] = {}
        return [self._chunk(chunk) for chunk in plan.chunks]

    def close(self) -> None:
        self.pages.clear()

    def poison(self, pages: object) -> None:
        for page in pages:  # type: ignore[attr-defined]
            self.pages.pop(page, None)

    def _chunk(self, chunk: Chunk) -> ChunkResult:
        table = chunk.block_table[0]
        for position, token in enumerate(chunk.token_ids, chunk.start):
            self.pages[table[position // PAGE_TOKENS]][position % PAGE_TOKENS] = token
        end = chunk.start + len(chunk.token_ids)
        history = [self.pages[table[p // PAGE_TOKENS]][p % PAGE_TOKENS] for p in range(end)]
        digest = chunk.adapter.digest if chunk.adapter else None
        chosen = next_token(digest, history) if chunk.sample is not None else None
        wants_logprobs = chunk.sample is not None and chunk.sample.params.logprobs is not None
        return ChunkResult(
            request_id=chunk.request_id,
            token_id=chosen,
            logprobs=TokenLogprobs(token_id=chosen, logprob=-1.0, rank=1)
            if wants_logprobs and chosen is not None
            else None,
            prompt_logprobs=[
                TokenLogprobs(token_id=target, logprob=-float(chunk.start + i), rank=1)
                for i, target in enumerate(chunk.prompt_targets or [])
            ],
        )


@dataclass(frozen=True)
class Lease:
    slot: int
    generation: int
    digest: str


@dataclass(frozen=True)
class Failure:
    digest: str
    error: WeftError


@dataclass
class _Entry:
    ref: AdapterRef
    holds: int = 0
    running: int = 0
    loaded_at: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1


class SimulatedResidency:
    """The contract of the real one, with loads that take a fixed number of ticks."""

    def __init__(self, pool: PagePool, *, pages: int | dict[str, int] = 2, ticks: int = 3, slots: int = 64) -> None:
        self._pool = pool
        self._pages = pages
        self._ticks = ticks
        self._free_slots = list(range(slots))
        self._generations = [0] * slots
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._now = 0
        self._step = 0
        self.broken: set[str] = set()
        self.pinned: set[str] = set()
        self.stale: set[str] = set()
        self.known_pages = True
        self.loads: dict[str, int] = {}
        self.load_seconds = 0.0
        self.evictions = 0

    def _size(self, digest: str) -> int:
        return self._pages if isinstance(self._pages, int) else self._pages[digest]

    def state(self, digest: str) -> Literal["device", "host", "stored"]:
        entry = self._entries.get(digest)
        if entry is None or (entry.slot < 0 and entry.loaded_at > self._now):
            return "stored"
        return "device" if entry.slot >= 0 else "host"

    def pages_needed(self, ref: AdapterRef) -> int | None:
        return self._size(ref.digest) if self.known_pages else None

    def want(self, ref: AdapterRef) -> None:
        entry = self._entries.setdefault(ref.digest, _Entry(ref, loaded_at=self._now + self._ticks))
        entry.holds += 1

    def unwant(self, digest: str) -> None:
        if digest in self._entries:
            self._entries[digest].holds -= 1
            if self._entries[digest].holds < 0:
                raise EngineError("a hold was dropped twice")

    def drop_holds(self, keep: str | None = None) -> None:
        for digest, entry in self._entries.items():
            entry.holds = entry.holds if digest == keep else 0

    def acquire(self, digest: str) -> Lease | None:
        entry = self._entries.get(digest)
        if entry is None or entry.slot < 0:
            return None
        entry.running += 1
        self._entries.move_to_end(digest)
        return Lease(entry.slot, self._generations[entry.slot], digest)

    def release(self, digest: str, last_step: int = 0) -> None:  # noqa: ARG002 - steps end at once here
        self._entries[digest].running -= 1
        if self._entries[digest].running < 0:
            raise EngineError("a lease was given back twice")

    def waiting_reason(self, digest: str) -> Literal["LOADING", "NO_ROOM"]:
        entry = self._entries.get(digest)
        return "LOADING" if entry is None or entry.loaded_at > self._now else "NO_ROOM"

    def evict_idle(self, num_pages: int) -> int:
        freed = 0
        for digest, entry in list(self._entries.items()):
            is_idle = entry.slot >= 0 and not entry.holds and not entry.running and digest not in self.pinned
            if freed < num_pages and is_idle:
                freed += len(entry.pages)
                self._evict(digest)
        return freed

    def check_slot(self, slot: int, generation: int, digest: str) -> None:
        if digest in self.stale or self._entries[digest].slot != slot or self._generations[slot] != generation:
            raise StaleSlotError("the adapter slot was reused")

    def residents(self) -> list[ResidentAdapter]:
        return [
            ResidentAdapter(
                digest=digest,
                tier="device" if entry.slot >= 0 else "loading",
                pages=len(entry.pages),
                running=entry.running,
                pinned=digest in self.pinned,
            )
            for digest, entry in self._entries.items()
            if entry.slot >= 0 or (entry.loaded_at > self._now and entry.holds)
        ]

    def tick(self, step: int) -> list[Failure]:
        self._now += 1
        self._step = step
        failures = []
        for digest, entry in list(self._entries.items()):
            if entry.slot < 0 and not entry.holds:
                del self._entries[digest]
            elif entry.slot < 0 and entry.loaded_at <= self._now:
                if digest in self.broken:
                    del self._entries[digest]
                    failures.append(Failure(digest, AdapterUnavailableError("The weights are gone.")))
                else:
                    self._place(entry)
        return failures

    def pin(self, digest: str, pinned: bool) -> None:
        (self.pinned.add if pinned else self.pinned.discard)(digest)

    def forget(self, digest: str) -> None:
        entry = self._entries.get(digest)
        if entry and entry.slot >= 0 and not entry.running and not entry.holds:
            self._evict(digest)

    def check(self) -> None:
        held = sum(len(entry.pages) for entry in self._entries.values())
        if held != self._pool.counts()["adapter"]:
            raise EngineError("adapter pages were lost")

    def close(self) -> None:
        self._entries.clear()

    @property
    def num_ticks(self) -> int:
        return self._now

    def num_leases(self) -> int:
        return sum(entry.running for entry in self._entries.values())

    def num_holds(self) -> int:
        return sum(entry.holds for entry in self._entries.values())

    def load_now(self, ref: AdapterRef) -> None:
        """Put an adapter on the device, as an earlier request would have left it."""
        self.want(ref)
        self._entries[ref.digest].loaded_at = 0
        self._place(self._entries[ref.digest])
        self.unwant(ref.digest)

    def load_for_ever(self) -> None:
        """Have no load finish from now on."""
        self._ticks = 1 << 60

    def _place(self, entry: _Entry) -> None:
        count = self._size(entry.ref.digest)
        if not self._free_slots or (pages := self._pool.allocate(count, "adapter")) is None:
            self.evict_idle(count - self._pool.num_free)
            if not self._free_slots or (pages := self._pool.allocate(count, "adapter")) is None:
                return
        entry.pages, entry.slot = pages, self._free_slots.pop()

    def _evict(self, digest: str) -> None:
        entry = self._entries.pop(digest)
        self._pool.free(entry.pages, self._step)
        self._generations[entry.slot] += 1
        self._free_slots.append(entry.slot)
        self.evictions += 1


@dataclass
class Simulator:
    """A whole engine without a model; the clock moves one second per pump."""

    num_pages: int = 64
    max_running: int = 8
    step_tokens: int = 16
    max_waiting: int = 1000
    policy: Literal["fcfs", "fair"] = "fcfs"
    adapter_pages: int | dict[str, int] = 2
    load_ticks: int = 3
    slots: int = 64
    max_model_len: int = 512
    eos: frozenset[int] = frozenset()
    now_s: float = 0.0
    checked: bool = True

    def __post_init__(self) -> None:
        self.runner = SimulatedRunner()
        self.pool = PagePool(self.num_pages + 1, on_release=self.runner.poison)
        self.residency = SimulatedResidency(
            self.pool, pages=self.adapter_pages, ticks=self.load_ticks, slots=self.slots
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_running=self.max_running,
                step_tokens=self.step_tokens,
                max_waiting=self.max_waiting,
                policy=self.policy,
            ),
            GEOMETRY,
            self.pool,
            self.residency,
            ModelLimits(max_model_len=self.max_model_len, vocab_size=VOCAB_SIZE, eos_token_ids=self.eos),
            clock=lambda: self.now_s,
            draw_seed=lambda: 7,
        )
        self.core = EngineCore(
            self.scheduler, self.runner, self.residency, self.pool, boot_id="boot", clock=lambda: self.now_s
        )
        self.outputs: dict[str, list[RequestOutput]] = {}

    def pump(self) -> list[RequestOutput]:
        self.now_s += 1.0
        outputs = self.core.pump()
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        if self.checked:
            self.core.check()
        return outputs

    def run(self, max_pumps: int = 5000) -> None:
        """Pump until everything has ended."""
        for _ in range(max_pumps):
            if not self.core.has_work():
                return
            self.pump()
        raise TimeoutError(f"still alive after {max_pumps} pumps: {self.core.status()}")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def last(self, request_id: str) -> RequestOutput:
        return self.outputs[request_id][-1]


def request(
    request_id: str, prompt: int | list[int] = 5, max_tokens: int = 6, ref: AdapterRef | None = None, **fields: object
) -> GenerationRequest:
    """A request whose prompt is its own: `prompt` is a length or the tokens."""
    start = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=2).digest(), "little")
    tokens = [(start + i) % VOCAB_SIZE for i in range(prompt)] if isinstance(prompt, int) else prompt
    own = {key: fields.pop(key) for key in ("flow", "choice_index", "generated_token_ids") if key in fields}
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **fields})  # type: ignore[arg-type]
    return GenerationRequest(request_id=request_id, prompt_token_ids=tokens, params=params, adapter=ref, **own)  # type: ignore[arg-type]
