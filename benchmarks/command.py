"""`manylora bench`: each benchmark as a command."""

from __future__ import annotations

import signal
import sys

import typer

from manylora.benchmarks.main import BENCHMARKS, main

app = typer.Typer(
    help="Measure: each command prints a table and a JSON line.", no_args_is_help=True
)


def run(context: typer.Context) -> None:
    """Hand all options on to the benchmark of this name, which has its own help."""
    signal.signal(signal.SIGTERM, _end)
    raise typer.Exit(main(str(context.info_name), context.args))


def _end(number: int, _: object) -> None:
    """End by a signal as by an error, so that a benchmark's server ends and its files are removed."""
    sys.exit(128 + number)


for name, (_, about) in BENCHMARKS.items():
    options = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, help=about, add_help_option=False, context_settings=options)(run)
