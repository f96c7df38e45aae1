"""Benchmarks by name, and the way they are run. `python -m manylora.benchmarks.main NAME` needs no typer.

The module of a benchmark says in its docstring what it asks and how, adds its own options (`add_options`, if it has
any) and measures what they ask for (`measure`). All else is the same for all of them and stands here and in
`report.py`. One with `run` instead writes its own results and returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError

BENCHMARKS = {
    "step": ("engine.step", "Time decode steps and prompts against their floor, part by part."),
    "overhead": ("http.overhead", "Time what planning, processes and HTTP add to a step."),
    "serve": ("http.serve", "Start a server and load it over HTTP."),
    "compare": ("http.compare", "Load Manylora and another OpenAI-compatible server in turns."),
    "fairness": ("http.fairness", "Ask quietly while another tenant floods the server."),
    "overload": ("http.overload", "Send more requests than the server can answer."),
    "offline": ("engine.offline", "Compare with transformers and PEFT in one process."),
    "adapters-http": (
        "http.adapters_http",
        "Ask a server for 5 to 2,000 adapters, popular and rare ones.",
    ),
    "push": ("http.push", "Push versions as a trainer does, and time their first tokens."),
    "gateway": ("http.gateway", "Ask two replicas directly and through a gateway."),
    "batches": ("http.batch_lane", "Time interactive requests alone and beside a batch."),
    "gpu": (
        "gpu.verbs",
        "Ask a GPU: is it right, how fast, and where does the time go? A CPU: how fast are its kernels?",
    ),
}
"""Module and help by command, in the order of the help."""


def make_parser(name: str) -> argparse.ArgumentParser:
    """The options of one benchmark, `--json` included."""
    module = _module(name)
    parser = argparse.ArgumentParser(
        prog=f"manylora bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if hasattr(module, "measure"):
        parser.add_argument("--json", type=Path, default=None, help="write the result here")
    if hasattr(module, "add_options"):
        module.add_options(parser.add_argument)
    return parser


def main(name: str, arguments: Sequence[str]) -> int:
    """Run a benchmark; returns the exit status."""
    from manylora.benchmarks.report import (
        tell,
    )  # the command line lists the benchmarks without what prints tables

    module = _module(name)
    options = make_parser(name).parse_args(arguments)
    if hasattr(module, "measure"):
        result_name = BENCHMARKS[name][0].rpartition(".")[2].replace("_", "-")
        return tell(result_name, options, module.measure)
    try:
        return int(module.run(options))
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def _module(name: str) -> Any:  # noqa: ANN401 - each has the same two functions
    return importlib.import_module(f"manylora.benchmarks.{BENCHMARKS[name][0]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
