"""The `manylora` command. Each command is a module of `manylora.cli`. Nothing heavy is imported here."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import manylora
from manylora.cli.options import fail_with
from manylora.errors import ManyloraError

COMMANDS = (
    "serve",
    "cluster",
    "demo",
    "doctor",
    "adapter",
    "fit",
    "quantize",
    "ps",
    "tenant",
    "key",
    "usage",
    "audit",
    "config",
    "dashboard",
    "db",
)
"""Modules in the order of the help. Each has `app`, a group of commands, or a function with the module's name."""


class _Commands(TyperGroup):
    """Group of all commands. A deliberate error of a command becomes one line on stderr."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - the type of typer is private
        try:
            return super().invoke(ctx)
        except ManyloraError as error:
            fail_with(error)


def version() -> None:
    """Print Manylora's version."""
    typer.echo(f"manylora {manylora.__version__}")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


def _root(
    _: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of `manylora` itself."""


def make_app() -> typer.Typer:
    """Make the app with all commands."""
    from manylora.benchmarks.command import app as bench
    from manylora.cli.key import whoami

    app = typer.Typer(
        name="manylora",
        cls=_Commands,
        help="Serve thousands of LoRA adapters over one shared base model.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in COMMANDS:
        module = importlib.import_module(f"manylora.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))
    app.callback()(_root)
    app.command()(whoami)
    app.command()(version)
    app.add_typer(bench, name="bench")
    return app


def main() -> None:
    """Run the command line. Wrong input exits with 2, a failure with 1."""
    make_app()()
