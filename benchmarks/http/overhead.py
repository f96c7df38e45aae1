"""The cost of planning, processes and HTTP, beside the step that computes the tokens.

    manylora bench overhead [--requests 32] [--repeats 3] [--json benchmarks/results/overhead-cpu.json]

The 0.5B shape in bfloat16, base requests side by side, in turns: in this process, where only the engine runs, and
over HTTP as streams, from a server with a process of its own. The time between two tokens of a stream, less what the
engine alone computes in a step, is what all the rest costs; this client's share of the cores is part of it. Prints a
table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from manylora.benchmarks.engine.own_engine import OwnEngine
from manylora.benchmarks.engine.part_clock import PartClock
from manylora.benchmarks.engine.step import PROMPT_TOKENS, Case, step_engine, timed_steps
from manylora.benchmarks.http.generator import Load, Target
from manylora.benchmarks.http.own_server import own_server
from manylora.benchmarks.qwen_shape import MODEL_ABOUT, VOCAB_SIZE, make_checkpoints
from manylora.benchmarks.report import (
    DEFAULT_CACHE,
    AddOption,
    add_positive,
    spread,
    spread_rows,
    take_turns,
)
from manylora.benchmarks.workloads import TimedRequest
from manylora.errors import ConfigError, ManyloraError

MAX_STEPS = 256
"""Steps that the engine's status keeps."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """An engine in this process and a server, in turns.

    Raises:
        ConfigError: The engine's status does not keep that many steps.
        ManyloraError: A request failed.
    """
    if not 2 <= options.output_tokens <= MAX_STEPS:
        raise ConfigError(
            f"--output-tokens must be from 2 to {MAX_STEPS}, got {options.output_tokens}"
        )
    base, _ = make_checkpoints(options.cache)
    with (
        own_server(str(base), [], server_settings(options.requests)) as targets,
        step_engine(base, threads=0, max_rows=options.requests) as engine,
    ):

        def run(name: str, round_: int) -> dict[str, float]:
            return (
                in_process(engine, options)
                if name == "engine"
                else over_http(targets, options, round_)
            )

        return make_result(take_turns(("engine", "server"), options.repeats, run))


def server_settings(requests: int) -> list[str]:
    """The server's settings, as the engine in this process has them."""
    model = [
        "model.dtype=bfloat16",
        "memory.gib=1",
        "memory.host_gib=0.75",
        "memory.prefix_cache=false",
    ]
    step_tokens = max(2048, requests * PROMPT_TOKENS)
    return [*model, f"scheduler.max_running={requests}", f"scheduler.step_tokens={step_tokens}"]


def in_process(engine: OwnEngine, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step, planning included, and of a step without: tensors, model, sampling and outputs."""
    case = Case("decode", options.requests, [None])
    step_s, _ = timed_steps(engine, case, options.output_tokens, PartClock())
    told = engine.core.status().last_steps[-options.output_tokens :]
    return {
        "step": statistics.median(step_s),
        "computed": statistics.median(step.seconds for step in told),
    }


def over_http(
    targets: Sequence[Target], options: argparse.Namespace, seed: int
) -> dict[str, float]:
    """Median seconds between two tokens of a stream."""
    plan = [TimedRequest(0.0, 0, PROMPT_TOKENS, options.output_tokens)] * options.requests
    replies = uvloop.run(Load(plan, VOCAB_SIZE, options.requests).send(targets, seed))
    if failed := next((reply.error for reply in replies if reply.error), None):
        raise ManyloraError(f"a request over HTTP failed: {failed}")
    return {"gap over HTTP": statistics.median(gap for reply in replies for gap in reply.gaps_s)}


def make_result(runs: Mapping[str, Sequence[dict[str, float]]]) -> dict[str, Any]:
    """Medians in ms, and shares of a step, taken within rounds."""
    rounds = [
        engine | server for engine, server in zip(runs["engine"], runs["server"], strict=True)
    ]

    def share(over: str, under: str) -> dict[str, Any]:
        return spread([(each[over] - each[under]) / each["step"] for each in rounds])

    found = {
        "ms": {
            name: spread([1e3 * each[name] for each in rounds])
            for name in ("computed", "step", "gap over HTTP")
        },
        "share of a step": {
            "planning": share("step", "computed"),
            "processes and HTTP": share("gap over HTTP", "step"),
            "all": share("gap over HTTP", "computed"),
        },
    }
    return {"load": {"model": MODEL_ABOUT}, **found, "table": spread_rows(found)}


def add_options(add: AddOption) -> None:
    """Add its options."""
    add_positive(add, requests=(32, "at once"), output_tokens=(64, ""), repeats=(3, ""))
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated checkpoints")
