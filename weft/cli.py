"""The `weft` command. Each module of `weft.server.commands` registers itself; nothing heavy is imported here."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import typer

from weft.errors import ConfigError, WeftError

USAGE_ERROR = 2
FAILURE = 1
FIRST = ("serve", "demo", "doctor", "adapter", "fit", "ps", "top", "tenant", "key", "usage")
"""Order of the commands in the help; others follow by name."""


def make_app() -> typer.Typer:
    """All commands."""
    from weft.benchmarks import command as bench
    from weft.server import commands

    app = typer.Typer(
        name="weft",
        help="Serve thousands of LoRA adapters over one shared base model.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    for name in sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)):
        register = getattr(importlib.import_module(f"{commands.__name__}.{name}"), "register", None)
        if register is not None:
            register(app)
    bench.register(app)
    return app


def main() -> None:
    """Run the command line; wrong input exits with 2, failures with 1."""
    try:
        make_app()()
    except ConfigError as error:
        sys.exit(_say(error, USAGE_ERROR))
    except WeftError as error:
        sys.exit(_say(error, FAILURE))


def _say(error: WeftError, code: int) -> int:
    sys.stderr.write(f"weft: {error.message}\n")
    return code


if __name__ == "__main__":
    main()
