"""How does Weft compare with another OpenAI-compatible server under the same load, in turns on the same machine?

    weft bench compare --peer http://127.0.0.1:8001/v1 --peer-models base,l0,l1 [--peer-name vLLM] [options of serve]

Weft is started as `weft bench serve` does, or taken as it runs (--url). Each round sends the same requests to one
server and then to the other, the order changing from round to round, after one round that is not counted; ratios are
taken within a round. Prints a table and, last, one JSON line. Exit status 1 if any request failed, 2 if the arguments
make no sense.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.benchmarks import load
from weft.benchmarks.arguments import positive
from weft.benchmarks.generator import PlannedRequest, run_load
from weft.benchmarks.http_stream import EventClient
from weft.benchmarks.metrics import Objective, summarise
from weft.benchmarks.report import (
    exit_status,
    provenance,
    shown_options,
    spread,
    without_key,
    without_nan,
    write_result,
)
from weft.benchmarks.serve import add_server_options, target
from weft.errors import ConfigError, WeftError

FIGURES: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "output tokens/s": lambda summary: summary["output_tokens_per_s"],
    "TTFT p50 ms": lambda summary: summary["ttft_ms"]["p50"],
    "TPOT p50 ms": lambda summary: summary["tpot_ms"]["p50"],
}
"""What is compared, from a summary of a run."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A server and the names that it has for the models."""

    name: str
    url: str
    key: str
    models: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit status."""
    options = _parser().parse_args(arguments)

    def work() -> int:
        with target(options):
            result = asyncio.run(measure(options))
        if options.json:
            write_result(options.json, result)
        print_result(result)
        return 1 if any(run["errors"] for run in result["errors"].values()) else 0

    return exit_status("compare", work)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Send the load to both in turns.

    Raises:
        ConfigError: The options contradict each other.
        WeftError: A request of the round that is not counted failed.
    """
    contenders = make_contenders(options)
    plan, settings = load.make_plan(options), load.make_settings(options)
    runs: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
    for round_ in range(options.repeats + 1):
        for contender in contenders if round_ % 2 else reversed(contenders):
            headers = {"Authorization": f"Bearer {contender.key}"} if contender.key else {}
            # Other prompts in each round: a repeated one measures prefix caches.
            fresh = replace(settings, seed=options.seed + round_)
            async with EventClient(contender.url, headers) as client:
                records = await run_load(client, translate(plan, contenders[0].models, contender.models), fresh)
            summary = summarise(records, Objective())
            failed = next((record.error for record in records if record.error), None)
            if not round_ and failed:
                raise WeftError(f"{contender.name} does not answer as asked: {failed}")
            print(f"round {round_} {contender.name}: {summary['output_tokens_per_s']:.1f} tok/s", file=sys.stderr)
            if round_:
                runs[contender.name].append(summary)
    return make_result(options, contenders, runs)


def make_contenders(options: argparse.Namespace) -> list[Contender]:
    """Weft and its peer.

    Raises:
        ConfigError: Their models are not equally many, or both have one name.
    """
    ours, theirs = ([name for name in names.split(",") if name] for names in (options.models, options.peer_models))
    if len(ours) != len(theirs):
        raise ConfigError(
            f"--peer-models names {len(theirs)} models, Weft has {len(ours)} ({', '.join(ours)}): name as many, in the "
            "same order",
            param="peer_models",
        )
    if options.peer_name == "Weft":
        raise ConfigError("--peer-name must not be Weft", param="peer_name")
    return [
        Contender("Weft", options.url, options.key, ours),
        Contender(options.peer_name, options.peer, options.peer_key, theirs),
    ]


def translate(plan: Sequence[PlannedRequest], ours: Sequence[str], theirs: Sequence[str]) -> list[PlannedRequest]:
    """The same requests for a server with other names."""
    names = dict(zip(ours, theirs, strict=True))
    return [replace(request, model=names[request.model]) for request in plan]


def make_result(
    options: argparse.Namespace, contenders: Sequence[Contender], runs: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Spreads of each, and ratios of Weft over the peer within rounds."""
    found = {
        name: {figure: [_number(read(run)) for run in each] for figure, read in FIGURES.items()}
        for name, each in runs.items()
    }
    ours, theirs = (found[contender.name] for contender in contenders)
    facts = provenance()
    for key in (options.key, options.peer_key):
        facts = without_key(facts, key)
    return {
        "benchmark": "compare",
        **facts,
        "options": shown_options(options),
        "figures": {name: {figure: spread(values) for figure, values in each.items()} for name, each in found.items()},
        "ratios": {
            figure: spread([_ratio(one, two) for one, two in zip(ours[figure], theirs[figure], strict=True)])
            for figure in FIGURES
        },
        "errors": {name: {"errors": sum(run["errors"] for run in each)} for name, each in runs.items()},
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # no answer of a round came


def _ratio(one: float, two: float) -> float:
    return one / two if two else math.nan


def print_result(result: dict[str, Any]) -> None:
    """A table for people, then one JSON line for machines."""
    table = Table(title="medians of rounds", title_justify="left")
    table.add_column("")
    names = list(result["figures"])
    for column in (*names, f"{names[0]} / {names[1]}", "from", "to"):
        table.add_column(column, justify="right")
    for figure, ratio in result["ratios"].items():
        medians = (f"{result['figures'][name][figure]['median']:,.1f}" for name in names)
        table.add_row(figure, *medians, *(f"{ratio[key]:.2f}" for key in ("median", "min", "max")))
    Console().print(table)
    for name, run in result["errors"].items():
        if run["errors"]:
            print(f"{name}: {run['errors']} requests failed or were answered wrongly")
    print(json.dumps(without_nan(result)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peer", required=True, help="base URL with /v1 of the other server")
    add("--peer-models", required=True, help="its names for the same models, comma-separated, the base first")
    add("--peer-key", default="", help="its API key")
    add("--peer-name", default="peer", help="what to call it")
    add("--peer-about", default="", help="its version and how it was started, for the result")
    add("--repeats", type=positive, default=3, help="rounds that count")
    add_server_options(parser)
    load.add_load_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
