"""What do planning, processes and HTTP cost, beside the step that computes the tokens?

    weft bench overhead [--requests 32] [--repeats 3] [--json benchmarks/results/overhead-cpu.json]

The 0.5B shape in bfloat16, so many base requests at once, in turns: in this process, where only the engine runs, and
over HTTP as streams, from a server with a process of its own. The time between two tokens of a stream, less what the
engine alone computes in a step, is what all the rest costs; this client's share of the cores is part of it. Prints a
table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from weft.benchmarks.arguments import positive
from weft.benchmarks.generator import LoadSettings, PlannedRequest, Reply, run_load
from weft.benchmarks.http_stream import EventClient
from weft.benchmarks.own_server import Served, own_server
from weft.benchmarks.part_clock import PartClock
from weft.benchmarks.qwen_shape import VOCAB_SIZE, make_checkpoints
from weft.benchmarks.report import DEFAULT_CACHE, SHOWN, chosen, spread
from weft.benchmarks.step import PROMPT_TOKENS, Case, StepBench
from weft.engine.status import StepStats
from weft.errors import ConfigError, WeftError

MAX_STEPS = 256
"""Steps of which the engine tells."""


class Engine(Protocol):
    """What is asked of the engine in this process; `StepBench` is one."""

    def decode(self, case: Case, steps: int) -> list[float]:
        """Seconds of so many decode steps of a case."""

    def last_steps(self, count: int) -> Sequence[StepStats]:
        """What the engine tells of the last steps."""


@dataclass(slots=True)
class Rounds:
    """Medians of each round, in seconds."""

    computed_s: list[float] = field(default_factory=list)
    """A step without its planning: tensors, model, sampling, and what the tokens mean for their requests."""
    step_s: list[float] = field(default_factory=list)
    """A step in this process, planning included."""
    gap_s: list[float] = field(default_factory=list)
    """Between two tokens of a stream over HTTP."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """An engine in this process and a server, in turns."""
    if not 2 <= options.output_tokens <= MAX_STEPS:
        raise ConfigError(f"--output-tokens must be from 2 to {MAX_STEPS}, got {options.output_tokens}")
    base, adapters = make_checkpoints(options.cache)
    with (
        tempfile.TemporaryDirectory(prefix="weft-") as folder,
        own_server(str(base), [], server_settings(options.requests)) as served,
    ):
        bench = StepBench(base, adapters, PartClock(), Path(folder), threads=0, max_rows=options.requests)
        try:
            return make_result(options, measure_rounds(bench, served, options))
        finally:
            bench.close()


def server_settings(requests: int) -> list[str]:
    """The server's settings, as the engine in this process has them."""
    return [
        "model.dtype=bfloat16",
        "memory.gib=1",
        "memory.host_gib=0.75",
        "memory.prefix_cache=false",
        f"scheduler.max_running={requests}",
        f"scheduler.step_tokens={max(2048, requests * PROMPT_TOKENS)}",
    ]


def measure_rounds(bench: Engine, served: Served, options: argparse.Namespace) -> Rounds:
    """Take turns, after one round that is not counted.

    Raises:
        WeftError: A request failed.
    """
    case = Case("decode", options.requests, [None])
    rounds = Rounds()
    for round_ in range(options.repeats + 1):
        step_s = bench.decode(case, options.output_tokens)
        computed_s = [step.seconds for step in bench.last_steps(options.output_tokens)]
        records = asyncio.run(_stream(served, options, seed=round_))
        if failed := next((record.error for record in records if record.error), None):
            raise WeftError(f"a request over HTTP failed: {failed}")
        if round_:
            rounds.step_s.append(statistics.median(step_s))
            rounds.computed_s.append(statistics.median(computed_s))
            rounds.gap_s.append(statistics.median(gap for record in records for gap in record.gaps_s))
    return rounds


async def _stream(served: Served, options: argparse.Namespace, seed: int) -> list[Reply]:
    plan = [PlannedRequest(served.models[0], PROMPT_TOKENS, options.output_tokens) for _ in range(options.requests)]
    settings = LoadSettings(vocab_size=VOCAB_SIZE, concurrency=options.requests, seed=seed)
    async with EventClient(served.url, {"Authorization": f"Bearer {served.key}"}) as client:
        return await run_load(client, plan, settings)


def make_result(options: argparse.Namespace, rounds: Rounds) -> dict[str, Any]:
    """Medians in ms, and shares of a step, taken within rounds."""
    of_rounds = list(zip(rounds.computed_s, rounds.step_s, rounds.gap_s, strict=True))
    found = {
        "ms": {
            "computed": spread([1e3 * computed for computed, _, _ in of_rounds]),
            "step": spread([1e3 * step for _, step, _ in of_rounds]),
            "gap over HTTP": spread([1e3 * gap for _, _, gap in of_rounds]),
        },
        "share of a step": {
            "planning": spread([(step - computed) / step for computed, step, _ in of_rounds]),
            "processes and HTTP": spread([(gap - step) / step for _, step, gap in of_rounds]),
            "all": spread([(gap - computed) / step for computed, step, gap in of_rounds]),
        },
    }
    return {
        "load": {
            "model": "Qwen2-0.5B shape, vocabulary 32000, random weights, bfloat16",
            **chosen(options, "requests", "output_tokens", "repeats"),
        },
        **found,
        "table": [
            {"": f"{name}, {unit}", **{key: each[key] for key in SHOWN}}
            for unit, figures in found.items()
            for name, each in figures.items()
        ],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    add = parser.add_argument
    add("--requests", type=positive, default=32, help="at once")
    add("--output-tokens", type=positive, default=64)
    add("--repeats", type=positive, default=3)
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated checkpoints")
