"""`weft bench`: each benchmark as a command with its own options."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import typer

BENCHMARKS = {
    "kernels": ("kernels", "Time each operation against what the machine can do."),
    "step": ("step", "Time decode steps and prompts against their floor, part by part."),
    "overhead": ("overhead", "Time what planning, processes and HTTP add to a step."),
    "serve": ("serve", "Start a server and load it over HTTP."),
    "compare": ("compare", "Load Weft and another OpenAI-compatible server in turns."),
    "fairness": ("fairness", "Ask quietly while another tenant floods the server."),
    "overload": ("overload", "Send more requests than the server can answer."),
    "batching": ("batching", "Compare static, windowed and continuous batching."),
    "offline": ("offline", "Compare with transformers and PEFT in one process."),
    "floor": ("floor", "Time the linear layers alone."),
    "adapters": ("adapter_count", "Serve from 5 to 2,000 adapters with room for 20."),
    "adapters-http": ("adapters_http", "Ask a server for 5 to 2,000 adapters, popular and rare ones."),
    "cliff": ("cliff", "Serve more adapters than fit."),
    "unified": ("unified", "Compare one pool with two halves."),
    "stall": ("step_stall", "Time steps while adapters load."),
    "batches": ("batch_lane", "Time interactive requests alone and beside a batch."),
    "waste": ("page_waste", "Print how much of their pages adapters leave empty."),
}
"""Module and help by command, in the order of the help."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    bench = typer.Typer(help="Measure: each command prints a table and a JSON line.", no_args_is_help=True)
    for name, (module, about) in BENCHMARKS.items():
        bench.command(
            name,
            help=about,
            add_help_option=False,  # each has its own
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_runner(module))
    app.add_typer(bench, name="bench")


def _runner(module: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        raise typer.Exit(importlib.import_module(f"weft.benchmarks.{module}").main(context.args))

    return run
