"""Benchmarks by name, and the way they are run. `python -m manylora.benchmarks.main NAME` needs no typer.

The module of a benchmark says in its docstring what it asks and how, has its own options (`OPTIONS`) and measures what
they ask for (`measure`). All else is the same for all of them and stands in `report.py`. One with `run` instead reads
its own arguments, writes its own results and returns the exit status.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

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


def main(name: str, arguments: Sequence[str]) -> int:
    """Run a benchmark; returns the exit status."""
    module = importlib.import_module(f"manylora.benchmarks.{BENCHMARKS[name][0]}")
    if not hasattr(module, "run"):
        # The command line lists the benchmarks without what prints tables.
        from manylora.benchmarks.report import tell

        about = module.__doc__
        return tell(f"manylora bench {name}", about, module.OPTIONS, module.measure, arguments)
    try:
        return int(module.run(arguments))
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
