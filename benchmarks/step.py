"""How far is a step from the least it could take, and where does its time go?

    weft bench step [--rows 1,8,32] [--prefill 2040] [--json benchmarks/results/step-cpu.json]

Decode steps of 1, 8 and 32 requests (64 tokens of prompt each) and a step over a long prompt, on the 0.5B shape in
bfloat16: base requests, 8 adapters of rank 8, and 8 of ranks 8, 16, 32 and 64. The floor is one pass through all linear
layers with packed weights and as many rows, measured in turns with the steps. Prints a table of steps and their
parts, in ms, and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.adapters.ref import AdapterRef
from weft.benchmarks.arguments import counts, positive
from weft.benchmarks.floor import LinearPass
from weft.benchmarks.part_clock import GROUPS, PARTS, PartClock, timed_parts
from weft.benchmarks.qwen_shape import RANKS, VOCAB_SIZE, make_checkpoints
from weft.benchmarks.report import DEFAULT_CACHE, chosen
from weft.benchmarks.stored import greedy_request, store_adapters
from weft.config import Config, MemoryConfig, ModelConfig, RegistryConfig, SchedulerConfig
from weft.engine.build import build_engine
from weft.engine.status import StepStats
from weft.errors import EngineError

PROMPT_TOKENS = 64
WARM_UP_STEPS = 120
"""Steps of a case that are not timed, until the adapters' weights lie as they will stay."""
FIRST_STEPS = 4
"""Decode steps of fresh requests that are not timed."""


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of one step."""

    name: str
    rows: int
    adapters: Sequence[AdapterRef | None]
    """In turn."""
    prompt_tokens: int = PROMPT_TOKENS
    is_prefill: bool = False
    """Whether the step over the prompts is timed, instead of those that follow."""


@dataclass(slots=True)
class Measured:
    """One case, in seconds."""

    step_s: list[float]
    floor_s: list[float]
    part_s: dict[str, float]
    """Summed over the steps."""


class StepBench:
    """An engine in this process, with a clock around its parts.

    Args:
        base: Folder of the model.
        adapters: Folders of adapters, of ranks 8, 16, 32, 64 and again.
        clock: Around the parts of the engine.
        folder: Where blobs go.
        threads: Intra-op threads; 0 lets the engine choose.
        max_rows: Most requests of a step.
    """

    def __init__(
        self, base: Path, adapters: Sequence[Path], clock: PartClock, folder: Path, *, threads: int, max_rows: int
    ) -> None:
        config = Config(
            model=ModelConfig(path=str(base), device="cpu", dtype="bfloat16", threads=threads),
            memory=MemoryConfig(gib=1.0, host_gib=0.75, prefix_cache=False),
            scheduler=SchedulerConfig(max_running=max_rows, step_tokens=max(2048, max_rows * PROMPT_TOKENS)),
            registry=RegistryConfig(blob_url=str(folder)),
        )
        self._parts = build_engine(config)
        self._core = self._parts.core
        self._clock = clock
        self._ids = itertools.count(1)
        self._draw = random.Random(0)
        self._floor = LinearPass()
        blobs = config.blob_dir
        self.mixed = store_adapters(self._parts.ready, blobs, adapters, len(adapters))
        smallest = [folder for folder, rank in zip(adapters, RANKS, strict=True) if rank == min(RANKS)]
        self.small = store_adapters(self._parts.ready, blobs, smallest, len(adapters))

    def close(self) -> None:
        """Give the memory back."""
        self._core.close()

    def measure(self, case: Case, steps: int, repeats: int) -> Measured:
        """Time so many steps in each repeat, with a pass of the floor after it.

        Args:
            case: What to compute.
            steps: Of each repeat; a prefill is one step.
            repeats: At least one.
        """
        if not case.is_prefill:
            self.decode(case, WARM_UP_STEPS if any(case.adapters) else FIRST_STEPS)
        floor_rows = case.rows * case.prompt_tokens if case.is_prefill else case.rows
        found = Measured([], [], dict.fromkeys(PARTS, 0.0))
        for _ in range(repeats):
            found.step_s += self._prefill(case, found) if case.is_prefill else self.decode(case, steps, found)
            found.floor_s.append(self._floor.seconds(floor_rows, head_rows=case.rows))
        return found

    def _prefill(self, case: Case, found: Measured) -> list[float]:
        """The step over the prompts, after one that is not timed."""
        requests = self._submit(case)
        while self._core.status().running < case.rows:
            self._pump()
        self._end(requests)
        requests = self._submit(case)
        seconds = self._timed(found)
        self._end(requests)
        return [seconds]

    def last_steps(self, count: int) -> Sequence[StepStats]:
        """What the engine tells of the last steps, at most 256."""
        return self._core.status().last_steps[-count:]

    def decode(self, case: Case, steps: int, found: Measured | None = None) -> list[float]:
        """Seconds of so many decode steps of a case, in turn."""
        requests = self._submit(case)
        while self._core.status().running < case.rows:
            self._pump()
        for _ in range(FIRST_STEPS):
            self._pump()
        seconds = [self._timed(found) for _ in range(steps)]
        self._end(requests)
        return seconds

    def _timed(self, found: Measured | None) -> float:
        self._clock.seconds.clear()
        started_s = time.perf_counter()
        self._pump()
        seconds = time.perf_counter() - started_s
        if found is not None:
            for part in PARTS:
                found.part_s[part] += self._clock.seconds[part]
        return seconds

    def _pump(self) -> None:
        for output in self._core.pump():
            if output.error is not None:
                raise EngineError(f"a request of the benchmark failed: {output.error.message}")

    def _submit(self, case: Case) -> list[str]:
        requests = []
        for _, adapter in zip(range(case.rows), itertools.cycle(case.adapters), strict=False):
            request_id = str(next(self._ids))
            requests.append(request_id)
            prompt = [self._draw.randrange(2, VOCAB_SIZE) for _ in range(case.prompt_tokens)]
            most = self._parts.ready.max_model_len - case.prompt_tokens
            self._core.submit(greedy_request(request_id, prompt, most, adapter))
        return requests

    def _end(self, requests: Sequence[str]) -> None:
        for request_id in requests:
            self._core.abort(request_id)
        self._core.pump()


def make_cases(bench: StepBench, rows: Sequence[int], prefill: int) -> list[Case]:
    """Decode steps of so many rows for the base and, from 8 rows on, for 8 adapters; then a prompt."""
    cases = [Case(f"decode, {count} base", count, [None]) for count in rows]
    for count in rows:
        if count >= len(bench.mixed):
            cases.append(Case(f"decode, {count} of 8 adapters of rank 8", count, bench.small))
            cases.append(Case(f"decode, {count} of 8 mixed adapters", count, bench.mixed))
    if prefill:
        cases.append(Case(f"prompt of {prefill:,} tokens, base", 1, [None], prefill, is_prefill=True))
        cases.append(Case(f"prompt of {prefill:,} tokens, rank 64", 1, bench.mixed[3:4], prefill, is_prefill=True))
    return cases


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases, one after the other."""
    base, adapters = make_checkpoints(options.cache)
    max_rows = max([1, *options.rows])
    with tempfile.TemporaryDirectory(prefix="weft-") as folder, timed_parts() as clock:
        bench = StepBench(base, adapters, clock, Path(folder), threads=options.threads, max_rows=max_rows)
        try:
            measured = {}
            for case in make_cases(bench, options.rows, options.prefill):
                measured[case.name] = bench.measure(case, options.steps, options.repeats)
                print(f"measured: {case.name}", file=sys.stderr, flush=True)
        finally:
            bench.close()
    return make_result(options, measured)


def make_result(options: argparse.Namespace, measured: dict[str, Measured]) -> dict[str, Any]:
    """Medians, ratios to the floor and parts."""
    cases = {name: _figures(found) for name, found in measured.items()}
    return {
        "load": {
            "model": "Qwen2-0.5B shape, vocabulary 32000, random weights, bfloat16",
            "prompt_tokens": PROMPT_TOKENS,
            **chosen(options, "steps", "repeats"),
        },
        "groups": GROUPS,
        "cases": cases,
        "table": [
            {
                "case": name,
                **{key: case[key] for key in ("step_ms", "floor_ms", "step / floor")},
                **{group: sum(case["part_ms"][part] for part in parts) for group, parts in GROUPS.items()},
            }
            for name, case in cases.items()
        ],
    }


def _figures(found: Measured) -> dict[str, Any]:
    step_s, floor_s = statistics.median(found.step_s), statistics.median(found.floor_s)
    measured_s = sum(found.part_s.values())
    return {
        "step_ms": step_s * 1e3,
        "floor_ms": floor_s * 1e3,
        "step / floor": step_s / floor_s,
        "part_ms": {part: 1e3 * seconds / len(found.step_s) for part, seconds in found.part_s.items()},
        "part_share": {part: seconds / measured_s for part, seconds in found.part_s.items()},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    add = parser.add_argument
    add("--rows", type=counts, default="1,8,32", help="requests of a decode step, comma-separated")
    add("--prefill", type=int, default=2040, help="tokens of the long prompt; 0 leaves it out")
    add("--steps", type=positive, default=24, help="timed decode steps of each repeat")
    add("--repeats", type=positive, default=4)
    add("--threads", type=int, default=0, help="of the engine; 0 lets it choose")
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated checkpoints")
