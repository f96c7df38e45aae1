"""Puts a load on an engine in this process, and records what each request, each step and each adapter load did.

Closed loop: a fixed number of requests in flight. Open loop: requests are submitted when they are due. Times are real.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from weft.adapters.ref import AdapterRef
from weft.benchmarks.engine.stored import greedy_request
from weft.benchmarks.metrics import RequestRecord
from weft.benchmarks.pool.pool_shape import DTYPE, NUM_FILES, VOCAB_SIZE, PoolShape
from weft.benchmarks.report import DEFAULT_CACHE
from weft.benchmarks.workloads import TimedRequest
from weft.config import AdapterConfig, Config, MemoryConfig, ModelConfig, RegistryConfig, SchedulerConfig
from weft.engine.build import EngineParts, build_engine
from weft.engine.core import EngineCore
from weft.engine.execution.costs import measure_costs
from weft.engine.model.spec import read_spec
from weft.engine.model.weights import load_decoder
from weft.engine.request import GenerationRequest
from weft.engine.status import EngineStatus, StepStats
from weft.errors import WeftError
from weft.memory.arena import Arena, PageCopier
from weft.memory.eviction import PageCosts
from weft.memory.host_slab import HostSlab
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
"""How many requests are handed to the engine now, of those that are due. Arguments: how many are due and how many in
flight, seconds since the oldest was due, and whether no more will come."""
_COST_PAGES = 64


def add_pool_options(parser: argparse.ArgumentParser, *, requests: int, repeats: int, max_running: int) -> None:
    """Add the options that all benchmarks of the pool have, with these defaults."""
    add = parser.add_argument
    add("--requests", type=int, default=requests, help="in each run")
    add("--repeats", type=int, default=repeats)
    add("--max-running", type=int, default=max_running, help="requests in a step")
    add("--files", type=int, default=NUM_FILES, help="files of adapter weights")
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated files")


@dataclass(slots=True)
class PoolRun:
    """One load, done."""

    records: list[RequestRecord]
    start_s: float
    queue_end_s: float
    """When the last request was submitted; until then a closed loop was full."""
    seconds: float
    """From start to the last end."""
    steps: list[StepStats]
    counts: dict[str, Counter[str]]
    """Loads, evictions and preemptions by kind."""
    load_seconds: float

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second while the loop was full; the tail of a run does not count."""
        tokens = sum(time_s <= self.queue_end_s for record in self.records for time_s in record.token_times_s)
        return tokens / (self.queue_end_s - self.start_s)

    def facts(self) -> dict[str, float]:
        """What happened, on the average of steps and requests; shares are of the whole run."""
        num_loads = self.counts["loads"].total()
        return {
            "step_ms": 1e3 * _mean([step.seconds for step in self.steps]),
            "requests_per_step": _mean([step.requests for step in self.steps]),
            "adapters_per_step": _mean([step.adapters for step in self.steps]),
            "share_of_time_in_steps": sum(step.seconds for step in self.steps) / self.seconds,
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
        in_flight: int = 0,
        scale: float = 1.0,
        admit: Admit | None = None,
    ) -> PoolRun:
        """Put a load on the engine and wait for all of it.

        Args:
            load: Requests, by arrival; `adapter` indexes this engine's adapters.
            seed: Of the prompts. No two runs of an engine have the same prompts.
            in_flight: Requests of a closed loop; 0 is an open loop.
            scale: Seconds of an open loop per second of the load's arrivals.
            admit: Of an open loop: holds requests back that are due; None hands each on at once.

        Raises:
            WeftError: A request ended in an error, or with another number of tokens than it asked for.
        """
        self._runs += 1
        requests = [self._request(index, item, [*seed, self._runs, index]) for index, item in enumerate(load)]
        records = {request.request_id: RequestRecord(request.request_id, due_s=0.0) for request in requests}
        before, steps = self.core.status(), dict[int, StepStats]()
        first_step = before.last_steps[-1].step if before.last_steps else -1
        start_s = queue_end_s = time.perf_counter()
        dues_s = [start_s if in_flight else start_s + item.arrival_s * scale for item in load]
        submitted = ended = 0
        while ended < len(requests):
            now_s, running = time.perf_counter(), submitted - ended
            due = bisect.bisect_right(dues_s, now_s) - submitted
            if in_flight:
                due = min(due, in_flight - running)
            elif admit and submitted < len(requests):
                due = admit(due, running, now_s - dues_s[submitted], submitted + due == len(requests))
            for request in requests[submitted : submitted + due]:
                records[request.request_id].due_s = now_s if in_flight else dues_s[submitted]
                self.core.submit(request)
                submitted, queue_end_s = submitted + 1, now_s
            ended += self._pump(records, steps, next(iter(dues_s[submitted:]), math.inf))
        seconds = time.perf_counter() - start_s
        after = self._look(steps)
        for request, record in zip(requests, records.values(), strict=True):
            got, wanted = record.completion_tokens, request.params.max_tokens
            if record.error is not None or got != wanted:
                raise WeftError(f"{record.model} came to {got} of {wanted} tokens: {record.error}")
        return PoolRun(
            records=list(records.values()),
            start_s=start_s,
            queue_end_s=queue_end_s,
            seconds=seconds,
            steps=[stats for step, stats in sorted(steps.items()) if step > first_step],
            counts={name: Counter(getattr(after, name)) - Counter(getattr(before, name)) for name in COUNTED},
            load_seconds=after.load_seconds - before.load_seconds,
        )

    def _request(self, index: int, item: TimedRequest, seed: Sequence[int]) -> GenerationRequest:
        draw = np.random.default_rng(list(seed))
        prompt = draw.integers(_LOWEST_ID, VOCAB_SIZE, item.prompt_tokens).tolist()
        return greedy_request(f"run-{self._runs}-{index}", prompt, item.output_tokens, self._adapters[item.adapter])

    def _pump(self, records: dict[str, RequestRecord], steps: dict[int, StepStats], next_due_s: float) -> int:
        """One call of the core, and a short wait where it finds nothing to do; returns how many requests ended."""
        num_steps, ended = self.core.num_steps, 0
        self._loaded.clear()
        outputs = self.core.pump()
        now_s = time.perf_counter()
        for output in outputs:
            record = records[output.request_id]
            record.token_times_s.extend([now_s] * len(output.token_ids))
            record.completion_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                record.error = output.error.message if output.error else None
                record.done_s = now_s
                ended += 1
        if self.core.num_steps > num_steps:
            if self.core.num_steps % STATUS_STEPS == 0:
                self._look(steps)
        elif not outputs:
            self._loaded.wait(next_due_s - now_s if 0 < next_due_s - now_s < IDLE_S else IDLE_S)
        return ended

    def _look(self, steps: dict[int, StepStats]) -> EngineStatus:
        status = self.core.status()
        steps.update((stats.step, stats) for stats in status.last_steps)
        return status


@contextlib.contextmanager
def pool_engine(
    shape: PoolShape,
    costs: PageCosts,
    num_adapters: int,
    memory: MemoryConfig,
    max_running: int,
    build: Callable[..., EngineParts] = build_engine,
) -> Iterator[PoolEngine]:
    """An engine with adapters of a shape, as the product builds it, until the block is left."""
    config = Config(
        model=ModelConfig(path=str(shape.model), device="cpu", dtype="float32", max_model_len=1024),
        memory=memory,
        adapter=AdapterConfig(max_rank=64),
        scheduler=SchedulerConfig(max_running=max_running),
        registry=RegistryConfig(blob_url=str(shape.blobs)),
    )
    loaded = threading.Event()
    core = build(config, notify=loaded.set, costs=costs).core
    try:
        yield PoolEngine(core, loaded, shape.adapters(num_adapters))
    finally:
        core.close()


def measure_pool_costs(shape: PoolShape) -> PageCosts:
    """Seconds to get a page back, measured once for all engines of a benchmark."""
    decoder = load_decoder(shape.model, read_spec(shape.model), DTYPE, _CPU, num_positions=1024)
    arena = Arena(shape.geometry, _COST_PAGES, _CPU, DTYPE)
    slab = HostSlab(1, shape.geometry.page_bytes, pinned=False)
    return measure_costs(decoder, arena, PagePool(_COST_PAGES), slab, PageCopier(arena), max_tokens=1024)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
