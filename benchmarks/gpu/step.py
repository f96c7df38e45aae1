"""Whole steps of the engine with random weights: eager and as graphs, with and without adapters, beside their floors.

A step is one call of the core, planning and sampling included. `wait_ms` is how long the host waited for the device in
it; the profiler says, for three further steps, how long the device computed and how many kernels and copies it got.
"""

from __future__ import annotations

import itertools
import random
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from weft.adapters.ref import AdapterRef
from weft.benchmarks.engine.own_engine import OwnEngine
from weft.benchmarks.engine.stored import store_adapters
from weft.benchmarks.gpu.case_log import Case, Figures
from weft.benchmarks.gpu.commands import run_command
from weft.benchmarks.gpu.floors import (
    GOAL_ADAPTERS,
    GOAL_BASE,
    GOAL_LAUNCHES,
    GOAL_PROMPT,
    decode_floor_s,
    prompt_floor_s,
)
from weft.benchmarks.gpu.machine import MODES, Setup, mode_settings, release
from weft.benchmarks.gpu.random_model import adapter_folder, random_engine
from weft.config import MemoryConfig, SchedulerConfig
from weft.errors import EngineError
from weft.kernels.triton.compiles import CompileWatch

RANK = 16
ROWS = (32, 1, 8, 64)
ADAPTERS = (0, 1, 8, 32)
PROMPTS = (512, 2048)
WARM_UP_STEPS = 10
STEPS = 40
NUM_NAMED, NAME_LENGTH = 15, 80
"""So many kernels are told by name, those that take longest, and as much of their names."""
NCU_KERNELS = ("regex:item|chunk|shrink|expand|sample|norm|silu", 24)
"""What Nsight Compute looks at, and at how many of them."""
PROFILED_STEPS = 3


@dataclass
class Engines:
    """One engine at a time, opened when a case wants it."""

    setup: Setup
    stack: ExitStack = field(default_factory=ExitStack)
    _mode: str = ""
    _engine: OwnEngine | None = None
    _refs: list[AdapterRef] = field(default_factory=list)

    def open(self, mode: str) -> tuple[OwnEngine, list[AdapterRef]]:
        """The engine of a mode, and as many adapters as any case wants."""
        if self._engine is None or self._mode != mode:
            self.close()
            size = self.setup.sized
            memory = MemoryConfig(gib=size(24.0, 0.0625), host_gib=size(8.0, 0.03125), prefix_cache=False)
            scheduler = SchedulerConfig(max_running=64, step_tokens=size(2048, 256))
            opened = random_engine(self.setup, memory, scheduler, mode_settings(mode))
            engine = self.stack.enter_context(opened)
            programs = getattr(engine.core._runner, "_programs", None)
            if mode == MODES[0] and programs is not None and not programs.num_recorded:
                raise EngineError("no step could be captured; the engine's log says why")
            folders = [adapter_folder(self.setup, RANK)]
            self._refs = store_adapters(engine.parts.ready, engine.blob_dir, folders, max(ADAPTERS))
            self._mode, self._engine = mode, engine
        return self._engine, self._refs

    def close(self) -> None:
        """Close the engine that is open."""
        self._engine = None
        self.stack.close()
        release(self.setup.device)


def cases(setup: Setup) -> list[Case]:
    """Decode steps, then prompts; the modes one after the other, since each has an engine of its own."""
    engines, context = Engines(setup), setup.sized(1024, 32)
    decodes = [
        Case(decode_name(rows, count, mode), partial(_decode, engines, mode, rows, count, context))
        for mode, rows, count in itertools.product(MODES, ROWS, ADAPTERS)
        if count <= rows
    ]
    prompts = [
        Case(prompt_name(tokens, count, mode), partial(_prompt, engines, mode, tokens, count))
        for mode, tokens, count in itertools.product(MODES, PROMPTS, (0, 1))
    ]
    return sorted(decodes + prompts, key=lambda case: not case.name.endswith(MODES[0]))


def decode_name(rows: int, adapters: int, mode: str) -> str:
    """What a decode step is called."""
    return f"decode, {rows} rows, {adapters} adapters, {mode}"


def prompt_name(tokens: int, adapters: int, mode: str) -> str:
    """What the step of a prompt is called."""
    return f"prompt of {tokens}, {adapters} adapters, {mode}"


def _decode(engines: Engines, mode: str, rows: int, count: int, context: int, before: Mapping[str, Figures]) -> Figures:
    if mode == MODES[0] and not mode_settings(mode):
        return {"absent": "this engine captures no graphs"}
    setup = engines.setup
    engine, refs = engines.open(mode)
    with decoding(engine, refs[:count], rows, context, setup.vocab_size) as waits, CompileWatch() as watch:
        seconds = [engine.pump() for _ in range(setup.sized(STEPS, 3))]
        waited_s, counts = sum(waits) / len(seconds), device_work(engine, PROFILED_STEPS)
    ranks = [RANK] * count
    floor_s = decode_floor_s(setup.model, setup.vocab_size, rows, context + len(seconds) // 2, ranks, setup.machine)
    found: dict[str, Any] = {
        "measured": 1e3 * statistics.median(seconds),
        "floor": 1e3 * floor_s,
        "unit": "ms",
        "slowest": 1e3 * max(seconds),
        "wait_ms": 1e3 * waited_s,
        **counts,
        "most_launches": GOAL_LAUNCHES[count > 0],
        "compiles": dict(watch.counts),
        "ok": not watch.counts and counts["launches"] <= GOAL_LAUNCHES[count > 0],
    }
    return found | goal_of(count, found["floor"], before.get(decode_name(rows, 0, mode)))


def goal_of(count: int, floor: float, base: Figures | None) -> dict[str, float]:
    """E1 for the base, E2 for adapters where there is one for so many, and the base's step is known."""
    if count == 0:
        return {"goal": GOAL_BASE * floor}
    if count not in GOAL_ADAPTERS or base is None or "measured" not in base:
        return {}
    return {"goal": GOAL_ADAPTERS[count] * base["measured"]}


def _prompt(engines: Engines, mode: str, tokens: int, count: int, before: Mapping[str, Figures]) -> Figures:
    if mode == MODES[0] and not mode_settings(mode):
        return {"absent": "this engine captures no graphs"}
    setup = engines.setup
    engine, refs = engines.open(mode)
    with decoding(engine, refs[:count], 1, 8, setup.vocab_size):
        pass  # brings the adapter to the device
    seconds = []
    for _ in range(6):
        requests = engine.submit_endless([draw_prompt(tokens, setup.vocab_size)], refs[:count] or [None])
        start_s = time.perf_counter()
        engine.pump_until_decoding(requests)
        seconds.append(time.perf_counter() - start_s)
        engine.abort(requests)
    floor_s = prompt_floor_s(setup.model, setup.vocab_size, tokens, [RANK] * count, setup.machine)
    found = {"measured": 1e3 * statistics.median(seconds[1:]), "floor": 1e3 * floor_s, "unit": "ms"}
    base = before.get(prompt_name(tokens, 0, mode), {})
    return found | ({"goal": GOAL_PROMPT * base["measured"]} if count and "measured" in base else {})


@contextmanager
def decoding(
    engine: OwnEngine, refs: Sequence[AdapterRef], rows: int, context: int, vocab_size: int
) -> Iterator[list[float]]:
    """So many requests that decode in the block, warmed up; yields the seconds that `collect` of the runner takes."""
    requests = engine.submit_endless([draw_prompt(context, vocab_size) for _ in range(rows)], refs or [None])
    waits = list[float]()

    def timed(collect: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        start_s = time.perf_counter()
        results = collect(*arguments)
        waits.append(time.perf_counter() - start_s)
        return results

    runner = engine.core._runner
    try:
        engine.pump_until_decoding(requests)
        for _ in range(WARM_UP_STEPS):
            engine.pump()
        if not hasattr(runner, "collect"):
            yield waits
            return
        with patch.object(runner, "collect", partial(timed, runner.collect)):
            yield waits
    finally:
        engine.abort(requests)


def draw_prompt(tokens: int, vocab_size: int) -> list[int]:
    """Random token ids, none of them special."""
    return [random.randrange(2, vocab_size) for _ in range(tokens)]


def device_work(engine: OwnEngine, steps: int, trace: str = "") -> dict[str, Any]:
    """What the device did in some steps, per step; with a file name, the whole trace goes there."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            engine.pump()
    if trace:
        profiler.export_chrome_trace(trace)
    return count_work(
        (
            (event.name, event.device_type.name == "CUDA", event.time_range.elapsed_us())
            for event in profiler.events() or ()
        ),
        steps,
    )


def count_work(events: Iterable[tuple[str, bool, float]], steps: int) -> dict[str, Any]:
    """Kernels, copies, waits and busy time per step, and which kernels take longest.

    Args:
        events: Name, whether it is the device's, and microseconds of each.
        steps: Steps that they belong to.
    """
    counts, busy_us = Counter[str](), Counter[str]()
    for name, is_device, elapsed_us in events:
        if not is_device:
            counts["synchronizes"] += "Synchronize" in name
            continue
        kind = next((kind for kind in ("Memcpy HtoD", "Memcpy DtoH", "Memcpy DtoD", "Memset") if kind in name), "")
        counts[{"Memcpy HtoD": "copies_in", "Memcpy DtoH": "copies_out"}.get(kind, "launches")] += 1
        busy_us[name[:NAME_LENGTH]] += round(elapsed_us)
    found = {name: counts[name] / steps for name in ("launches", "copies_in", "copies_out", "synchronizes")}
    longest = {name: total_us / steps for name, total_us in busy_us.most_common(NUM_NAMED)}
    return {**found, "device_ms": busy_us.total() / steps / 1e3, "kernels_us": longest}


def profile_cases(setup: Setup) -> list[Case]:
    """Traces of a step without and with adapters, then the counters."""
    engines = Engines(setup)
    found = [Case(f"trace of 32 rows, {count} adapters", partial(_trace, setup, engines, count)) for count in (0, 32)]
    return [*found, Case("ncu", partial(_counters, setup))]


def _trace(setup: Setup, engines: Engines, count: int, _: Mapping[str, Figures]) -> Figures:
    engine, refs = engines.open("graph")
    path = setup.out / f"trace-{count}.json.gz"
    with decoding(engine, refs[:count], 32, setup.sized(1024, 32), setup.vocab_size):
        work = device_work(engine, PROFILED_STEPS, str(path))
    return {"measured": work["device_ms"], "unit": "ms on the device", **work, "trace": path.name}


def _counters(setup: Setup, _: Mapping[str, Figures]) -> Figures:
    if shutil.which("ncu") is None:
        return {"absent": "ncu is not on PATH"}
    step = ["gpu", "step", "--out", str(setup.scratch / "ncu"), "--device", setup.device.type]
    only = ["--only", f"^{decode_name(32, 32, 'eager')}$", *(["--tiny"] if setup.is_tiny else [])]
    report = ["-f", "-o", str(setup.out / "kernels"), "-k", NCU_KERNELS[0], "-c", str(NCU_KERNELS[1])]
    command = ["ncu", "--clock-control", "none", "--set", "basic", *report]
    return run_command([*command, sys.executable, "-P", "-m", "weft.benchmarks.main", *step, *only], setup, "ncu")
