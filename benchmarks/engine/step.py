"""Time of a step, compared with the least time possible, and the parts where it goes.

    manylora bench step [--rows 1,8,32] [--prefill 2040] [--weights bf16,int8] [--json benchmarks/results/step-cpu.json]

Decode steps of 1, 8 and 32 requests (64 tokens of prompt each) and a step over a long prompt, on the 0.5B shape in
bfloat16: base requests, 8 adapters of rank 8, and 8 of ranks 8, 16, 32 and 64. The floor is one pass through all linear
layers with packed weights and as many rows, measured in turns with the steps. Formats of weights are measured in turns,
too, each with a floor of its own; `int8+kv8` has the KV cache in 8 bits as well. Prints a table of steps and their
parts, in ms, and, last, one JSON line.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, get_args

import torch

from manylora.adapters.base_shape import SITES
from manylora.adapters.ref import AdapterRef
from manylora.benchmarks.engine.own_engine import OwnEngine
from manylora.benchmarks.engine.part_clock import GROUPS, PARTS, PartClock, timed_parts
from manylora.benchmarks.model_shapes import QWEN
from manylora.benchmarks.qwen_shape import MODEL_ABOUT, RANKS, VOCAB_SIZE, make_checkpoints
from manylora.benchmarks.report import Figures, Options, counts, take_turns
from manylora.config import KvDtype
from manylora.engine.model.linear import make_head, make_linear
from manylora.kernels.weight_format import WeightFormat

PROMPT_TOKENS = 64
WARM_UP_STEPS = 120
"""Steps of a case that are not timed: in them the weights of its adapters are moved to their final places."""
_KV_DTYPES: dict[str, KvDtype] = {"": "auto", "+kv8": "int8"}
_WEIGHTS: tuple[WeightFormat, ...] = get_args(WeightFormat)
FORMATS = {
    name + end: (name, kv_dtype) for name in _WEIGHTS for end, kv_dtype in _KV_DTYPES.items()
}
"""Formats of weights and of the KV cache, by what `--weights` calls them."""
BASE = "base"
SMALL = "adapters of rank 8"
MIXED = "mixed adapters"
LARGE = "rank 64"
FIRST_STEPS = 4
"""Decode steps of fresh requests that are not timed."""
NUM_PASSES = 5
"""Timed passes of the floor, after one that is not."""


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


class LinearPass:
    """The linear layers of the 0.5B shape with random weights (0.8 GB in bfloat16).

    They run in model order, so that every weight comes from memory and not from a cache, as in a real step.

    Args:
        weights: The format of the layers.
    """

    def __init__(self, weights: WeightFormat = "bf16") -> None:
        base = QWEN.base()
        sites = [
            (sum(base.site_widths(index)), base.modules[site.modules[0]].in_features)
            for index, site in enumerate(SITES)
        ]
        self._linears = [
            (make_linear(_random(*shape), weights=weights), shape[1])
            for shape in sites * base.num_layers
        ]
        self._head = make_head(_random(VOCAB_SIZE, QWEN.hidden), weights)

    @torch.inference_mode()
    def seconds(self, rows: int, head_rows: int) -> float:
        """Median time of one pass over `rows` rows of activations, `head_rows` of which get logits."""
        inputs = {width: _random(rows, width) for _, width in self._linears}
        work = [(linear, inputs[width]) for linear, width in self._linears]
        work.append((self._head, _random(head_rows, QWEN.hidden)))
        seconds = []
        for _ in range(NUM_PASSES + 1):
            start_s = time.perf_counter()
            for linear, x in work:
                linear(x)
            seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds[1:])


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns).mul_(0.02).to(torch.bfloat16)


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


def timed_steps(
    engine: OwnEngine,
    case: Case,
    adapters: Sequence[AdapterRef],
    steps: int,
    clock: PartClock,
) -> tuple[list[float], Counter[str]]:
    """Run steps of a case; returns the seconds of each, and the sums of their parts. A prefill is one step."""
    clock.seconds.clear()
    with engine.decoding(case.rows, case.prompt_tokens, adapters) as prompt_s:
        if case.is_prefill:
            return [prompt_s], Counter(clock.seconds)
        for _ in range(FIRST_STEPS):
            engine.pump()
        clock.seconds.clear()
        return [engine.pump() for _ in range(steps)], Counter(clock.seconds)


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
    """A format of weights: its engine, its floor, and the adapters of this engine."""

    engine: OwnEngine
    floor: LinearPass
    adapters: dict[str, list[AdapterRef]]


def measure(options: Namespace) -> Figures:
    """Run all cases in all formats of weights."""
    base, adapters = make_checkpoints()
    settings = engine_settings(max([1, *options.rows]))
    found = Figures()
    with timed_parts() as clock, ExitStack() as stack:
        contenders = {}
        floors = dict[WeightFormat, LinearPass]()
        for name in options.weights:
            weights, kv_dtype = FORMATS[name]
            opened = OwnEngine(base, weights=weights, kv_dtype=kv_dtype, **settings)
            engine = stack.enter_context(opened)
            floors[weights] = floors.get(weights) or LinearPass(weights)
            stored = store_adapters(engine, adapters)
            contenders[name] = Contender(engine, floors[weights], stored)
        for case in make_cases(options):
            found |= measure_case(contenders, case, options, clock)
    return make_result(found, options.prompt_tokens)


def measure_case(
    contenders: dict[str, Contender], case: Case, options: Namespace, clock: PartClock
) -> Figures:
    """Run one case, all formats in turns, with a pass of the floor after each repeat."""

    def run(name: str, _round: int) -> tuple[list[float], Counter[str], float]:
        contender = contenders[name]
        adapters = contender.adapters[case.adapters]
        seconds, parts = timed_steps(contender.engine, case, adapters, options.steps, clock)
        floor_rows = case.rows * case.prompt_tokens if case.is_prefill else case.rows
        return seconds, parts, contender.floor.seconds(floor_rows, head_rows=case.rows)

    for contender in contenders.values():
        adapters = contender.adapters[case.adapters]
        warm_up = WARM_UP_STEPS if adapters and not case.is_prefill else 0
        timed_steps(contender.engine, replace(case, is_prefill=False), adapters, warm_up, clock)
    found = Figures()
    for format_, rounds in take_turns(contenders, options.repeats, run, first=1).items():
        name = case.name if format_ == "bf16" else f"{case.name}, {format_}"
        step_s, parts, floor_s = zip(*rounds, strict=True)
        found[name] = figures([*chain(*step_s)], floor_s, sum(parts, Counter()))
    return found


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


def figures(step_s: Sequence[float], floor_s: Sequence[float], part_s: Counter[str]) -> Figures:
    """Medians, their ratio, and the mean time of each part of a step."""
    step = statistics.median(step_s)
    floor = statistics.median(floor_s)
    return {
        "step_ms": step * 1e3,
        "floor_ms": floor * 1e3,
        "step / floor": step / floor,
        "part_ms": {part: 1e3 * part_s[part] / len(step_s) for part in PARTS},
        "part_share": {part: part_s[part] / part_s.total() for part in PARTS},
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
