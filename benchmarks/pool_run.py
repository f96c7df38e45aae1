"""Puts a load on an engine in this process, and records what each request, each step and each adapter load did.

Closed loop: a fixed number of requests in flight. Open loop: requests are submitted when they are due. Times are real.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from weft.adapters.ref import AdapterRef
from weft.benchmarks.metrics import RequestRecord
from weft.benchmarks.pool_shape import DTYPE, VOCAB_SIZE, PoolShape
from weft.benchmarks.stored import greedy_request
from weft.benchmarks.workloads import TimedRequest
from weft.config import AdapterConfig, Config, MemoryConfig, ModelConfig, RegistryConfig, SchedulerConfig
from weft.engine.build import build_engine
from weft.engine.core import EngineCore
from weft.engine.costs import measure_costs
from weft.engine.model.spec import read_spec
from weft.engine.model.weights import load_decoder
from weft.engine.request import GenerationRequest
from weft.engine.status import EngineStatus, StepStats
from weft.errors import WeftError
from weft.memory.arena import Arena
from weft.memory.copies import PageCopier
from weft.memory.host_slab import HostSlab
from weft.memory.page_costs import PageCosts
from weft.memory.pool import PagePool

IDLE_S = 0.001
"""Longest wait for a load while there is nothing to compute."""
STATUS_STEPS = 128
"""Steps between two looks at the engine's status, which keeps the last 256."""
COUNTED = ("loads", "evictions", "preemptions")
_LOWEST_ID = 16
"""Ids below are often special tokens."""
_CPU = torch.device("cpu")
Admit = Callable[[int, int, float, bool], int]
"""How many requests are handed to the engine now, of those that are due. Told: how many are due and how many in flight,
seconds since the oldest was due, and whether no more will come."""
_COST_PAGES = 64


@dataclass(slots=True)
class PoolRun:
    """One load, done."""

    records: list[RequestRecord]
    start_s: float
    queue_end_s: float
    """When the last request was submitted; until then a closed loop was full."""
    seconds: float
    """From start to the last end."""
    idle_seconds: float
    """While requests lived and no step was computed."""
    cpu_seconds: float
    """Of the engine's thread, which computes the steps too: what is left of a busy machine's noise."""
    steps: list[StepStats]
    counts: dict[str, Counter[str]]
    """Loads, evictions and preemptions by kind."""
    load_seconds: float

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second while the loop was full, so that the tail of a run does not count."""
        tokens = sum(time_s <= self.queue_end_s for record in self.records for time_s in record.token_times_s)
        return tokens / (self.queue_end_s - self.start_s)

    @property
    def requests_per_s(self) -> float:
        """Requests that ended, per second of the whole run."""
        return len(self.records) / self.seconds

    def facts(self) -> dict[str, float]:
        """What happened, on the average of steps and requests; shares are of the whole run."""
        num_loads = self.counts["loads"].total()
        return {
            "step_ms": 1e3 * _mean([step.seconds for step in self.steps]),
            "requests_per_step": _mean([step.requests for step in self.steps]),
            "adapters_per_step": _mean([step.adapters for step in self.steps]),
            "engine_cpu_ms_per_step": 1e3 * self.cpu_seconds / len(self.steps) if self.steps else 0.0,
            "engine_cpu_us_per_token": 1e6
            * self.cpu_seconds
            / sum(record.completion_tokens for record in self.records),
            "share_of_time_in_steps": sum(step.seconds for step in self.steps) / self.seconds,
            "share_of_time_idle": self.idle_seconds / self.seconds,
            "load_ms": 1e3 * self.load_seconds / num_loads if num_loads else 0.0,
            **{
                f"{name} per request, {kind}": count / len(self.records)
                for name, counter in self.counts.items()
                for kind, count in sorted(counter.items())
            },
        }


def mean_facts(runs: Sequence[PoolRun]) -> dict[str, float]:
    """The facts of several runs on the average; what a run does not name was 0."""
    facts = [run.facts() for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    return {name: _mean([each.get(name, 0.0) for each in facts]) for name in names}


@dataclass(slots=True)
class _Progress:
    """A load under way."""

    requests: list[GenerationRequest]
    records: list[RequestRecord]
    by_id: dict[str, int]
    submitted: int = 0
    ended: int = 0
    queue_end_s: float = 0.0
    idle_seconds: float = 0.0
    steps: dict[int, StepStats] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        return self.submitted - self.ended


class PoolEngine:
    """One engine in this process, with a pool of just so many pages.

    Args:
        core: The engine, built with `notify=loaded.set`.
        loaded: Set when a load is done.
        adapters: By the index that requests name.
    """

    def __init__(self, core: EngineCore, loaded: threading.Event, adapters: Sequence[AdapterRef]) -> None:
        self.core = core
        self._loaded = loaded
        self._adapters = adapters
        self._runs = 0

    def run(
        self,
        load: Sequence[TimedRequest],
        *,
        seed: Sequence[int],
        in_flight: int | None = None,
        scale: float = 1.0,
        admit: Admit | None = None,
    ) -> PoolRun:
        """Put a load on the engine and wait for all of it.

        Args:
            load: Requests; `adapter` indexes this engine's adapters.
            seed: Of the prompts. No two runs of an engine have the same prompts.
            in_flight: Requests of a closed loop; None is an open loop.
            scale: Seconds of an open loop per second of the load's arrivals.
            admit: Of an open loop: holds requests back that are due; None hands each on at once.

        Raises:
            WeftError: A request ended in an error, or with another number of tokens than it asked for.
        """
        self._runs += 1
        requests = [self._request(index, item, [*seed, self._runs, index]) for index, item in enumerate(load)]
        records = [RequestRecord(request.request_id, due_s=0.0) for request in requests]
        progress = _Progress(requests, records, {request.request_id: i for i, request in enumerate(requests)})
        before = self.core.status()
        first_step = before.last_steps[-1].step if before.last_steps else -1
        start, cpu_start = time.perf_counter(), time.thread_time()
        dues = [start + item.arrival_s * scale for item in load] if in_flight is None else None
        while progress.ended < len(requests):
            self._submit(progress, dues, in_flight, admit)
            self._pump(progress, dues)
        seconds, cpu_seconds = time.perf_counter() - start, time.thread_time() - cpu_start
        after = self._look(progress)
        _check(progress)
        return PoolRun(
            records=records,
            start_s=start,
            queue_end_s=progress.queue_end_s,
            seconds=seconds,
            idle_seconds=progress.idle_seconds,
            cpu_seconds=cpu_seconds,
            steps=[stats for step, stats in sorted(progress.steps.items()) if step > first_step],
            counts={name: Counter(getattr(after, name)) - Counter(getattr(before, name)) for name in COUNTED},
            load_seconds=after.load_seconds - before.load_seconds,
        )

    def close(self) -> None:
        """Give the memory back."""
        self.core.close()

    def _request(self, index: int, item: TimedRequest, seed: Sequence[int]) -> GenerationRequest:
        draw = np.random.default_rng(list(seed))
        prompt = draw.integers(_LOWEST_ID, VOCAB_SIZE, item.prompt_tokens).tolist()
        return greedy_request(f"run-{self._runs}-{index}", prompt, item.output_tokens, self._adapters[item.adapter])

    def _submit(
        self, progress: _Progress, dues: Sequence[float] | None, in_flight: int | None, admit: Admit | None
    ) -> None:
        now = time.perf_counter()
        end = len(progress.requests)
        if admit is not None and dues is not None and progress.submitted < end:
            due = bisect.bisect_right(dues, now) - progress.submitted
            waited_s = now - dues[progress.submitted]
            end = progress.submitted + admit(due, progress.in_flight, waited_s, progress.submitted + due == end)
        while (index := progress.submitted) < end:
            if dues is None and progress.in_flight >= (in_flight or 0):
                return
            if dues is not None and dues[index] > now:
                return
            progress.records[index].due_s = now if dues is None else dues[index]
            self.core.submit(progress.requests[index])
            progress.submitted += 1
            progress.queue_end_s = now

    def _pump(self, progress: _Progress, dues: Sequence[float] | None) -> None:
        num_steps = self.core.num_steps
        self._loaded.clear()
        outputs = self.core.pump()
        now = time.perf_counter()
        for output in outputs:
            record = progress.records[progress.by_id[output.request_id]]
            record.token_times_s.extend([now] * len(output.token_ids))
            record.completion_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                record.error = output.error.message if output.error else None
                record.done_s = now
                progress.ended += 1
        if self.core.num_steps > num_steps:
            if self.core.num_steps % STATUS_STEPS == 0:
                self._look(progress)
        elif not outputs:
            self._wait(progress, dues)

    def _wait(self, progress: _Progress, dues: Sequence[float] | None) -> None:
        start = time.perf_counter()
        until_due = IDLE_S
        if dues is not None and progress.submitted < len(dues):
            until_due = dues[progress.submitted] - start
        self._loaded.wait(min(IDLE_S, until_due) if until_due > 0 else IDLE_S)
        if progress.in_flight:
            progress.idle_seconds += time.perf_counter() - start

    def _look(self, progress: _Progress) -> EngineStatus:
        status = self.core.status()
        progress.steps.update((stats.step, stats) for stats in status.last_steps)
        return status


def pool_config(
    shape: PoolShape,
    *,
    num_pages: float,
    host_pages: float,
    max_running: int = 16,
    step_tokens: int = 512,
    prefix_cache: bool = True,
) -> Config:
    """Settings of an engine with just so many device and host pages."""
    return Config(
        model=ModelConfig(path=str(shape.model), device="cpu", dtype="float32", max_model_len=1024),
        memory=MemoryConfig(gib=shape.gib(num_pages), host_gib=shape.gib(host_pages), prefix_cache=prefix_cache),
        adapter=AdapterConfig(max_rank=64),
        scheduler=SchedulerConfig(max_running=max_running, step_tokens=step_tokens),
        registry=RegistryConfig(blob_url=str(shape.blobs)),
    )


def build_pool_engine(config: Config, adapters: Sequence[AdapterRef], costs: PageCosts) -> PoolEngine:
    """An engine as the product builds it."""
    loaded = threading.Event()
    return PoolEngine(build_engine(config, notify=loaded.set, costs=costs).core, loaded, adapters)


def measure_pool_costs(shape: PoolShape) -> PageCosts:
    """What it takes to have a page again, measured once, so that all engines of a benchmark go by the same figures."""
    decoder = load_decoder(shape.model, read_spec(shape.model), DTYPE, _CPU, num_positions=1024)
    arena = Arena(shape.geometry, _COST_PAGES, _CPU, DTYPE)
    slab = HostSlab(1, shape.geometry.page_bytes, pinned=False)
    return measure_costs(decoder, arena, PagePool(_COST_PAGES), slab, PageCopier(arena), max_tokens=1024)


def _check(progress: _Progress) -> None:
    for request, record in zip(progress.requests, progress.records, strict=True):
        if record.error is not None or record.completion_tokens != request.params.max_tokens:
            got, wanted = record.completion_tokens, request.params.max_tokens
            raise WeftError(f"{record.model} came to {got} of {wanted} tokens: {record.error}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
