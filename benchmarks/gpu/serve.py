"""Steps of a full batch while adapters of mixed rank come and go, beside steps with all adapters on the device (M3)."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from manylora.adapters.ref import AdapterRef
from manylora.benchmarks.engine.stored import greedy_request
from manylora.benchmarks.gpu.case_log import Cases, Figures
from manylora.benchmarks.gpu.floors import GOAL_SWAPS
from manylora.benchmarks.gpu.setup import MAX_RUNNING, Setup
from manylora.benchmarks.gpu.step import draw_prompt
from manylora.benchmarks.metrics import distribution
from manylora.kernels.triton.compiles import CompileWatch

RANKS = (8, 16, 32, 64)
NUM_ADAPTERS = 128
"""They have 19 GiB in the 8B shape, more than the pages of the engine."""
NUM_RESIDENT = 16
"""Adapters of the phase without loads."""
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
PHASE_S = 60.0
WARM_UP_S = 10.0
LEAST_STEPS = 30
"""Least steps of a phase, on a device of any speed."""


def cases(setup: Setup) -> Cases:
    """Make one case of all phases, since what counts is their ratio."""
    return {f"{MAX_RUNNING} rows, {NUM_ADAPTERS} adapters": partial(_phases, setup)}


def _phases(setup: Setup) -> Figures:
    """The 99th percentile of steps while adapters are swapped, with that of steps without swaps as the floor."""
    refs = setup.adapters(RANKS, NUM_ADAPTERS)
    phase(setup, refs, setup.sized(WARM_UP_S, 0.2))
    with CompileWatch() as watch:
        quiet = phase(setup, refs[:NUM_RESIDENT], setup.sized(PHASE_S, 0.3))
        swaps = phase(setup, refs, setup.sized(PHASE_S, 0.3))
    floor = quiet["step_ms"]["p99"]
    figures = {
        "measured": swaps["step_ms"]["p99"],
        "floor": floor,
        "goal": GOAL_SWAPS * floor,
        "unit": "ms, p99",
    }
    return {
        **figures,
        "quiet": quiet,
        "swaps": swaps,
        "compiles": dict(watch.counts),
        "ok": not watch.counts,
    }


def phase(setup: Setup, refs: Sequence[AdapterRef], seconds: float) -> dict[str, Any]:
    """Keep a full batch of requests, each for a random adapter; returns steps in ms, loads, and tokens per second."""
    engine = setup.engine
    size = setup.sized
    draw = random.Random(0)
    live = set[str]()
    ids = map(str, itertools.count())
    steps = list[float]()
    tokens = 0
    loads_before = sum(engine.core.status().loads.values())
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < seconds or len(steps) < LEAST_STEPS:
        while (
            len(live) < MAX_RUNNING + MAX_RUNNING // 2
        ):  # some wait while their adapters are loaded
            prompt = draw_prompt(setup, size(PROMPT_TOKENS, 8))
            request = greedy_request(next(ids), prompt, size(OUTPUT_TOKENS, 4), draw.choice(refs))
            engine.submit(request)
            live.add(request.request_id)
        num_steps = engine.core.num_steps
        step_s = engine.pump()
        if engine.core.num_steps > num_steps:
            steps.append(step_s)
        tokens += sum(len(output.token_ids) for output in engine.outputs)
        live -= {output.request_id for output in engine.outputs if output.finish_reason is not None}
    tokens_per_s = tokens / (time.perf_counter() - start_s)
    engine.abort(sorted(live))
    loads = sum(engine.core.status().loads.values()) - loads_before
    return {
        "step_ms": distribution(steps, 1e3),
        "steps": len(steps),
        "loads": loads,
        "tokens_per_s": tokens_per_s,
    }
