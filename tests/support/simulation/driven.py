"""A whole engine that a test drives: the clock moves one second per pump, and pages hold what was computed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from manylora.adapters.ref import AdapterRef
from manylora.adapters.residency.images import HostImage, HostImages
from manylora.config import SchedulerConfig
from manylora.engine.request import GenerationRequest, RequestOutput, TokenLogprobs
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.scheduling.plan import Chunk, ChunkResult, StepPlan
from manylora.engine.scheduling.request_state import ModelLimits
from manylora.errors import AdapterUnavailableError
from manylora.memory.eviction import PageCosts
from simulation.adapters import adapter as adapter
from simulation.adapters import image_of
from simulation.at_once import AtOnce
from simulation.build import SimulatedEngine, small_geometry
from simulation.pages import SimulatedSlab

PAGE_TOKENS = 4
VOCAB_SIZE = 1000
RECOMPUTES = PageCosts(copy_s=1.0, load_s=1.0, token_s=0.001)
"""Costs with which recomputing is always cheaper than swapping."""
SWAPS = PageCosts(copy_s=0.001, load_s=1.0, token_s=1.0)
"""Costs with which swapping is always cheaper than recomputing."""


def next_token(digest: str | None, history: list[int]) -> int:
    """The simulated model: the next token is a function of the adapter and all tokens before."""
    content = repr((digest, history)).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little") % VOCAB_SIZE


def likely_tokens(
    digest: str | None, history: list[int], count: int
) -> tuple[list[int], list[float]]:
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


@dataclass
class DrivenRunner(AtOnce):
    """Keeps what every page holds, so that a token computed from wrong, freed or foreign pages is an error."""

    num_groups: int
    is_shared: Callable[[int], bool]
    """True for a page that is published."""
    host_page: Callable[[int], Any]
    pages: dict[int, dict[int, KvEntry]] = field(default_factory=dict)
    fail_on: set[int] = field(default_factory=set)
    plans: list[StepPlan] = field(default_factory=list)
    wrong: list[Exception] = field(default_factory=list)
    """Errors of plans; the engine itself turns each into an error of the step."""

    def execute(self, plan: StepPlan) -> list[ChunkResult]:
        # A copy, because the scheduler changes chunks for the next step.
        self.plans.append(deepcopy(plan))
        if plan.step in self.fail_on:
            raise RuntimeError("the device is on fire")
        try:
            return self.carry_out(plan)
        except (AssertionError, LookupError) as error:
            self.wrong.append(error)
            raise

    def carry_out(self, plan: StepPlan) -> list[ChunkResult]:
        for move in plan.swap_out:
            self.host_page(move.host_page).content = dict(self.pages[move.device_page])
        for page in plan.zero_pages:
            self._write(page, {})
        for move in plan.swap_in:
            self._write(move.device_page, dict(self.host_page(move.host_page).content))
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
            history = [
                self.pages[table[p // PAGE_TOKENS]][p % PAGE_TOKENS] for p in range(chunk.start)
            ]
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
            logprobs=TokenLogprobs(
                token_id=chosen, logprob=-1.0, rank=1, top_ids=top_ids, top_logprobs=top_logprobs
            )
            if num_top is not None and chosen is not None
            else None,
            prompt_logprobs=[
                TokenLogprobs(token_id=target, logprob=-float(chunk.start + i), rank=1)
                for i, target in enumerate(chunk.prompt_targets or [])
            ],
        )


class DrivenStore:
    """Loads adapters as their executor: each takes `ticks` pumps, or no time where that is 0, and none is copied.

    Args:
        sizes: Pages of each adapter, by digest, or of all.
        ticks: Pumps that a load takes.
        now_s: The second of the engine.
    """

    pages_at_once = 1 << 30

    def __init__(self, sizes: int | dict[str, int], ticks: int, now_s: Callable[[], float]) -> None:
        self._sizes = sizes
        self._now_s = now_s
        self._due: list[tuple[float, Callable[[], None]]] = []
        self.ticks = ticks
        self.broken: set[str] = set()
        """Digests of adapters whose weights are gone."""

    def keep(self, images: HostImages, slab: SimulatedSlab) -> DrivenStore:
        """Put images there from now on."""
        self.images = images
        self._slab = slab
        return self

    def load(self, ref: AdapterRef, *, is_paced: bool = True) -> HostImage:  # noqa: ARG002 - as the real one
        if ref.digest in self.broken:
            raise AdapterUnavailableError("The weights are gone.")
        size = self._sizes if isinstance(self._sizes, int) else self._sizes[ref.digest]
        return image_of(ref.digest, size, self.images, self._slab)

    def copy_now(self, _sources: Sequence[Any], _pages: Sequence[int]) -> None:
        """Do nothing: the contents of adapters do not matter here."""

    def submit(self, fn: Callable[[], None], /) -> Future[None]:
        self._due.append((self._now_s() + self.ticks, fn))
        if not self.ticks:
            self.run_due()
        return Future()

    @property
    def num_loading(self) -> int:
        return len(self._due)

    def run_due(self) -> None:
        """Finish the loads that have taken their time."""
        due = [fn for when_s, fn in self._due if when_s <= self._now_s()]
        self._due = [entry for entry in self._due if entry[0] > self._now_s()]
        for fn in due:
            fn()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - a pool's signature
        self._due.clear()


class Simulator(SimulatedEngine):
    """The engine, and what it said so far."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        max_running: int = 8,
        step_tokens: int = 16,
        max_waiting: int = 1000,
        policy: Literal["fcfs", "fair"] = "fair",
        adapter_pages: int | dict[str, int] = 2,
        load_ticks: int = 3,
        slots: int = 64,
        max_model_len: int = 512,
        eos: frozenset[int] = frozenset(),
        has_prefixes: bool = True,
        host_pages: int = 64,
        costs: PageCosts = RECOMPUTES,
        num_groups: int = 1,
        checked: bool = True,
        overlaps: bool = False,
    ) -> None:
        self.now_s = 0.0
        self.checked = checked
        self.store = DrivenStore(adapter_pages, load_ticks, lambda: self.now_s)
        self.runner = DrivenRunner(
            num_groups,
            lambda page: self.pool.state(page) == "prefix",
            lambda page: self.slab.host_pages[page],
        )
        super().__init__(
            clock=lambda: self.now_s,
            config=SchedulerConfig(
                max_running=max_running,
                step_tokens=step_tokens,
                max_waiting=max_waiting,
                policy=policy,
            ),
            geometry=small_geometry(PAGE_TOKENS, num_groups),
            limits=ModelLimits(
                max_model_len=max_model_len, vocab_size=VOCAB_SIZE, eos_token_ids=eos
            ),
            costs=costs,
            num_pages=num_pages,
            host_pages=host_pages,
            max_swap_pages=host_pages,
            slots=slots,
            make_loader=self.store.keep,
            copier=self.store,
            executors=(self.store, self.store),
            is_caching=has_prefixes,
            poison=self.runner.poison,
        )
        self.stepping: list[tuple[int, int]] = []
        """Counts that each pump told loads: requests that run, and requests that wait for loads."""
        self.core = self.start(
            self.runner, lambda *counts: self.stepping.append(counts), overlaps=overlaps
        )
        self.outputs: dict[str, list[RequestOutput]] = {}

    def submit(self, *requests: GenerationRequest) -> None:
        for each in requests:
            self.core.submit(each)

    def pump(self, count: int = 1) -> list[RequestOutput]:
        """Pump `count` times, and return the outputs of the last pump."""
        outputs: list[RequestOutput] = []
        for _ in range(count):
            self.now_s += 1.0
            self.store.run_due()
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

    def load_now(self, *refs: AdapterRef) -> None:
        """Put adapters on the device, as earlier requests would have left them."""
        ticks, self.store.ticks = self.store.ticks, 0
        for ref in refs:
            self.residency.hold(ref)
            self.residency.tick(0)
            self.residency.release_hold(ref.digest)
        self.store.ticks = ticks

    def put_on_host(self, *refs: AdapterRef) -> None:
        """Put adapters into host memory alone; nothing may run."""
        self.load_now(*refs)
        self.evictor.make_room(self.pool.capacity)

    def know(self, *refs: AdapterRef) -> None:
        """Have the sizes of adapters known that are in the store alone; nothing may run."""
        self.put_on_host(*refs)
        for ref in refs:
            self.images.drop(ref.digest)

    @property
    def num_leases(self) -> int:
        return sum(resident.running for resident in self.residency.residents())

    @property
    def num_holds(self) -> int:
        return sum(resident.holds for resident in self.residency.residents())

    @property
    def num_preemptions(self) -> int:
        return sum(self.scheduler.table.preemptions.values())

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def last(self, request_id: str) -> RequestOutput:
        return self.outputs[request_id][-1]


def request(
    request_id: str,
    prompt: int | list[int] = 5,
    max_tokens: int = 6,
    ref: AdapterRef | None = None,
    **fields: object,
) -> GenerationRequest:
    """A request whose prompt is its own: `prompt` is a length or the tokens."""
    start = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=2).digest(), "little")
    tokens = (
        [(start + i) % VOCAB_SIZE for i in range(prompt)] if isinstance(prompt, int) else prompt
    )
    names = ("flow", "choice_index", "generated_token_ids", "fork_of", "beam")
    own: dict[str, Any] = {key: fields.pop(key) for key in names if key in fields}
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **fields})  # type: ignore[arg-type]
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=tokens, params=params, adapter=ref, **own
    )
