"""Steps of the engine with random weights, with and without adapters, beside their floors.

A step is one call of the core, planning and sampling included. The profiler says, for three further steps, how long the
device computed and how many kernels it got: where it computed for less than the step took, it waited for the host. And
steps of a full batch while adapters of mixed rank come and go, beside steps with all adapters on the device (M3).
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch.profiler import profile

from manylora.adapters.ref import AdapterRef
from manylora.benchmarks.engine.own_engine import random_prompts
from manylora.benchmarks.gpu import floors
from manylora.benchmarks.gpu.case_log import Cases
from manylora.benchmarks.gpu.setup import MAX_RUNNING, Setup
from manylora.benchmarks.metrics import distribution
from manylora.benchmarks.report import Figures
from manylora.errors import EngineError
from manylora.kernels.triton.compiles import CompileWatch

RANK = 16
ROWS = (32, 1, 8, 64)
ADAPTERS = (0, *floors.GOAL_ADAPTERS)
PROMPTS = (512, 2048)
WARM_UP_STEPS = 10
STEPS = 40
PROFILED_STEPS = 3
SWAPPED_RANKS = (8, 16, 32, 64)
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
    """Decode steps, then prompts."""
    decodes = {
        f"decode, {rows} rows, {count} adapters": partial(_decode, setup, rows, count)
        for rows, count in itertools.product(ROWS, ADAPTERS)
        if count <= rows
    }
    prompts = {
        f"prompt of {tokens}, {count} adapters": partial(_prompt, setup, tokens, count)
        for tokens, count in itertools.product(PROMPTS, (0, 1))
    }
    return decodes | prompts


def trace_cases(setup: Setup) -> Cases:
    """Decode steps with the whole trace of the profiler."""
    return {
        f"decode, 32 rows, {count} adapters": partial(_decode, setup, 32, count, has_trace=True)
        for count in (0, 32)
    }


def swap_cases(setup: Setup) -> Cases:
    """Make one case of all phases, since what counts is their ratio."""
    return {f"{MAX_RUNNING} rows, {NUM_ADAPTERS} adapters": partial(_swaps, setup)}


def _decode(setup: Setup, rows: int, count: int, *, has_trace: bool = False) -> Figures:
    """A decode step. The goal of one with adapters is a multiple of the base's, which is measured with it (E1, E2)."""
    base_ms = _decode(setup, rows, 0)["measured"] if count else 0.0
    context = setup.sized(1024, 32)
    steps = setup.sized(STEPS, 3)
    ranks = [RANK] * count
    middle = context + steps // 2
    floor_s = floors.decode_floor_s(
        setup.model, setup.vocab_size, rows, middle, ranks, setup.machine
    )
    refs = setup.adapters((RANK,), count)
    check_captures(setup)
    with setup.engine.decoding(rows, context, refs), CompileWatch() as watch:
        seconds = [setup.engine.pump() for _ in range(WARM_UP_STEPS + steps)][WARM_UP_STEPS:]
        work = device_work(setup, f"trace-{count}.json.gz" if has_trace else "")
    goal = floors.GOAL_ADAPTERS[count] * base_ms if count else 1e3 * floors.GOAL_BASE * floor_s
    return {
        "measured": 1e3 * statistics.median(seconds),
        "floor": 1e3 * floor_s,
        "goal": goal,
        "unit": "ms",
        "slowest": 1e3 * max(seconds),
        **work,
        "compiles": dict(watch.counts),
        "ok": not watch.counts and work["launches"] <= floors.GOAL_LAUNCHES[count > 0],
    }


def _prompt(setup: Setup, tokens: int, count: int) -> Figures:
    """A prompt. The goal of one with an adapter is a multiple of the base's, which is measured with it (E3)."""
    goal = {"goal": floors.GOAL_PROMPT * _prompt(setup, tokens, 0)["measured"]} if count else {}
    ranks = [RANK] * count
    floor_s = floors.prompt_floor_s(setup.model, setup.vocab_size, tokens, ranks, setup.machine)
    refs = setup.adapters((RANK,), count)
    check_captures(setup)
    seconds = list[float]()
    for _ in range(6):
        with setup.engine.decoding(1, tokens, refs) as prompt_s:
            seconds.append(prompt_s)
    measured = 1e3 * statistics.median(seconds[1:])
    return {"measured": measured, "floor": 1e3 * floor_s, "unit": "ms", **goal}


def check_captures(setup: Setup) -> None:
    """Check that steps are replayed, if they are to be.

    Raises:
        EngineError: None could be captured.
    """
    programs = setup.engine.core._runner.programs
    if programs and not programs.num_recorded and not setup.is_eager:
        raise EngineError(
            "no step could be captured as a CUDA graph; the log above says why. --eager needs none"
        )


def device_work(setup: Setup, trace: str) -> Figures:
    """Profile some steps; with a file name, the whole trace goes there."""
    with profile() as profiler:
        for _ in range(PROFILED_STEPS):
            setup.engine.pump()
    if trace:
        profiler.export_chrome_trace(str(setup.out / trace))
    return count_work(
        event for event in profiler.key_averages() if event.device_type.name == "CUDA"
    )


def count_work(events: Iterable[Any]) -> Figures:
    """Launches, busy time, and calls and microseconds of each kernel and copy, the longest first; all per step."""
    longest = sorted(events, key=lambda event: -event.self_device_time_total)
    calls = {event.key: event.count / PROFILED_STEPS for event in longest}
    us = {event.key: event.self_device_time_total / PROFILED_STEPS for event in longest}
    copies = ("Memcpy HtoD", "Memcpy DtoH")
    return {
        "launches": sum(calls[name] for name in calls if not name.startswith(copies)),
        "device_ms": sum(us.values()) / 1e3,
        "kernel_calls": calls,
        "kernel_us": us,
    }


def _swaps(setup: Setup) -> Figures:
    """The 99th percentile of steps while adapters are swapped, with that of steps without swaps as the floor."""
    refs = setup.adapters(SWAPPED_RANKS, NUM_ADAPTERS)
    phase(setup, refs, setup.sized(WARM_UP_S, 0.2))
    with CompileWatch() as watch:
        quiet, swaps = (
            phase(setup, each, setup.sized(PHASE_S, 0.3)) for each in (refs[:NUM_RESIDENT], refs)
        )
    floor = quiet["step_ms"]["p99"]
    return {
        "measured": swaps["step_ms"]["p99"],
        "floor": floor,
        "goal": floors.GOAL_SWAPS * floor,
        "unit": "ms, p99",
        "quiet": quiet,
        "swaps": swaps,
        "compiles": dict(watch.counts),
        "ok": not watch.counts,
    }


def phase(setup: Setup, refs: Sequence[AdapterRef], seconds: float) -> Figures:
    """Keep a full batch of requests, each for a random adapter; returns steps in ms, loads, and tokens per second."""
    engine = setup.engine
    draw = random.Random(0)
    live = set[str]()
    steps = list[float]()
    tokens = 0
    loads_before = sum(engine.core.status().loads.values())
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < seconds or len(steps) < LEAST_STEPS:
        # Some wait while their adapters are loaded.
        while len(live) < MAX_RUNNING + MAX_RUNNING // 2:
            length = setup.sized(PROMPT_TOKENS, 8)
            (prompt,) = random_prompts(draw.random(), setup.vocab_size, 1, length)
            live.add(engine.submit(prompt, setup.sized(OUTPUT_TOKENS, 4), draw.choice(refs)))
        num_steps = engine.core.num_steps
        step_s = engine.pump()
        if engine.core.num_steps > num_steps:
            steps.append(step_s)
        tokens += sum(len(output.token_ids) for output in engine.outputs)
        live -= {output.request_id for output in engine.outputs if output.finish_reason is not None}
    tokens_per_s = tokens / (time.perf_counter() - start_s)
    engine.abort(sorted(live))
    return {
        "step_ms": distribution(steps, 1e3),
        "steps": len(steps),
        "loads": sum(engine.core.status().loads.values()) - loads_before,
        "tokens_per_s": tokens_per_s,
    }
