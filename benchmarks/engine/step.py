"""Time of a step, compared with the least time possible, and the parts where it goes.

    manylora bench step [--rows 1,8,32] [--prefill 2040] [--weights bf16,int8] [--json benchmarks/results/step-cpu.json]

Decode steps of 1, 8 and 32 requests (64 tokens of prompt each) and a step over a long prompt, on the 0.5B shape in
bfloat16: base requests, 8 adapters of rank 8, and 8 of ranks 8, 16, 32 and 64. The floor is what no program can pass on
this CPU: the bytes of all that the step reads, at the rate of memory just after each step, or its multiply-adds, at the
peaks of their kinds. Formats of weights are measured in turns, too; `int8+kv8` has the KV cache in 8 bits
as well. Prints a table of steps and their parts, in ms, and, last, one JSON line.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from manylora.adapters.ref import AdapterRef
from manylora.benchmarks.engine.own_engine import OwnEngine
from manylora.benchmarks.engine.part_clock import GROUPS, PARTS, PartClock, timed_parts
from manylora.benchmarks.engine.step_work import StepLoad, StepWork, step_work
from manylora.benchmarks.model_shapes import QWEN
from manylora.benchmarks.qwen_shape import MODEL_ABOUT, RANKS, VOCAB_SIZE, make_checkpoints
from manylora.benchmarks.report import Figures, Options, counts, take_turns
from manylora.config import KvDtype
from manylora.kernels.native.library import find_library
from manylora.kernels.native.peaks import CpuPeaks, ReadMeter, product_rates
from manylora.kernels.weight_format import WEIGHT_FORMATS

PROMPT_TOKENS = 64
WARM_UP_STEPS = 120
"""Steps of a case that are not timed: in them the weights of its adapters are moved to their final places."""
_KV_DTYPES: dict[str, KvDtype] = {"": "auto", "+kv8": "int8"}
FORMATS = {
    name + end: (name, kv_dtype) for name in WEIGHT_FORMATS for end, kv_dtype in _KV_DTYPES.items()
}
"""Formats of weights and of the KV cache, by what `--weights` calls them."""
BASE = "base"
SMALL = "adapters of rank 8"
MIXED = "mixed adapters"
LARGE = "rank 64"
FIRST_STEPS = 4
"""Decode steps of fresh requests that are not timed."""


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of one step."""

    name: str
    rows: int
    adapters: str = BASE
    """Adapters of its requests, as `store_adapters` names them."""
    prompt_tokens: int = PROMPT_TOKENS
    """Tokens of the prompt of each request."""
    is_prefill: bool = False
    """True if the step that computes the prompts is timed, instead of the decode steps."""


def engine_settings(max_rows: int) -> dict[str, Any]:
    """Settings for steps of at most `max_rows` requests, by section and name as `LLM` takes them."""
    return {
        "model_device": "cpu",
        "model_dtype": "bfloat16",
        "memory_gib": 1.0,
        "memory_host_gib": 0.75,
        "memory_prefix_cache": False,
        "scheduler_max_running": max_rows,
        "scheduler_step_tokens": max(2048, max_rows * PROMPT_TOKENS),
    }


@dataclass(slots=True)
class Timings:
    """Steps of a case, and the machine meanwhile."""

    step_s: list[float] = field(default_factory=list)
    part_s: Counter[str] = field(default_factory=Counter)
    """Sums of the parts of these steps."""
    bytes_per_s: list[float] = field(default_factory=list)
    """Read from memory just after each step."""

    def __add__(self, other: Timings) -> Timings:
        return Timings(
            self.step_s + other.step_s,
            self.part_s + other.part_s,
            self.bytes_per_s + other.bytes_per_s,
        )


def timed_steps(
    engine: OwnEngine,
    case: Case,
    adapters: Sequence[AdapterRef],
    steps: int,
    clock: PartClock,
    read: Callable[[], float],
) -> Timings:
    """Run steps of a case; a prefill is one step.

    Args:
        engine: Runs them.
        case: Their requests.
        adapters: Of the requests, in turn.
        steps: Number of decode steps.
        clock: Times their parts.
        read: Reads memory, and returns the bytes per second.
    """
    clock.seconds.clear()
    with engine.decoding(case.rows, case.prompt_tokens, adapters) as prompt_s:
        if case.is_prefill:
            return Timings([prompt_s], Counter(clock.seconds), [read()])
        for _ in range(FIRST_STEPS):
            engine.pump()
        clock.seconds.clear()
        timings = Timings()
        for _ in range(steps):
            timings.step_s.append(engine.pump())
            timings.bytes_per_s.append(read())
        timings.part_s.update(clock.seconds)
        return timings


def make_cases(options: Namespace) -> list[Case]:
    """Decode steps for the base and, from 8 rows on, for 8 adapters; then a long prompt."""
    length = options.prompt_tokens
    cases = [Case(f"decode, {rows} base", rows, BASE, length) for rows in options.rows]
    for rows, about in product(options.rows, (SMALL, MIXED)):
        if rows >= len(RANKS):
            cases.append(Case(f"decode, {rows} of 8 {about}", rows, about, length))
    tokens = options.prefill
    for about in (BASE, LARGE) if tokens else ():
        name = f"prompt of {tokens:,} tokens, {about}"
        cases.append(Case(name, 1, about, tokens, is_prefill=True))
    return cases


def store_adapters(engine: OwnEngine, folders: Sequence[Path]) -> dict[str, list[AdapterRef]]:
    """Store 8 adapters of the smallest rank, and 8 mixed ones, of which one is the large one."""
    smallest = [folder for folder, rank in zip(folders, RANKS, strict=True) if rank == min(RANKS)]
    mixed = engine.store_adapters(folders, len(RANKS))
    small = engine.store_adapters(smallest, len(RANKS))
    return {BASE: [], SMALL: small, MIXED: mixed, LARGE: mixed[3:4]}


@dataclass(frozen=True, slots=True)
class Contender:
    """The engine of a format of weights, and its adapters."""

    engine: OwnEngine
    adapters: dict[str, list[AdapterRef]]


def measure(options: Namespace) -> Figures:
    """Run all cases in all formats of weights."""
    base, adapters = make_checkpoints()
    settings = engine_settings(max([1, *options.rows]))
    found = Figures()
    with timed_parts() as clock, ExitStack() as stack:
        contenders = {}
        for name in options.weights:
            weights, kv_dtype = FORMATS[name]
            opened = OwnEngine(base, weights=weights, kv_dtype=kv_dtype, **settings)
            engine = stack.enter_context(opened)
            stored = store_adapters(engine, adapters)
            contenders[name] = Contender(engine, stored)
        for case in make_cases(options):
            found |= measure_case(contenders, case, options, clock)
    return make_result(found, options.prompt_tokens)


def measure_case(
    contenders: dict[str, Contender], case: Case, options: Namespace, clock: PartClock
) -> Figures:
    """Run one case, all formats in turns."""
    library = find_library()
    read = ReadMeter(library).bytes_per_s

    def run(name: str, _round: int) -> Timings:
        contender = contenders[name]
        adapters = contender.adapters[case.adapters]
        return timed_steps(contender.engine, case, adapters, options.steps, clock, read)

    for contender in contenders.values():
        adapters = contender.adapters[case.adapters]
        warm_up = WARM_UP_STEPS if adapters and not case.is_prefill else 0
        once = replace(case, is_prefill=False)
        timed_steps(contender.engine, once, adapters, warm_up, clock, lambda: 0.0)
    rates = product_rates(library)
    found = Figures()
    for format_, rounds in take_turns(contenders, options.repeats, run, first=1).items():
        name = case.name if format_ == "bf16" else f"{case.name}, {format_}"
        timings = sum(rounds, Timings())
        work = work_of(case, format_, contenders[format_].adapters[case.adapters])
        peaks = CpuPeaks(statistics.median(timings.bytes_per_s), rates)
        found[name] = figures(timings, peaks.seconds(work.num_bytes, work.multiply_adds))
    return found


def work_of(case: Case, format_: str, adapters: Sequence[AdapterRef]) -> StepWork:
    """The least that a step of a case does, with weights in a format of `FORMATS`."""
    weights, kv_dtype = FORMATS[format_]
    ranks = [adapter.config.rank for adapter in adapters]
    load = StepLoad(case.rows, case.prompt_tokens, case.is_prefill, ranks)
    return step_work(QWEN, VOCAB_SIZE, load, weights, is_kv_int8=kv_dtype == "int8")


def make_result(cases: dict[str, Figures], prompt_tokens: int = PROMPT_TOKENS) -> Figures:
    """The figures of all cases, and a table with the parts in groups."""
    return {
        "load": {"model": MODEL_ABOUT, "prompt_tokens": prompt_tokens},
        "groups": GROUPS,
        "cases": cases,
        "table": [
            {
                "case": name,
                **{key: case[key] for key in ("step_ms", "floor_ms", "step / floor")},
                **{
                    group: sum(case["part_ms"][part] for part in parts)
                    for group, parts in GROUPS.items()
                },
            }
            for name, case in cases.items()
        ],
    }


def figures(timings: Timings, floor_s: float) -> Figures:
    """Medians, their ratio, and the mean time of each part of a step."""
    step = statistics.median(timings.step_s)
    parts = timings.part_s
    return {
        "step_ms": step * 1e3,
        "floor_ms": floor_s * 1e3,
        "step / floor": step / floor_s,
        "part_ms": {part: 1e3 * parts[part] / len(timings.step_s) for part in PARTS},
        "part_share": {part: parts[part] / parts.total() for part in PARTS},
    }


def formats(text: str) -> list[str]:
    """Read formats, comma-separated.

    Raises:
        ArgumentTypeError: One is none of `FORMATS`.
    """
    found = text.split(",")
    if not set(found) <= set(FORMATS):
        raise ArgumentTypeError(f"expected some of {', '.join(FORMATS)}, got {text}")
    return [name for name in FORMATS if name in found]


OPTIONS: Options = {
    "rows": ("1,8,32", "requests of a decode step, comma-separated", counts),
    "prefill": (2040, "tokens of the long prompt; 0 leaves it out", int),
    "prompt_tokens": (PROMPT_TOKENS, "of each request of a decode step"),
    "weights": ("bf16", f"of {', '.join(FORMATS)}, comma-separated", formats),
    "steps": (24, "timed decode steps of each repeat"),
    "repeats": (4, ""),
}
