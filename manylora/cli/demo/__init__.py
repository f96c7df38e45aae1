"""`manylora demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Once = Annotated[bool, typer.Option("--once", help="Exit after the answers.")]
NoTraffic = Annotated[bool, typer.Option("--no-traffic", help="Send no traffic after the answers.")]
Port = Annotated[
    int | None,
    typer.Option(
        min=1, max=65535, help="Port to listen on; 8000, or a free one if that is in use."
    ),
]
FOLDER = Path("manylora-demo")
Dir = Annotated[Path, typer.Option(help="Folder of the demo's database, adapters and log.")]


def demo(
    once: Once = False,
    no_traffic: NoTraffic = False,
    port: Port = None,
    data_dir: Dir = FOLDER,
) -> None:
    """Show a base model and five adapters answering one question in one batch, then keep serving.

    A minute of traffic follows the answers and fills the charts of the dashboard.
    """
    from manylora.cli.demo.run import run_demo

    raise typer.Exit(run_demo(once=once, with_traffic=not no_traffic, port=port, data_dir=data_dir))
