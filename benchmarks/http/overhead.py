"""The cost of planning, processes and HTTP, beside the step that computes the tokens.

    manylora bench overhead [--requests 32] [--repeats 3] [--json benchmarks/results/overhead-cpu.json]

The 0.5B shape in bfloat16, base requests side by side, in turns: in this process, where only the engine runs, and
over HTTP as streams, from a server with a process of its own. The time between two tokens of a stream, less what the
engine alone computes in a step, is what all the rest costs; this client's share of the cores is part of it. Prints a
table and, last, one JSON line.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence

import uvloop

from manylora.benchmarks.engine.own_engine import OwnEngine
from manylora.benchmarks.engine.part_clock import PartClock
from manylora.benchmarks.engine.step import PROMPT_TOKENS, Case, step_engine, timed_steps
from manylora.benchmarks.http.generator import Load, Target, check_replies
from manylora.benchmarks.http.own_server import own_server
from manylora.benchmarks.qwen_shape import MODEL_ABOUT, make_checkpoints
from manylora.benchmarks.report import Figures, Options, spread, spread_rows, take_turns
from manylora.errors import ConfigError

MAX_STEPS = 256
"""Steps that the engine's status keeps."""


def measure(options: Namespace) -> Figures:
    """An engine in this process and a server, in turns.

    Raises:
        ConfigError: The engine's status does not keep that many steps.
        ManyloraError: A request failed.
    """
    if not 2 <= options.output_tokens <= MAX_STEPS:
        raise ConfigError(
            f"--output-tokens must be from 2 to {MAX_STEPS}, got {options.output_tokens}"
        )
    base, _ = make_checkpoints()
    with (
        own_server(str(base), [], server_settings(options.requests)) as targets,
        step_engine(base, max_rows=options.requests) as engine,
    ):

        def run(name: str, round_: int) -> dict[str, float]:
            if name == "engine":
                return in_process(engine, options)
            return over_http(targets, options, round_)

        return make_result(take_turns(("engine", "server"), options.repeats, run))


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


def in_process(engine: OwnEngine, options: Namespace) -> dict[str, float]:
    """Median seconds of a step, planning included, and of a step without: tensors, model, sampling and outputs."""
    case = Case("decode", options.requests, [None])
    step_s, _ = timed_steps(engine, case, options.output_tokens, PartClock())
    told = engine.core.status().last_steps[-options.output_tokens :]
    return {
        "step": statistics.median(step_s),
        "computed": statistics.median(step.seconds for step in told),
    }


def over_http(targets: Sequence[Target], options: Namespace, seed: int) -> dict[str, float]:
    """Median seconds between two tokens of a stream."""
    load = Load(
        targets=targets,
        at_once=options.requests,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=options.output_tokens,
        count=options.requests,
        seed=seed,
    )
    replies = uvloop.run(load.send())
    check_replies(replies)
    return {"gap over HTTP": statistics.median(gap for reply in replies for gap in reply.gaps_s)}


def make_result(runs: Mapping[str, Sequence[dict[str, float]]]) -> Figures:
    """Medians in ms, and shares of a step, taken within rounds."""
    rounds = [
        engine | server for engine, server in zip(runs["engine"], runs["server"], strict=True)
    ]

    def share(over: str, under: str) -> Figures:
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


OPTIONS: Options = {
    "requests": (32, "at once"),
    "output_tokens": (64, ""),
    "repeats": (3, ""),
}
