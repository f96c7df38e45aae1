"""Do running decodes stall while adapters load?

    manylora bench stall [--shape qwen] [--json benchmarks/results/step-stall-cpu.json]

A steady batch of requests decodes with adapters that are on the device. Two phases take turns: a slow minute of the
machine hits both.

    quiet   nothing else happens
    swaps   other adapters, which the batch does not use, are loaded to the device and dropped all the time

Prints the step times of both, their ratios, and how long a load takes beside the batch (`stored`) and without one
(`idle`); last, one JSON line. `--shape demo` takes the shipped model and ends within seconds; its adapters are small:
it shows what many small pieces of work cost.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from manylora.adapters.ref import AdapterRef
from manylora.benchmarks.engine.own_engine import (
    OwnEngine,
    add_shape_options,
    own_engine,
    shape_config,
)
from manylora.benchmarks.engine.stored import store_adapters
from manylora.benchmarks.metrics import distribution
from manylora.benchmarks.report import AddOption
from manylora.config import MemoryConfig

PROMPT = list(range(10, 18))
UNDER_WAY = 2
"""Adapters that are loaded at a time."""
WARM_UP_STEPS = 160
"""Steps that are not timed: in them the weights of the batch are moved to their final places."""
SETTLE_STEPS = 40
"""Steps before each phase that are not timed: the phase before it has moved pages."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both phases in turns; the memory holds the steady batch and a few more adapters."""
    config, folders = shape_config(options, MemoryConfig(gib=1.0, host_gib=0.5))
    phase_steps = options.phase_steps or (200 if options.shape == "demo" else 60)
    with own_engine(config) as engine:
        refs = store_adapters(engine.parts.ready, engine.blob_dir, folders, 2 * options.adapters)
        swaps = Swaps(engine, refs[options.adapters :])
        swaps.load_idle(options.requests)
        step_s = time_steps(options, engine, refs[: options.adapters], swaps, phase_steps)
    return make_result(step_s, swaps.load_s)


class Swaps:
    """Loads and drops adapters, a few at a time.

    Args:
        engine: Where they come and go.
        refs: The adapters; no request uses them.
    """

    def __init__(self, engine: OwnEngine, refs: Sequence[AdapterRef]) -> None:
        self._core, self._residency = engine.core, engine.parts.residency
        self._engine, self._refs = engine, itertools.cycle(refs)
        self._wanted_s: dict[str, float] = {}
        """When the load of each adapter was asked for, by digest."""
        self.load_s: dict[str, list[float]] = {"idle": [], "stored": []}
        """Seconds from asking to ready, without the batch and beside it."""

    def load_idle(self, count: int) -> None:
        """Load adapters one after the other while nothing runs."""
        for _ in range(count):
            self._want()
            self.end("idle")

    def turn(self) -> None:
        """Drop adapters whose load is done, and ask for others."""
        self._forget_arrived("stored")
        while len(self._wanted_s) < UNDER_WAY:
            self._want()

    def end(self, kind: str = "stored") -> None:
        """Wait for the loads that run."""
        while self._wanted_s:
            self._engine.pump()
            self._forget_arrived(kind)

    def _want(self) -> None:
        ref = next(self._refs)
        self._wanted_s[ref.digest] = time.perf_counter()
        self._residency.hold(ref)

    def _forget_arrived(self, kind: str) -> None:
        for digest in [each for each in self._wanted_s if self._residency.state(each) == "device"]:
            self.load_s[kind].append(time.perf_counter() - self._wanted_s.pop(digest))
            self._residency.release_hold(digest)
            self._residency.forget(digest)


def time_steps(
    options: argparse.Namespace,
    engine: OwnEngine,
    steady: Sequence[AdapterRef],
    swaps: Swaps,
    phase_steps: int,
) -> dict[str, list[float]]:
    """Time the steps of each phase."""
    step_s: dict[str, list[float]] = {"quiet": [], "swaps": []}
    for round_ in range(options.rounds):
        requests = engine.submit_endless([PROMPT] * options.requests, steady)
        engine.pump_until_decoding(requests)
        for phase in step_s if round_ % 2 == 0 else reversed(step_s):
            for _ in range(
                SETTLE_STEPS if engine.core.num_steps > WARM_UP_STEPS else WARM_UP_STEPS
            ):
                engine.pump()
            for _ in range(phase_steps):
                if phase == "swaps":
                    swaps.turn()
                step_s[phase].append(engine.pump())
            swaps.end()
        engine.abort(requests)
    return step_s


def make_result(
    step_s: Mapping[str, Sequence[float]], load_s: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Percentiles of both phases and of loads, and ratios."""
    steps, loads = _milliseconds(step_s), _milliseconds(load_s)
    return {
        "step_ms": steps,
        "ratios": {
            f"swaps / quiet, {name}": steps["swaps"][name] / steps["quiet"][name]
            for name in ("p50", "p99")
        },
        "load_ms": loads,
        "table": [
            {"ms": f"{kind}, {name}", **found}
            for kind, by_name in (("step", steps), ("load", loads))
            for name, found in by_name.items()
        ],
    }


def _milliseconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    return {name: {"count": len(each), **distribution(each, 1e3)} for name, each in seconds.items()}


def add_options(add: AddOption) -> None:
    """Add its options."""
    add_shape_options(add)
    add("--requests", type=int, default=16, help="size of the steady batch")
    add("--adapters", type=int, default=8, help="adapters of the steady batch")
    add("--rounds", type=int, default=4, help="how often the phases take turns")
    add("--phase-steps", type=int, default=None, help="timed steps of each phase in a round")
