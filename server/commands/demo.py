"""`weft demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Once = Annotated[bool, typer.Option("--once", help="Exit after the answers.")]
Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port to listen on; 8000, or a free one if that is in use.")
]
DataDir = Annotated[Path, typer.Option(help="Folder of the demo's database, adapters and log.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(once: Once = False, port: Port = None, data_dir: DataDir = Path("weft-demo")) -> None:
    """Show a base model and five adapters answering one question in one batch, then keep serving."""
    from weft.server.demo_run import run_demo

    raise typer.Exit(run_demo(once=once, port=port, data_dir=data_dir))
