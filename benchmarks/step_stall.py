"""Do running decodes stall while adapters load?

    weft bench stall [--shape qwen] [--json benchmarks/results/step-stall-cpu.json]

A steady batch of decoding requests over resident adapters, and beside it, in turns so that a slow minute of the machine
hits all of them:

    quiet   nothing else
    swaps   other adapters are read, packed, copied to the device and evicted all the time; the batch uses none of them
    joins   short requests for adapters that are nowhere in memory keep joining the batch

Prints the step times of each, their ratios to quiet, and how long a load takes beside the batch (`stored`, from the
host's image, and `idle` without a batch); last, one JSON line. `--shape demo` takes the shipped model and is done in
seconds; its adapters are small, so it shows what many small pieces of work cost.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import weft.demo
from weft.adapters.ref import AdapterRef
from weft.benchmarks.qwen_shape import make_checkpoints
from weft.benchmarks.report import DEFAULT_CACHE, chosen
from weft.benchmarks.stored import greedy_request, store_adapters
from weft.config import Config, Dtype, MemoryConfig, ModelConfig, RegistryConfig, SchedulerConfig
from weft.engine.build import build_engine
from weft.errors import EngineError

PHASES = ("quiet", "swaps", "joins")
PROMPT_TOKENS = 8
JOIN_TOKENS = 6
"""Output of a request that joins."""
UNDER_WAY = 2
"""Adapters that are swapped, and requests that join, at a time."""
WARM_UP_STEPS = 160
"""Steps that are not timed, until the batch's weights lie as they will stay."""
SETTLE_STEPS = 40
"""The same before each phase, after what the one before has changed."""
BLOCKED_WAIT_S = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """A base with its adapters, and memory that holds the steady batch and a few adapters more."""

    base: Path
    adapters: Sequence[Path]
    dtype: Dtype
    memory_gib: float
    host_gib: float
    phase_steps: int


@dataclass(slots=True)
class Timings:
    """What was measured, in seconds."""

    step_s: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    load_s: dict[str, list[float]] = field(default_factory=dict)
    """From wanted to ready, by where the adapter was: `stored` or `host`; `idle` is stored, without a batch."""
    joined: int = 0
    """Requests that joined and were answered."""


class _Swap(NamedTuple):
    """An adapter that was asked for."""

    ref: AdapterRef
    origin: str
    wanted_s: float


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All phases, in turns."""
    shape = _shape(options)
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        bench = StallBench(shape, options.requests, options.adapters, options.threads, Path(folder))
        try:
            return make_result(options, bench.run(options.rounds, options.phase_steps or shape.phase_steps))
        finally:
            bench.close()


class StallBench:
    """An engine in this process, and what is done to it.

    Args:
        shape: The model.
        requests: Size of the steady batch.
        adapters: Adapters of the steady batch; as many others are loaded beside it.
        threads: Intra-op threads of the engine; 0 lets it choose.
        folder: Where blobs go.
    """

    def __init__(self, shape: Shape, requests: int, adapters: int, threads: int, folder: Path) -> None:
        self._ids = itertools.count(1)
        self._loaded = threading.Event()
        self._is_blocked = False
        """Whether the last call of the core found nothing to compute."""
        config = Config(
            model=ModelConfig(path=str(shape.base), device="cpu", dtype=shape.dtype, threads=threads),
            memory=MemoryConfig(gib=shape.memory_gib, host_gib=shape.host_gib),
            scheduler=SchedulerConfig(max_running=requests + UNDER_WAY),
            registry=RegistryConfig(blob_url=str(folder)),
        )
        self._parts = build_engine(config, notify=self._loaded.set)
        self._core, self._residency = self._parts.core, self._parts.residency
        refs = store_adapters(self._parts.ready, config.blob_dir, shape.adapters, 2 * adapters)
        self._steady = [refs[index % adapters] for index in range(requests)]
        self._others = itertools.cycle(refs[adapters:])
        self._joining: dict[str, str] = {}
        """Adapter by request."""
        self._swapping: dict[str, _Swap] = {}
        """By adapter."""
        self.timings = Timings()

    def run(self, rounds: int, phase_steps: int) -> Timings:
        """Measure.

        Args:
            rounds: How often the phases take turns.
            phase_steps: Timed steps of each phase in a round.
        """
        for _ in self._steady:
            self._load_idle(next(self._others))
        turns: dict[str, Callable[[], None]] = {"quiet": lambda: None, "swaps": self._swap, "joins": self._join}
        for round_ in range(rounds):
            max_tokens = self._parts.ready.max_model_len - PROMPT_TOKENS
            requests = [self._submit(ref, max_tokens) for ref in self._steady]
            while self._core.status().running < len(requests):
                self._pump()
            for phase in PHASES if round_ % 2 == 0 else ("swaps", "quiet", "joins"):
                for _ in range(SETTLE_STEPS if self._core.num_steps > WARM_UP_STEPS else WARM_UP_STEPS):
                    self._pump()
                for _ in range(phase_steps):
                    turns[phase]()
                    self.timings.step_s[phase].append(self._pump())
                self._end_turns()
            for request_id in requests:
                self._core.abort(request_id)
            self._pump()
        return self.timings

    def close(self) -> None:
        """Give the memory back."""
        self._core.close()

    def _load_idle(self, ref: AdapterRef) -> None:
        """Load an adapter while nothing runs, and forget it."""
        self._is_blocked = False
        swap = _Swap(ref, "idle", time.perf_counter())
        self._residency.want(ref)
        while self._residency.state(ref.digest) != "device":
            self._pump()
        self._arrived(swap)
        self._core.drop_adapter(ref.digest)

    def _swap(self) -> None:
        """Let go of adapters that have arrived and want others: each first from its blob, then from the host image."""
        for digest, swap in list(self._swapping.items()):
            if self._residency.state(digest) != "device":
                continue
            del self._swapping[digest]
            self._arrived(swap)
            if swap.origin == "stored":
                self._parts.evictor.make_room(self._parts.evictor.num_available)
                self._want(swap.ref)
            else:
                self._core.drop_adapter(digest)
        while len(self._swapping) < UNDER_WAY:
            self._want(next(self._others))

    def _want(self, ref: AdapterRef) -> None:
        self._swapping[ref.digest] = _Swap(ref, self._residency.state(ref.digest), time.perf_counter())
        self._residency.want(ref)

    def _arrived(self, swap: _Swap) -> None:
        self.timings.load_s.setdefault(swap.origin, []).append(time.perf_counter() - swap.wanted_s)
        self._residency.unwant(swap.ref.digest)

    def _join(self) -> None:
        while len(self._joining) < UNDER_WAY:
            ref = next(self._others)
            self._joining[self._submit(ref, JOIN_TOKENS)] = ref.digest

    def _end_turns(self) -> None:
        """Let what is under way come to its end, and forget it."""
        for digest in self._swapping:
            while self._residency.state(digest) != "device":
                self._pump()
            self._residency.unwant(digest)
            self._core.drop_adapter(digest)
        self._swapping.clear()
        while self._joining:
            self._pump()

    def _pump(self) -> float:
        """One call of the core, and the seconds that it took."""
        if self._is_blocked:
            self._loaded.wait(BLOCKED_WAIT_S)
        self._loaded.clear()
        steps_before = self._core.num_steps
        start = time.perf_counter()
        outputs = self._core.pump()
        seconds = time.perf_counter() - start
        for output in outputs:
            if output.error is not None:
                raise EngineError(f"a request of the benchmark failed: {output.error.message}")
            if output.finish_reason is not None and output.request_id in self._joining:
                self._core.drop_adapter(self._joining.pop(output.request_id))
                self.timings.joined += 1
        self._is_blocked = self._core.num_steps == steps_before
        return seconds

    def _submit(self, ref: AdapterRef, max_tokens: int) -> str:
        request_id = str(next(self._ids))
        self._core.submit(greedy_request(request_id, list(range(10, 10 + PROMPT_TOKENS)), max_tokens, ref))
        return request_id


def make_result(options: argparse.Namespace, timings: Timings) -> dict[str, Any]:
    """Percentiles and ratios, with where they come from."""
    phases = {phase: _milliseconds(times) for phase, times in timings.step_s.items()}
    loads = {origin: _milliseconds(times) for origin, times in sorted(timings.load_s.items())}
    return {
        **chosen(options, "shape", "requests", "adapters"),
        "step_ms": phases,
        "ratios": {
            f"{phase} / quiet, {name}": phases[phase][name] / phases["quiet"][name]
            for phase in PHASES[1:]
            for name in ("p50", "p99")
        },
        "load_ms": loads,
        "joined": timings.joined,
        "table": [
            {"ms": f"{kind}, {name}", **found}
            for kind, by_name in (("step", phases), ("load", loads))
            for name, found in by_name.items()
        ],
    }


def percentile(times: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least so many percent do not exceed."""
    return sorted(times)[max(0, math.ceil(len(times) * percent / 100) - 1)]


def _milliseconds(times: Sequence[float]) -> dict[str, float]:
    figures = {f"p{percent}": percentile(times, percent) * 1e3 for percent in (50, 90, 99)}
    return {"count": len(times), **figures, "max": max(times) * 1e3}


def _shape(options: argparse.Namespace) -> Shape:
    if options.shape == "demo":
        folder = Path(weft.demo.__file__).parent
        adapters = sorted((folder / "adapters").iterdir())
        return Shape(folder / "model", adapters, "float32", 0.03125, 0.03125, phase_steps=200)
    base, folders = make_checkpoints(options.cache)
    return Shape(base, folders, "bfloat16", memory_gib=1.0, host_gib=0.5, phase_steps=60)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    add = parser.add_argument
    add("--shape", choices=("qwen", "demo"), default="qwen")
    add("--requests", type=int, default=16, help="size of the steady batch")
    add("--adapters", type=int, default=8, help="adapters of the steady batch")
    add("--rounds", type=int, default=4, help="how often the phases take turns")
    add("--phase-steps", type=int, default=None, help="timed steps of each phase in a round")
    add("--threads", type=int, default=0, help="of the engine; 0 lets it choose")
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated checkpoints")
