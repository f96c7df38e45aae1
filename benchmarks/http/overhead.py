"""The cost of planning, processes and HTTP, beside the step that computes the tokens.

    manylora bench overhead [--repeats 3] [--json benchmarks/results/overhead-cpu.json]

The 0.5B shape in bfloat16, 32 base requests side by side, in turns: in this process, where only the engine runs, and
over HTTP as streams, from a server with a process of its own. The time between two tokens of a stream, less what the
engine alone computes in a step, is what all the rest costs; this client's share of the cores is part of it. Prints a
table and, last, one JSON line.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence

from manylora.benchmarks.engine.own_engine import OwnEngine
from manylora.benchmarks.engine.part_clock import PartClock
from manylora.benchmarks.engine.step import PROMPT_TOKENS, Case, engine_settings, timed_steps
from manylora.benchmarks.http.generator import Load, Target, check_replies
from manylora.benchmarks.http.own_server import own_server
from manylora.benchmarks.qwen_shape import MODEL_ABOUT, make_checkpoints
from manylora.benchmarks.report import Figures, Options, spread, spread_rows, take_turns

REQUESTS = 32
OUTPUT_TOKENS = 64


def measure(options: Namespace) -> Figures:
    """An engine in this process and a server, in turns.

    Raises:
        ManyloraError: A request failed.
    """
    base, _ = make_checkpoints()
    settings = engine_settings(REQUESTS)
    of_server = [f"{name.replace('_', '.', 1)}={value}" for name, value in settings.items()]
    with own_server(str(base), [], of_server) as targets, OwnEngine(base, **settings) as engine:

        def run(name: str, round_: int) -> dict[str, float]:
            return in_process(engine) if name == "engine" else over_http(targets, round_)

        return make_result(take_turns(("engine", "server"), options.repeats, run))


def in_process(engine: OwnEngine) -> dict[str, float]:
    """Median seconds of a step, planning included, and of a step without: tensors, model, sampling and outputs."""
    case = Case("decode", REQUESTS)
    timings = timed_steps(engine, case, [], OUTPUT_TOKENS, PartClock(), lambda: 0.0)
    told = engine.core.status().last_steps[-OUTPUT_TOKENS:]
    return {
        "step": statistics.median(timings.step_s),
        "computed": statistics.median(step.seconds for step in told),
    }


def over_http(targets: Sequence[Target], seed: int) -> dict[str, float]:
    """Median seconds between two tokens of a stream."""
    load = Load(
        targets=targets,
        at_once=REQUESTS,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        count=REQUESTS,
        seed=seed,
    )
    replies = load.run()
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
        "ms": {name: spread([1e3 * each[name] for each in rounds]) for name in rounds[0]},
        "share of a step": {
            "planning": share("step", "computed"),
            "processes and HTTP": share("gap over HTTP", "step"),
            "all": share("gap over HTTP", "computed"),
        },
    }
    load = {"model": MODEL_ABOUT, "requests": REQUESTS}
    return {"load": load, **found, "table": spread_rows(found)}


OPTIONS: Options = {"repeats": (3, "")}
