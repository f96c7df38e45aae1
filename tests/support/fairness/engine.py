"""A whole engine without a model, in virtual time: calls in, records and a log of service out."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from fairness.calls import Call, Record, Records
from fairness.device import CostedCopier, CostedRunner, CostModel, FetchingLoader
from fairness.service import UNIT_PRICES, ServiceLog
from manylora.adapters.ref import AdapterRef, LoraSpec
from manylora.config import SchedulerConfig
from manylora.engine.request import FlowKey, GenerationRequest
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.scheduling.plan import StepPlan
from manylora.engine.scheduling.request_state import ModelLimits
from simulation.adapters import adapter
from simulation.build import SimulatedEngine, small_geometry
from simulation.virtual_time import VirtualExecutor, VirtualTime

PAGE_TOKENS = 16
PAGES_PER_RANK = 40 / 16
"""An adapter of rank 16 is 40 pages."""
VOCAB_SIZE = 128_256
MAX_MODEL_LEN = 32_768
TICK_S = 1e-3
"""From one pump that computed nothing to the next, at most."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One engine."""

    policy: str = "fair"
    inner: str = "fifo"
    """Order inside one adapter of one tenant."""
    rows: int = 64
    """Most requests of a step."""
    step_tokens: int = 512
    itl_target_ms: float | None = None
    num_pages: int = 12_000
    """Of the pool; the zero page comes on top."""
    host_pages: int = 16_000
    slots: int = 256
    load_threads: int = 4
    fetch_s: float = 0.2
    """Seconds in which the store gives one adapter."""
    is_caching: bool = True
    ranks: Sequence[int] = ()
    """Of the adapters, by index."""
    on_device: Iterable[int] = ()
    """Adapters that are on the device at the start."""
    on_host: Iterable[int] = ()
    """Adapters that are in the host slab at the start."""
    costs: CostModel = field(default_factory=CostModel)


class VirtualEngine(SimulatedEngine):
    """Plays calls. Everything follows from the calls and the settings."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.time = VirtualTime()
        self._refs = [
            replace(adapter(f"adapter {index}", "t0"), config=LoraSpec(rank=rank, alpha=16.0))
            for index, rank in enumerate(settings.ranks)
        ]
        ranks = {ref.digest: rank for ref, rank in zip(self._refs, settings.ranks, strict=True)}
        num_pages = {digest: round(rank * PAGES_PER_RANK) for digest, rank in ranks.items()}
        costs = settings.costs
        self._copier = CostedCopier(self.time)
        super().__init__(
            clock=lambda: self.time.now_s,
            config=SchedulerConfig(
                max_running=settings.rows,
                step_tokens=settings.step_tokens,
                itl_target_ms=settings.itl_target_ms,
                max_waiting=1 << 20,
                policy=cast(Any, settings.policy),
                inner=cast(Any, settings.inner),
            ),
            geometry=replace(small_geometry(PAGE_TOKENS), page_bytes=2 << 20),
            limits=ModelLimits(max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE),
            costs=costs.page_costs,
            num_pages=settings.num_pages,
            host_pages=settings.host_pages,
            max_swap_pages=settings.host_pages // 2,
            slots=settings.slots,
            make_loader=lambda images, slab: FetchingLoader(
                self.time, images, slab, num_pages, settings.fetch_s
            ),
            copier=self._copier,
            executors=(
                VirtualExecutor(self.time, settings.load_threads),
                VirtualExecutor(self.time, 1),
            ),
            is_caching=settings.is_caching,
            prices=UNIT_PRICES,
        )
        self.service = ServiceLog(UNIT_PRICES, ranks)
        self._owners: dict[str, tuple[str, int]] = {}
        self.runner = CostedRunner(self.time, costs, ranks, self._observe)
        self.core = self.start(self.runner)
        self._records: dict[str, Record] = {}
        self._due: list[tuple[float, int, Call]] = []
        """What follows from calls, by second."""
        self._num_due = 0
        self._slots_at_start: set[tuple[int, int]] = set()
        self._place_adapters()
        self._loads_before = self._num_loads_ever

    @property
    def records(self) -> Records:
        """All calls that came so far."""
        return Records(list(self._records.values()))

    @property
    def loads_per_use(self) -> float:
        """Loads for each load that a step then computed with: 1 where no adapter left the device before it was used."""
        return (self._num_loads_ever - self._loads_before) / max(
            len(self.runner.slot_uses - self._slots_at_start), 1
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens computed, prompts included."""
        return self.runner.num_tokens / self.time.now_s

    def play(self, calls: Iterable[Call], until_s: float) -> VirtualEngine:
        """Play calls, in the order of their time, and what follows from them, until a second; returns the engine."""
        stream = iter(calls)
        coming = next(stream, None)
        try:
            while self.time.now_s < until_s:
                while coming is not None and coming.at_s <= self.time.now_s:
                    self.submit(coming)
                    coming = next(stream, None)
                while self._due and self._due[0][0] <= self.time.now_s:
                    self.submit(heapq.heappop(self._due)[2])
                self._pump(until_s if coming is None else coming.at_s)
        finally:
            self.time.kill_all()
        self.core.check()
        return self

    def submit(self, call: Call) -> None:
        """Ask one thing now."""
        number = len(self._records)
        record = self._records[f"r{number}"] = Record(call, f"r{number}")
        self._owners[record.request_id] = call.tenant, call.num_prompt
        first = number * 4_099 % (VOCAB_SIZE - MAX_MODEL_LEN)
        self.core.submit(
            GenerationRequest(
                request_id=record.request_id,
                prompt_token_ids=list(range(first, first + call.num_prompt)),
                params=SamplingParams(max_tokens=call.num_output, temperature=0.0, ignore_eos=True),
                adapter=None if call.adapter is None else self._refs[call.adapter],
                flow=FlowKey(lane=call.lane, tenant=call.tenant, weight=call.weight),
            )
        )

    def _pump(self, next_s: float) -> None:
        steps = self.runner.num_steps
        for output in self.core.pump():
            record = self._records[output.request_id]
            record.token_times_s += [self.time.now_s] * len(output.token_ids)
            if output.finish_reason is not None:
                if output.error is not None:
                    raise RuntimeError(f"{record.call} failed: {output.error}")
                self._end(record)
        if self.runner.num_steps > steps:
            return
        moments = [next_s]
        if self.time.next_event_s is not None:
            moments.append(self.time.next_event_s)
        if self._due:
            moments.append(self._due[0][0])
        if self.core.has_work():
            moments.append(self.time.now_s + TICK_S)
        self.time.run_until(max(min(moments), self.time.now_s))

    def _end(self, record: Record) -> None:
        record.ended_s = self.time.now_s
        if record.call.follow is not None:
            self._num_due += 1
            heapq.heappush(
                self._due, (self.time.now_s, self._num_due, record.call.follow(self.time.now_s))
            )

    def _observe(self, plan: StepPlan, ended_s: float) -> None:
        self.service.note(plan, ended_s, self._owners)

    @property
    def _num_loads_ever(self) -> int:
        return sum(
            count for path, count in self.residency.transfers.loads.items() if path.endswith(":ok")
        )

    def _place_adapters(self) -> None:
        """Bring adapters to the device and to the host before the first call, in no time that a call could see."""
        for index in [*self.settings.on_host, *self.settings.on_device]:
            digest = self._refs[index].digest
            if digest not in self.images:
                image = self.loader.image(digest)
                self.images.add(image)
                self.images.release(image)
        for index in self.settings.on_device:
            self._bring(self._refs[index])
        if self.loader.num_fetches:
            raise ValueError(
                "the adapters that are there at the start do not fit the host slab: raise host_pages"
            )
        self._copier.page_copy_s = self.settings.costs.page_copy_s

    def _bring(self, ref: AdapterRef) -> None:
        self.residency.hold(ref)
        for _ in range(3):
            self.time.advance(0)
            self.residency.tick(0)
        if self.residency.state(ref.digest) != "device":
            raise ValueError(
                "the adapters that are there at the start do not fit the device: raise num_pages or slots"
            )
        self.residency.release_hold(ref.digest)
        lease = self.residency.acquire(ref.digest)
        if lease is not None:
            self._slots_at_start.add((lease.slot, lease.generation))
            self.residency.release(ref.digest)
