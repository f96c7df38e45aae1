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
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import get_args

import torch

from manylora.adapters.base_shape import SITES
from manylora.adapters.ref import AdapterRef
from manylora.benchmarks.engine.own_engine import OwnEngine, own_engine, random_prompts
from manylora.benchmarks.engine.part_clock import GROUPS, PARTS, PartClock, timed_parts
from manylora.benchmarks.model_shapes import QWEN
from manylora.benchmarks.qwen_shape import MODEL_ABOUT, RANKS, VOCAB_SIZE, make_checkpoints
from manylora.benchmarks.report import Figures, Options, counts, take_turns
from manylora.config import Config, KvDtype, MemoryConfig, ModelConfig, SchedulerConfig
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
FIRST_STEPS = 4
"""Decode steps of fresh requests that are not timed."""
NUM_PASSES = 5
"""Timed passes of the floor, after one that is not."""


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of one step."""

    name: str
    rows: int
    adapters: Sequence[AdapterRef | None]
    """The adapters of its requests, in turn."""
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
        self._linears.append((make_head(_random(VOCAB_SIZE, QWEN.hidden), weights), QWEN.hidden))

    @torch.inference_mode()
    def seconds(self, rows: int, head_rows: int) -> float:
        """Median time of one pass over `rows` rows of activations, `head_rows` of which get logits."""
        counts = [rows] * (len(self._linears) - 1) + [head_rows]
        inputs = {
            (count, width): _random(count, width)
            for count, (_, width) in zip(counts, self._linears, strict=True)
        }
        work = [
            (linear, inputs[count, width])
            for count, (linear, width) in zip(counts, self._linears, strict=True)
        ]
        seconds = []
        for _ in range(NUM_PASSES + 1):
            start_s = time.perf_counter()
            for linear, x in work:
                linear(x)
            seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds[1:])


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns).mul_(0.02).to(torch.bfloat16)


def step_engine(
    base: Path, *, max_rows: int, weights: WeightFormat = "bf16", kv_dtype: KvDtype = "auto"
) -> AbstractContextManager[OwnEngine]:
    """Build an engine for steps of at most `max_rows` requests."""
    model = ModelConfig(path=str(base), device="cpu", dtype="bfloat16", weights=weights)
    memory = MemoryConfig(gib=1.0, host_gib=0.75, kv_dtype=kv_dtype, prefix_cache=False)
    scheduler = SchedulerConfig(
        max_running=max_rows, step_tokens=max(2048, max_rows * PROMPT_TOKENS)
    )
    return own_engine(Config(model=model, memory=memory, scheduler=scheduler))


def timed_steps(
    engine: OwnEngine, case: Case, steps: int, clock: PartClock
) -> tuple[list[float], Counter[str]]:
    """Run steps of a case; returns the seconds of each, and the sums of their parts. A prefill is one step."""
    prompts = random_prompts(engine.core.num_steps, VOCAB_SIZE, case.rows, case.prompt_tokens)
    with engine.running(prompts, case.adapters) as requests:
        if not case.is_prefill:
            engine.pump_until_decoding(requests)
            for _ in range(FIRST_STEPS):
                engine.pump()
        clock.seconds.clear()
        seconds = [engine.pump() for _ in range(1 if case.is_prefill else steps)]
        return seconds, Counter(clock.seconds)


def make_cases(engine: OwnEngine, adapters: Sequence[Path], options: Namespace) -> list[Case]:
    """Decode steps for the base and, from 8 rows on, for 8 adapters; then a long prompt."""
    smallest = [folder for folder, rank in zip(adapters, RANKS, strict=True) if rank == min(RANKS)]
    mixed, small = (
        engine.store_adapters(folders, len(adapters)) for folders in (adapters, smallest)
    )
    length = options.prompt_tokens
    cases = [Case(f"decode, {rows} base", rows, [None], length) for rows in options.rows]
    for rows in options.rows:
        for about, refs in (("adapters of rank 8", small), ("mixed adapters", mixed)):
            if rows >= len(refs):
                cases.append(Case(f"decode, {rows} of 8 {about}", rows, refs, length))
    tokens = options.prefill
    long: list[tuple[str, Sequence[AdapterRef | None]]]
    long = [("base", [None]), ("rank 64", mixed[3:4])] if tokens else []
    for about, chosen in long:
        cases.append(
            Case(f"prompt of {tokens:,} tokens, {about}", 1, chosen, tokens, is_prefill=True)
        )
    return cases


@dataclass(frozen=True, slots=True)
class Contender:
    """A format of weights: its engine, its floor, and the cases in this engine."""

    engine: OwnEngine
    floor: LinearPass
    cases: list[Case]


def measure(options: Namespace) -> Figures:
    """Run all cases in all formats of weights."""
    base, adapters = make_checkpoints()
    max_rows = max([1, *options.rows])
    found = Figures()
    with timed_parts() as clock, ExitStack() as stack:
        contenders = {}
        floors = dict[WeightFormat, LinearPass]()
        for name in options.weights:
            weights, kv_dtype = FORMATS[name]
            opened = step_engine(base, max_rows=max_rows, weights=weights, kv_dtype=kv_dtype)
            engine = stack.enter_context(opened)
            cases = make_cases(engine, adapters, options)
            floors[weights] = floors.get(weights) or LinearPass(weights)
            contenders[name] = Contender(engine, floors[weights], cases)
        for index in range(len(cases)):
            found |= _measure_case(contenders, index, options, clock)
    return make_result(found, options.prompt_tokens)


def _measure_case(
    contenders: dict[str, Contender], index: int, options: Namespace, clock: PartClock
) -> Figures:
    """Run one case, all formats in turns, with a pass of the floor after each repeat."""

    def run(name: str, _round: int) -> tuple[list[float], Counter[str], float]:
        contender = contenders[name]
        case = contender.cases[index]
        seconds, parts = timed_steps(contender.engine, case, options.steps, clock)
        floor_rows = case.rows * case.prompt_tokens if case.is_prefill else case.rows
        return seconds, parts, contender.floor.seconds(floor_rows, head_rows=case.rows)

    for contender in contenders.values():
        case = contender.cases[index]
        warm_up = WARM_UP_STEPS if any(case.adapters) and not case.is_prefill else 0
        timed_steps(contender.engine, replace(case, is_prefill=False), warm_up, clock)
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
