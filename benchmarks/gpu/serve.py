"""Steps of a full batch while adapters of mixed rank come and go, beside steps with all adapters on the device (M3)."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from weft.adapters.ref import AdapterRef
from weft.benchmarks.engine.own_engine import OwnEngine
from weft.benchmarks.engine.stored import greedy_request, store_adapters
from weft.benchmarks.gpu.case_log import Case, Figures
from weft.benchmarks.gpu.floors import GOAL_SWAPS
from weft.benchmarks.gpu.machine import Setup
from weft.benchmarks.gpu.random_model import adapter_folder, random_engine
from weft.benchmarks.gpu.step import draw_prompt
from weft.benchmarks.metrics import distribution
from weft.config import MemoryConfig, SchedulerConfig
from weft.kernels.triton.compiles import CompileWatch

RANKS = (8, 16, 32, 64)
NUM_ADAPTERS = 64
NUM_RESIDENT = 16
"""Adapters of the phase without loads."""
ROWS = 32
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
PHASE_S = 60.0
WARM_UP_S = 10.0
LEAST_STEPS = 30
"""Of a phase, on a device of any speed."""


def cases(setup: Setup) -> list[Case]:
    """Both phases in one case, since what counts is their ratio."""
    return [Case(f"{ROWS} rows, {NUM_ADAPTERS} adapters", partial(_phases, setup))]


def _phases(setup: Setup, _: Mapping[str, Figures]) -> Figures:
    """The 99th percentile of steps while adapters are swapped, with that of steps without swaps as the floor."""
    # Room for the batch's KV cache and half of the adapters: 64 of these ranks have 9.4 GiB in the 8B shape.
    memory = MemoryConfig(gib=setup.sized(6.0, 1 / 256), host_gib=setup.sized(16.0, 1 / 16))
    scheduler = SchedulerConfig(max_running=ROWS, step_tokens=setup.sized(2048, 256))
    with random_engine(setup, memory, scheduler) as engine:
        folders = [adapter_folder(setup, rank) for rank in RANKS]
        refs = store_adapters(engine.parts.ready, engine.blob_dir, folders, NUM_ADAPTERS)
        load = Load(engine, setup)
        load.run(refs, setup.sized(WARM_UP_S, 0.2))
        with CompileWatch() as watch:
            quiet = load.run(refs[:NUM_RESIDENT], setup.sized(PHASE_S, 0.3))
            loads = sum(engine.core.status().loads.values())
            swaps = load.run(refs, setup.sized(PHASE_S, 0.3))
            loads = sum(engine.core.status().loads.values()) - loads
        load.end()
    by_phase = {"quiet": quiet, "swaps": swaps}
    return {
        "measured": swaps["step_ms"]["p99"],
        "floor": quiet["step_ms"]["p99"],
        "goal": GOAL_SWAPS * quiet["step_ms"]["p99"],
        "unit": "ms, p99",
        **by_phase,
        "loads": loads,
        "compiles": dict(watch.counts),
        "ok": not watch.counts,
    }


class Load:
    """Keeps a full batch of requests, each for a random adapter.

    Args:
        engine: That gets them.
        setup: Says how long they are.
    """

    def __init__(self, engine: OwnEngine, setup: Setup) -> None:
        self._engine, self._setup = engine, setup
        self._ids = map(str, itertools.count())
        self._live: set[str] = set()
        self._draw = random.Random(0)

    def run(self, refs: Sequence[AdapterRef], seconds: float) -> dict[str, Any]:
        """Serve for so long; returns steps in ms, and tokens per second."""
        steps, tokens, start_s = list[float](), 0, time.perf_counter()
        while time.perf_counter() - start_s < seconds or len(steps) < LEAST_STEPS:
            while len(self._live) < ROWS + ROWS // 2:  # some wait while their adapters are loaded
                self._submit(self._draw.choice(refs))
            num_steps = self._engine.core.num_steps
            step_s = self._engine.pump()
            if self._engine.core.num_steps > num_steps:
                steps.append(step_s)
            for output in self._engine.outputs:
                tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    self._live.discard(output.request_id)
        return {
            "step_ms": distribution(steps, 1e3),
            "steps": len(steps),
            "tokens_per_s": tokens / (time.perf_counter() - start_s),
        }

    def end(self) -> None:
        """Abort what still runs."""
        self._engine.abort(sorted(self._live))

    def _submit(self, ref: AdapterRef) -> None:
        request_id = next(self._ids)
        size = self._setup.sized
        prompt = draw_prompt(size(PROMPT_TOKENS, 8), self._setup.vocab_size)
        self._engine.submit(greedy_request(request_id, prompt, size(OUTPUT_TOKENS, 4), ref))
        self._live.add(request_id)
