"""Puts a load on an engine in this process, and records what each request, each step and each adapter load did.

Closed loop: a fixed number of requests in flight. Open loop: requests are submitted when they are due. Times are real.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from manylora.adapters.ref import AdapterRef
from manylora.benchmarks.engine.own_engine import OwnEngine, own_engine
from manylora.benchmarks.engine.stored import greedy_request
from manylora.benchmarks.metrics import RequestRecord
from manylora.benchmarks.pool.pool_shape import NUM_FILES, VOCAB_SIZE, PoolShape
from manylora.benchmarks.report import DEFAULT_CACHE, AddOption, N, take_turns
from manylora.benchmarks.workloads import TimedRequest
from manylora.config import (
    AdapterConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    RegistryConfig,
    SchedulerConfig,
)
from manylora.engine.build import EngineParts, build_engine
from manylora.engine.request import GenerationRequest
from manylora.engine.status import EngineStatus, StepStats
from manylora.errors import ManyloraError

IDLE_S = 0.001
"""Longest wait for a load while there is nothing to compute."""
STATUS_STEPS = 128
"""Steps between two looks at the engine's status, which keeps the last 256."""
COUNTED = ("loads", "evictions", "preemptions")
_LOWEST_ID = 16
"""Ids below are often special tokens."""
Admit = Callable[[int, int, float, bool], int]
"""How many requests are handed to the engine now, of those that are due. Arguments: how many are due and how many in
flight, seconds since the oldest was due, and whether no more will come."""


def add_pool_options(add: AddOption, *, requests: int, repeats: int, max_running: int) -> None:
    """Add the options that all benchmarks of the pool have, with these defaults."""
    add("--requests", type=int, default=requests, help="in each run")
    add("--repeats", type=int, default=repeats)
    add("--max-running", type=int, default=max_running, help="requests in a step")
    add("--files", type=int, default=NUM_FILES, help="files of adapter weights")
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated files")


@dataclass(slots=True)
class PoolRun:
    """The record of one load."""

    records: list[RequestRecord]
    start_s: float
    queue_end_s: float
    """When the last request was submitted; until then a closed loop was full."""
    seconds: float
    """From the start to the end of the last request."""
    steps: list[StepStats]
    counts: dict[str, Counter[str]]
    """Loads, evictions and preemptions by kind."""
    load_seconds: float

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second while the loop was full; the tail of a run does not count."""
        tokens = sum(
            time_s <= self.queue_end_s for record in self.records for time_s in record.token_times_s
        )
        return tokens / (self.queue_end_s - self.start_s)

    def facts(self) -> dict[str, float]:
        """Means over steps and requests; shares are of the whole run."""
        num_loads, step_s = self.counts["loads"].total(), [step.seconds for step in self.steps]
        return {
            "step_ms": 1e3 * statistics.mean(step_s),
            "requests_per_step": statistics.mean(step.requests for step in self.steps),
            "adapters_per_step": statistics.mean(step.adapters for step in self.steps),
            "share_of_time_in_steps": sum(step_s) / self.seconds,
            "load_ms": 1e3 * self.load_seconds / num_loads if num_loads else 0.0,
            **{
                f"{name} per request, {kind}": count / len(self.records)
                for name, counter in self.counts.items()
                for kind, count in sorted(counter.items())
            },
        }


def run_in_turns(
    options: argparse.Namespace,
    engines: Mapping[N, AbstractContextManager[PoolEngine]],
    load: Callable[[N, int], Sequence[TimedRequest]],
) -> tuple[dict[N, list[PoolRun]], dict[N, list[float]]]:
    """Put a closed loop on each engine in each round, after one round that is not counted.

    Args:
        options: Their `repeats` and `in_flight` count.
        engines: By name; they are closed at the end.
        load: The requests for an engine in a round.

    Returns:
        The runs by name, and their output tokens per second.
    """
    with contextlib.ExitStack() as stack:
        ready = {name: stack.enter_context(engine) for name, engine in engines.items()}
        runs = take_turns(
            ready,
            options.repeats,
            lambda name, i: ready[name].run(load(name, i), in_flight=options.in_flight),
        )
    return runs, {name: [run.output_tokens_per_s for run in each] for name, each in runs.items()}


def mean_facts(runs: Sequence[PoolRun]) -> dict[str, float]:
    """The mean facts of several runs; a fact that a run does not have counts as 0."""
    facts = [run.facts() for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    return {name: statistics.mean(each.get(name, 0.0) for each in facts) for name in names}


class PoolEngine:
    """An engine in this process, which runs loads.

    Args:
        engine: The engine.
        adapters: By the index that requests name.
    """

    def __init__(self, engine: OwnEngine, adapters: Sequence[AdapterRef]) -> None:
        self.core = engine.core
        self._engine = engine
        self._adapters = adapters
        self._runs = 0

    def run(
        self,
        load: Sequence[TimedRequest],
        *,
        in_flight: int = 0,
        scale: float = 1.0,
        admit: Admit | None = None,
    ) -> PoolRun:
        """Put a load on the engine and wait for all of it. No two runs of an engine have the same prompts.

        Args:
            load: Requests, by arrival; `adapter` indexes this engine's adapters.
            in_flight: Requests of a closed loop; 0 is an open loop.
            scale: Seconds of an open loop per second of the load's arrivals.
            admit: Of an open loop: holds requests back that are due; None hands each on at once.

        Raises:
            ManyloraError: A request failed, or ended with another number of tokens than it asked for.
        """
        self._runs += 1
        requests = [self._request(index, item) for index, item in enumerate(load)]
        records = {
            request.request_id: RequestRecord(request.request_id, due_s=0.0) for request in requests
        }
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
                due = admit(
                    due, running, now_s - dues_s[submitted], submitted + due == len(requests)
                )
            for request in requests[submitted : submitted + due]:
                records[request.request_id].due_s = now_s if in_flight else dues_s[submitted]
                self._engine.submit(request)
                submitted, queue_end_s = submitted + 1, now_s
            to_come = (
                due_s - now_s for due_s in dues_s[submitted : submitted + 1] if due_s > now_s
            )
            ended += self._pump(records, steps, min([IDLE_S, *to_come]))
        seconds = time.perf_counter() - start_s
        after = self._look(steps)
        for request, record in zip(requests, records.values(), strict=True):
            if record.completion_tokens != request.params.max_tokens:
                got, wanted = record.completion_tokens, request.params.max_tokens
                raise ManyloraError(f"{record.model} came to {got} of {wanted} tokens")
        return PoolRun(
            records=list(records.values()),
            start_s=start_s,
            queue_end_s=queue_end_s,
            seconds=seconds,
            steps=[stats for step, stats in sorted(steps.items()) if step > first_step],
            counts={
                name: Counter(getattr(after, name)) - Counter(getattr(before, name))
                for name in COUNTED
            },
            load_seconds=after.load_seconds - before.load_seconds,
        )

    def _request(self, index: int, item: TimedRequest) -> GenerationRequest:
        draw = np.random.default_rng([self._runs, index])
        prompt = draw.integers(_LOWEST_ID, VOCAB_SIZE, item.prompt_tokens).tolist()
        return greedy_request(
            f"run-{self._runs}-{index}", prompt, item.output_tokens, self._adapters[item.adapter]
        )

    def _pump(
        self, records: dict[str, RequestRecord], steps: dict[int, StepStats], longest_wait_s: float
    ) -> int:
        """Call the core once and record what came; returns how many requests ended."""
        num_steps, ended = self.core.num_steps, 0
        self._engine.pump(longest_wait_s)
        now_s = time.perf_counter()
        for output in self._engine.outputs:
            record = records[output.request_id]
            record.token_times_s.extend([now_s] * len(output.token_ids))
            record.completion_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                record.done_s = now_s
                ended += 1
        if self.core.num_steps > num_steps and self.core.num_steps % STATUS_STEPS == 0:
            self._look(steps)
        return ended

    def _look(self, steps: dict[int, StepStats]) -> EngineStatus:
        status = self.core.status()
        steps.update((stats.step, stats) for stats in status.last_steps)
        return status


@contextlib.contextmanager
def pool_engine(
    shape: PoolShape,
    num_adapters: int,
    memory: MemoryConfig,
    max_running: int,
    build: Callable[..., EngineParts] = build_engine,
) -> Iterator[PoolEngine]:
    """Build an engine with adapters of a shape, and close it when the block is left.

    Args:
        shape: Its model and adapters.
        num_adapters: Adapters that requests may name.
        memory: Its pages.
        max_running: Requests in a step.
        build: Builds it.
    """
    config = Config(
        model=ModelConfig(path=str(shape.model), device="cpu", dtype="float32", max_model_len=1024),
        memory=memory,
        adapter=AdapterConfig(max_rank=64),
        scheduler=SchedulerConfig(max_running=max_running),
        registry=RegistryConfig(blob_url=str(shape.blobs)),
    )
    with own_engine(config, build) as engine:
        yield PoolEngine(engine, shape.adapters(num_adapters))
