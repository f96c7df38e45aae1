"""`weft version`."""

from __future__ import annotations

import typer

import weft


def version() -> None:
    """Print Weft's version."""
    typer.echo(f"weft {weft.__version__}")
