"""A whole engine without a model, in virtual time: calls in, records and a log of service out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from fairness.calls import REFUSED, Call, Record, Records
from fairness.device import CostedCopier, CostedRunner, CostModel, FetchingLoader
from fairness.service import UNIT_PRICES, ServiceLog
from simulation.adapters import adapter_ref
from simulation.build import SimulatedEngine, small_geometry
from simulation.pages import SimulatedSlab
from simulation.virtual_time import VirtualExecutor, VirtualTime
from weft.adapters.ref import AdapterRef, LoraSpec
from weft.adapters.residency.images import HostImages
from weft.config import SchedulerConfig
from weft.engine.request import FlowKey, GenerationRequest
from weft.engine.sampling_params import SamplingParams
from weft.engine.scheduling.plan import StepPlan
from weft.engine.scheduling.request_limits import ModelLimits
from weft.errors import QueueFullError

PAGE_TOKENS = 16
PAGES_PER_RANK = 40 / 16
"""An adapter of rank 16 is 40 pages."""
VOCAB_SIZE = 128_256
MAX_MODEL_LEN = 32_768
TICK_S = 1e-3
"""From one pump that computed nothing to the next, at most."""

Gate = Callable[[str, int, int, float], float | None]
"""`gate(tenant, prompt_tokens, max_tokens, now_s)`: None lets a call in, a number says when to retry."""


def open_gate(_tenant: str, _prompt_tokens: int, _max_tokens: int, _now_s: float) -> None:
    """Let every call in."""


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
    max_waiting: int = 1 << 20
    is_caching: bool = True
    ranks: Sequence[int] = ()
    """Of the adapters, by index."""
    on_device: Iterable[int] = ()
    """Adapters that are on the device at the start."""
    on_host: Iterable[int] = ()
    """Adapters that are in the host slab at the start."""
    costs: CostModel = field(default_factory=CostModel)


class VirtualEngine(SimulatedEngine):
    """Plays calls. Everything follows from the calls and the settings.

    Args:
        settings: The engine's.
        gate: Decides for each call whether it comes in at all.
    """

    def __init__(self, settings: EngineSettings, gate: Gate = open_gate) -> None:
        self.settings = settings
        self._gate = gate
        self.time = VirtualTime()
        self._refs = [
            replace(adapter_ref(index, "t0"), config=LoraSpec(rank=rank, alpha=16.0))
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
                max_waiting=settings.max_waiting,
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
            make_loader=lambda images, slab: self._make_loader(images, slab, num_pages),
            copier=self._copier,
            executors=(VirtualExecutor(self.time, settings.load_threads), VirtualExecutor(self.time, 1)),
            is_caching=settings.is_caching,
            prices=UNIT_PRICES,
        )
        self.service = ServiceLog(UNIT_PRICES, ranks)
        self._owners: dict[str, tuple[str, int]] = {}
        self.runner = CostedRunner(self.time, costs, ranks, self._observe)
        self.core = self.start(self.runner)
        self._records: dict[str, Record] = {}
        self._due: list[tuple[float, int, Call, Record | None]] = []
        """What follows from calls: further calls, and refused ones that come again; by second."""
        self._num_due = 0
        self._slots_at_start: set[tuple[int, int]] = set()
        self._place_adapters()
        self._loads_before = self._num_loads_ever

    def _make_loader(self, images: HostImages, slab: SimulatedSlab, num_pages: Mapping[str, int]) -> FetchingLoader:
        self._loader = FetchingLoader(self.time, images, slab, num_pages, self.settings.fetch_s)
        return self._loader

    @property
    def records(self) -> Records:
        """All calls that came so far."""
        return Records(list(self._records.values()))

    @property
    def num_loads(self) -> int:
        """Adapters brought to the device while calls were played."""
        return self._num_loads_ever - self._loads_before

    @property
    def loads_per_use(self) -> float:
        """Loads for each load that a step then computed with: 1 where no adapter left the device before it was used."""
        return self.num_loads / max(len(self.runner.slot_uses - self._slots_at_start), 1)

    @property
    def tokens_per_s(self) -> float:
        """Tokens computed, prompts included."""
        return self.runner.num_tokens / self.time.now_s

    def play(self, calls: Iterable[Call], until_s: float | None = None) -> VirtualEngine:
        """Play calls and what follows from them; returns the engine.

        Args:
            calls: In the order of their time; may be endless where `until_s` is given.
            until_s: When to stop, whatever still runs; None plays until all have ended.
        """
        stream = iter(calls)
        coming = next(stream, None)
        try:
            while coming is not None or self._due or self.core.has_work():
                while coming is not None and coming.at_s <= self.time.now_s:
                    self._submit(coming, None)
                    coming = next(stream, None)
                while self._due and self._due[0][0] <= self.time.now_s:
                    _, _, call, record = heapq.heappop(self._due)
                    self._submit(call, record)
                if until_s is not None and self.time.now_s >= until_s:
                    break
                self._pump(until_s if coming is None else coming.at_s)
        finally:
            self.time.kill_all()
        self.core.check()
        return self

    def submit(self, call: Call) -> None:
        """Ask one thing now, for a caller that drives the scheduler itself."""
        self._submit(call, None)

    def _pump(self, next_s: float | None) -> None:
        steps = self.runner.num_steps
        for output in self.core.pump():
            record = self._records[output.request_id]
            record.token_times_s += [self.time.now_s] * len(output.token_ids)
            if output.finish_reason is not None:
                self._end(record, output.error.code if output.error is not None else "")
        if self.runner.num_steps > steps:
            return
        moments = [moment for moment in (next_s, self.time.next_event_s) if moment is not None]
        if self._due:
            moments.append(self._due[0][0])
        if self.core.has_work():
            moments.append(self.time.now_s + TICK_S)
        if moments:  # otherwise the last call was refused just now
            self.time.run_until(max(min(moments), self.time.now_s))

    def _submit(self, call: Call, record: Record | None) -> None:
        now_s = self.time.now_s
        if record is None:
            record = Record(call, f"r{len(self._records)}", call.at_s)
            self._records[record.request_id] = record
        record.call = call
        retry_after_s = self._gate(call.tenant, call.num_prompt, call.num_output, now_s)
        if retry_after_s is None:
            try:
                self.core.submit(self._request(record))
            except QueueFullError as error:
                retry_after_s = error.retry_after_s
            else:
                self._owners[record.request_id] = call.tenant, call.num_prompt
                return
        record.refused_s.append(now_s)
        record.retry_after_s.append(retry_after_s)
        if len(record.refused_s) < call.tries:
            self._come(replace(call, at_s=now_s + retry_after_s), record)
        else:
            record.failed = REFUSED

    def _request(self, record: Record) -> GenerationRequest:
        call = record.call
        first = int(record.request_id[1:]) * 4_099 % (VOCAB_SIZE - MAX_MODEL_LEN)
        flow: dict[str, Any] = {} if call.priority is None else {"priority": call.priority}
        return GenerationRequest(
            request_id=record.request_id,
            prompt_token_ids=list(range(first, first + call.num_prompt)),
            params=SamplingParams(max_tokens=call.num_output, temperature=0.0, ignore_eos=True),
            adapter=None if call.adapter is None else self._refs[call.adapter],
            flow=FlowKey(lane=call.lane, tenant=call.tenant, weight=call.weight, deadline_s=call.deadline_s, **flow),
        )

    def _end(self, record: Record, failed: str) -> None:
        record.failed = failed
        if not failed:
            record.ended_s = self.time.now_s
        following = record.call.follow(self.time.now_s) if record.call.follow is not None else None
        if following is not None:
            self._come(following, None)

    def _come(self, call: Call, record: Record | None) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (call.at_s, self._num_due, call, record))

    def _observe(self, plan: StepPlan, ended_s: float) -> None:
        self.service.note(plan, ended_s, self._owners)

    @property
    def _num_loads_ever(self) -> int:
        return sum(count for path, count in self.residency.loads.items() if path.endswith(":ok"))

    def _place_adapters(self) -> None:
        """Bring adapters to the device and to the host before the first call, in no time that a call could see."""
        for index in [*self.settings.on_host, *self.settings.on_device]:
            digest = self._refs[index].digest
            if digest not in self.images:
                image = self._loader.image(digest)
                self.images.add(image)
                self.images.release(image)
        for index in self.settings.on_device:
            self._bring(self._refs[index])
        if self._loader.num_fetches:
            raise ValueError("the adapters that are there at the start do not fit the host slab: raise host_pages")
        self._copier.page_copy_s = self.settings.costs.page_copy_s

    def _bring(self, ref: AdapterRef) -> None:
        self.residency.want(ref)
        for _ in range(3):
            self.time.advance(0)
            self.residency.tick(0)
        if self.residency.state(ref.digest) != "device":
            raise ValueError("the adapters that are there at the start do not fit the device: raise num_pages or slots")
        self.residency.unwant(ref.digest)
        lease = self.residency.acquire(ref.digest)
        if lease is not None:
            self._slots_at_start.add((lease.slot, lease.generation))
            self.residency.release(ref.digest)
