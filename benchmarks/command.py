"""`weft bench`: each benchmark as a command."""

from __future__ import annotations

import typer

from weft.benchmarks.main import BENCHMARKS, main


def register(app: typer.Typer) -> None:
    """Add the commands."""
    bench = typer.Typer(help="Measure: each command prints a table and a JSON line.", no_args_is_help=True)

    def run(context: typer.Context) -> None:
        raise typer.Exit(main(str(context.info_name), context.args))

    for name, (_, about) in BENCHMARKS.items():
        bench.command(
            name,
            help=about,
            add_help_option=False,  # each has its own
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(run)
    app.add_typer(bench, name="bench")
