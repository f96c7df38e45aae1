"""A residency and a runner without a model, so that scheduler and core run in virtual time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal, cast

from weft.adapters.ref import AdapterRef, LoraSpec
from weft.adapters.residency.entry import LoadFailure
from weft.adapters.residency.residency import Residency
from weft.adapters.residency.slots import SlotLease
from weft.config import SchedulerConfig
from weft.engine.core import EngineCore
from weft.engine.execution.runner import ModelRunner
from weft.engine.model.rope import RopeSpec
from weft.engine.request import GenerationRequest, RequestOutput, TokenLogprobs
from weft.engine.sampling_params import SamplingParams
from weft.engine.scheduling.kv_pages import prefix_seed
from weft.engine.scheduling.plan import Chunk, ChunkResult, StepPlan
from weft.engine.scheduling.request_limits import ModelLimits
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.status import ResidentAdapter
from weft.errors import AdapterUnavailableError, EngineError
from weft.memory.eviction import Evictor, PageCosts, UseCount, eviction_policy
from weft.memory.geometry import PageGeometry
from weft.memory.host_slab import HostSlab, SwapSpace
from weft.memory.pool import PageKind, PagePool
from weft.memory.prefix_cache import PrefixCache

PAGE_TOKENS = 4
VOCAB_SIZE = 1000
RECOMPUTES = PageCosts(copy_s=1.0, load_s=1.0, token_s=0.001)
"""Computing anew is always cheaper than swapping."""
SWAPS = PageCosts(copy_s=0.001, load_s=1.0, token_s=1.0)
"""Swapping is always cheaper than computing anew."""


def geometry(num_groups: int = 1) -> PageGeometry:
    return PageGeometry(
        page_bytes=1024,
        page_tokens=PAGE_TOKENS,
        num_groups=num_groups,
        layers_per_group=1,
        num_layers=num_groups,
        num_kv_heads=1,
        head_dim=32,
        dtype_bytes=4,
    )


GEOMETRY = geometry()


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


def likely_tokens(digest: str | None, history: list[int], count: int) -> tuple[list[int], list[float]]:
    """The simulated model's `count` most likely tokens, most likely first, with their log-probabilities."""
    tokens = [next_token(digest, history)]
    rng = random.Random(tokens[0] + VOCAB_SIZE * len(history))
    logprobs = [-rng.random()]
    while len(tokens) < count:
        token = rng.randrange(VOCAB_SIZE)
        if token not in tokens:
            tokens.append(token)
            logprobs.append(logprobs[-1] - rng.random())
    return tokens, logprobs


def expected_tokens(request: GenerationRequest, count: int) -> list[int]:
    history = request.prompt_token_ids + request.generated_token_ids
    digest = request.adapter.digest if request.adapter else None
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token(digest, history + tokens))
    return tokens


KvEntry = tuple[int, int]
"""A token, and a digest of the adapter and of all tokens up to it: what keys and values depend on."""


def kv_entries(digest: str | None, tokens: list[int]) -> list[KvEntry]:
    entries, state = [], hash(digest)
    for token in tokens:
        state = hash((state, token))
        entries.append((token, state))
    return entries


class SimulatedSlab(HostSlab):
    """Host pages that forget what was in them when they are given back."""

    def __init__(self, num_pages: int, contents: dict[int, dict[int, KvEntry]]) -> None:
        super().__init__(num_pages, page_bytes=1, pinned=False)
        self._contents = contents

    def free(self, pages: Sequence[int]) -> None:
        super().free(pages)
        for page in pages:
            self._contents.pop(page, None)


@dataclass
class SimulatedRunner:
    """Keeps what every page holds, so that a token computed from wrong, freed or foreign pages is an error."""

    num_groups: int = 1
    pages: dict[int, dict[int, KvEntry]] = field(default_factory=dict)
    host_pages: dict[int, dict[int, KvEntry]] = field(default_factory=dict)
    fail_on: set[int] = field(default_factory=set)
    plans: list[StepPlan] = field(default_factory=list)
    is_shared: Callable[[int], bool] = lambda _page: False
    wrong: list[Exception] = field(default_factory=list)
    """What a plan should not have asked for; the engine itself turns it into an error of the step."""

    def execute(self, plan: StepPlan) -> list[ChunkResult]:
        self.plans.append(deepcopy(plan))  # a copy, because the scheduler changes chunks for the next step
        if plan.step in self.fail_on:
            raise RuntimeError("the device is on fire")
        try:
            return self._carry_out(plan)
        except (AssertionError, LookupError) as error:
            self.wrong.append(error)
            raise

    def _carry_out(self, plan: StepPlan) -> list[ChunkResult]:
        for move in plan.swap_out:
            self.host_pages[move.host_page] = dict(self.pages[move.device_page])
        for page in plan.zero_pages:
            self._write(page, {})
        for move in plan.swap_in:
            self._write(move.device_page, dict(self.host_pages[move.host_page]))
        for copy in plan.copies:
            self._write(copy.target, dict(self.pages[copy.source]))
        return [self._chunk(chunk) for chunk in plan.chunks]

    def close(self) -> None:
        self.pages.clear()

    def poison(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.pages.pop(page, None)

    def _write(self, page: int, content: dict[int, KvEntry]) -> None:
        if self.is_shared(page):
            raise AssertionError(f"page {page} is published, and was overwritten")
        self.pages[page] = content

    def _chunk(self, chunk: Chunk) -> ChunkResult:
        digest = chunk.adapter.digest if chunk.adapter else None
        end = chunk.start + len(chunk.token_ids)
        assert len(chunk.block_table) == self.num_groups
        for table in chunk.block_table:
            history = [self.pages[table[p // PAGE_TOKENS]][p % PAGE_TOKENS] for p in range(chunk.start)]
            tokens = [token for token, _ in history] + chunk.token_ids
            entries = kv_entries(digest, tokens)
            assert entries[: chunk.start] == history, "KV of another adapter or of other tokens"
            for position in range(chunk.start, end):
                page = table[position // PAGE_TOKENS]
                assert not self.is_shared(page), f"page {page} is published, and was written"
                self.pages[page][position % PAGE_TOKENS] = entries[position]
        chosen = next_token(digest, tokens) if chunk.sample is not None else None
        num_top = chunk.sample.params.logprobs if chunk.sample is not None else None
        top_ids, top_logprobs = likely_tokens(digest, tokens, num_top) if num_top else ([], [])
        return ChunkResult(
            request_id=chunk.request_id,
            token_id=chosen,
            logprobs=TokenLogprobs(token_id=chosen, logprob=-1.0, rank=1, top_ids=top_ids, top_logprobs=top_logprobs)
            if num_top is not None and chosen is not None
            else None,
            prompt_logprobs=[
                TokenLogprobs(token_id=target, logprob=-float(chunk.start + i), rank=1)
                for i, target in enumerate(chunk.prompt_targets or [])
            ],
        )


@dataclass(eq=False)
class _Entry:
    """An adapter, as the evictor sees it."""

    ref: AdapterRef
    evict_entry: Callable[[_Entry], None]
    holds: int = 0
    running: int = 0
    loaded_at: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    last_step: int = 0
    uses: UseCount = field(default_factory=UseCount)
    kind: PageKind = "adapter"
    depth: int = 0
    evict_last: bool = False

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    def reload_cost(self) -> tuple[float, int]:
        return 0.01, len(self.pages)

    def evict(self) -> None:
        self.evict_entry(self)


class SimulatedResidency:
    """The contract of the real one, with loads that take a fixed number of ticks."""

    def __init__(
        self,
        pool: PagePool,
        evictor: Evictor,
        prefixes: PrefixCache | None,
        *,
        pages: int | dict[str, int] = 2,
        ticks: int = 3,
        slots: int = 64,
    ) -> None:
        self._pool = pool
        self._evictor = evictor
        self._prefixes = prefixes
        self._pages = pages
        self._ticks = ticks
        self._free_slots = list(range(slots))
        self._generations = [0] * slots
        self._entries: dict[str, _Entry] = {}
        self._now = 0
        self.broken: set[str] = set()
        self.on_host: set[str] = set()
        """Digests of adapters that were read before: they take no time to come."""
        self.pinned: set[str] = set()
        self.known_pages = True
        self.loads: dict[str, int] = {}
        self.load_seconds = 0.0
        self.load_p95_s: dict[str, float] = {}
        self.reserve_pages = 0
        self.expected: list[str] = []

    def _size(self, digest: str) -> int:
        return self._pages if isinstance(self._pages, int) else self._pages[digest]

    @property
    def is_copying(self) -> bool:
        return False  # an adapter is there in the tick in which it gets pages

    @property
    def lacks_slot(self) -> bool:
        return not self._free_slots and not any(entry in self._evictor for entry in self._entries.values())

    def state(self, digest: str) -> Literal["device", "host", "stored"]:
        entry = self._entries.get(digest)
        if entry is None or (entry.slot < 0 and entry.loaded_at > self._now):
            return "host" if digest in self.on_host else "stored"
        return "device" if entry.slot >= 0 else "host"

    def pages_needed(self, ref: AdapterRef) -> int | None:
        return self._size(ref.digest) if self.known_pages else None

    def want(self, ref: AdapterRef) -> None:
        ticks = 0 if ref.digest in self.on_host else self._ticks
        entry = self._entries.setdefault(ref.digest, _Entry(ref, self._evict, loaded_at=self._now + ticks))
        entry.holds += 1
        self._settle(entry)

    def unwant(self, digest: str) -> None:
        entry = self._entries.get(digest)
        if entry is not None:
            entry.holds -= 1
            if entry.holds < 0:
                raise EngineError("a hold was dropped twice")
            self._settle(entry)

    def drop_holds(self, keep: str | None = None) -> None:
        for digest, entry in self._entries.items():
            entry.holds = entry.holds if digest == keep else 0
            self._settle(entry)

    def expect(self, digests: Sequence[str]) -> None:
        """Remember the order; every load takes as long, so nothing follows from it."""
        self.expected = list(digests)

    def acquire(self, digest: str) -> SlotLease | None:
        entry = self._entries.get(digest)
        if entry is None or entry.slot < 0:
            return None
        entry.running += 1
        self._evictor.used(entry)
        self._settle(entry)
        return SlotLease(entry.slot, self._generations[entry.slot], digest)

    def release(self, digest: str, last_step: int = 0) -> None:
        entry = self._entries[digest]
        entry.running -= 1
        entry.last_step = max(entry.last_step, last_step)
        if entry.running < 0:
            raise EngineError("a lease was given back twice")
        self._settle(entry)

    def waiting_reason(self, digest: str) -> Literal["LOADING", "NO_ROOM"]:
        entry = self._entries.get(digest)
        return "LOADING" if entry is None or entry.loaded_at > self._now else "NO_ROOM"

    def residents(self) -> list[ResidentAdapter]:
        return [
            ResidentAdapter(
                digest=digest,
                tier="device" if entry.slot >= 0 else "loading",
                pages=len(entry.pages),
                running=entry.running,
                pinned=digest in self.pinned,
                slot=entry.slot,
            )
            for digest, entry in self._entries.items()
            if entry.slot >= 0 or (entry.loaded_at > self._now and entry.holds)
        ]

    def tick(self, step: int) -> list[LoadFailure]:
        self._now += 1
        self._pool.complete(step)
        failures = []
        for digest, entry in list(self._entries.items()):
            if entry.slot < 0 and not entry.holds:
                del self._entries[digest]
            elif entry.slot < 0 and entry.loaded_at <= self._now:
                if digest in self.broken:
                    del self._entries[digest]
                    failures.append(LoadFailure(digest, AdapterUnavailableError("The weights are gone.")))
                else:
                    self._place(entry)
        return failures

    def pin(self, ref: AdapterRef, pinned: bool) -> None:
        (self.pinned.add if pinned else self.pinned.discard)(ref.digest)
        if ref.digest in self._entries:
            self._settle(self._entries[ref.digest])

    def forget(self, digest: str) -> None:
        entry = self._entries.get(digest)
        if entry and entry.slot >= 0 and not entry.running and not entry.holds:
            self._evictor.take(entry)

    def check(self, num_swap_pages: int = 0) -> None:  # noqa: ARG002 - the slab holds nothing else here
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

    def _settle(self, entry: _Entry) -> None:
        if entry.slot >= 0 and not entry.holds and not entry.running and entry.ref.digest not in self.pinned:
            self._evictor.offer(entry)
        else:
            self._evictor.withdraw(entry)

    def _place(self, entry: _Entry) -> None:
        count = self._size(entry.ref.digest)
        if self._evictor.num_available - count < self.reserve_pages:
            return
        victim = None if self._free_slots else self._evictor.first(self._entries.values())
        if not self._free_slots and victim is None:
            return
        if self._evictor.make_room(count, victim) and self._free_slots:
            slot = self._free_slots.pop()
            pages = self._pool.allocate(count, "adapter", slot)
            if pages is None:
                raise EngineError("room that was made for an adapter is not there")
            entry.pages, entry.slot = pages, slot
            self._settle(entry)

    def _evict(self, entry: _Entry) -> None:
        if self._prefixes is not None:
            self._prefixes.evict_group(entry.ref.digest)
        del self._entries[entry.ref.digest]
        self._pool.free(entry.pages, entry.last_step)
        self._generations[entry.slot] += 1
        self._free_slots.append(entry.slot)


@dataclass
class Simulator:
    """A whole engine without a model; the clock moves one second per pump."""

    num_pages: int = 64
    max_running: int = 8
    step_tokens: int = 16
    max_waiting: int = 1000
    policy: Literal["fcfs", "fair"] = "fair"
    adapter_pages: int | dict[str, int] = 2
    load_ticks: int = 3
    slots: int = 64
    max_model_len: int = 512
    eos: frozenset[int] = frozenset()
    has_prefixes: bool = True
    host_pages: int = 64
    costs: PageCosts = RECOMPUTES
    eviction: Literal["gdsf", "lru"] = "gdsf"
    num_groups: int = 1
    now_s: float = 0.0
    checked: bool = True

    def __post_init__(self) -> None:
        self.runner = SimulatedRunner(num_groups=self.num_groups)
        self.pool = PagePool(self.num_pages + 1, on_release=self.runner.poison)
        self.runner.is_shared = lambda page: self.pool.state(page) == "prefix"
        clock = lambda: self.now_s  # noqa: E731
        self.evictor = Evictor(self.pool, eviction_policy(self.eviction), clock)
        block_s = PAGE_TOKENS * self.costs.token_s
        self.prefixes = PrefixCache(self.pool, self.evictor, block_s, clock) if self.has_prefixes else None
        self.slab = SimulatedSlab(self.host_pages, self.runner.host_pages)
        self.swap = SwapSpace(self.slab, lambda count: self.slab.num_free >= count, self.host_pages)
        self.residency = SimulatedResidency(
            self.pool, self.evictor, self.prefixes, pages=self.adapter_pages, ticks=self.load_ticks, slots=self.slots
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_running=self.max_running,
                step_tokens=self.step_tokens,
                max_waiting=self.max_waiting,
                policy=self.policy,
            ),
            geometry(self.num_groups),
            self.pool,
            self.residency,
            ModelLimits(max_model_len=self.max_model_len, vocab_size=VOCAB_SIZE, eos_token_ids=self.eos),
            evictor=self.evictor,
            prefixes=self.prefixes,
            swap=self.swap,
            costs=self.costs,
            prefix_seed=prefix_seed("base", "float32", RopeSpec()),
            clock=clock,
            draw_seed=lambda: 7,
        )
        self.core = EngineCore(
            self.scheduler,
            cast(ModelRunner, self.runner),
            cast(Residency, self.residency),
            self.pool,
            evictor=self.evictor,
            prefixes=self.prefixes,
            swap=self.swap,
            boot_id="boot",
            clock=clock,
        )
        self.outputs: dict[str, list[RequestOutput]] = {}

    def pump(self) -> list[RequestOutput]:
        self.now_s += 1.0
        outputs = self.core.pump()
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        if self.runner.wrong:
            raise self.runner.wrong[0]
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

    @property
    def num_preemptions(self) -> int:
        return sum(self.scheduler.preemptions.values())

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
    names = ("flow", "choice_index", "generated_token_ids", "fork_of", "beam")
    own = {key: fields.pop(key) for key in names if key in fields}
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **fields})  # type: ignore[arg-type]
    return GenerationRequest(request_id=request_id, prompt_token_ids=tokens, params=params, adapter=ref, **own)  # type: ignore[arg-type]
