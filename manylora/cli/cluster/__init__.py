"""`manylora cluster`: a gateway and replicas, on this machine or kept by Ray."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from manylora.cli.config import GivenSettings, settings_command

app = typer.Typer(help="Run a gateway and replicas over one registry.", no_args_is_help=True)


@app.command()
@settings_command(
    model="model.path",
    port="server.port",
    data_dir="server.data_dir",
    database_url="registry.database_url",
    memory_gib="memory.gib",
)
def up(
    given: GivenSettings,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas to start.")] = 2,
    on_ray: Annotated[
        bool, typer.Option("--ray", help="Let Ray place, restart and scale the replicas.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="Of a running Ray cluster, or auto. [default: starts one]")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Most replicas, which Ray starts under load.")
    ] = None,
) -> None:
    """Start a gateway and replicas, with one part each of this machine's cores; Ctrl-C drains them."""
    from manylora.launch.up import up as run

    if not on_ray and (address or max_replicas):
        raise typer.BadParameter("--address and --max-replicas go with --ray.")
    plan: dict[str, object] = {"address": address, "max_replicas": max_replicas}
    run(given.load(), replicas, plan if on_ray else None, typer.echo)


@app.command("ray", hidden=True)
def keep_on_ray(plan: str) -> None:
    """Have Ray keep the replicas of a plan in JSON, with the settings of the environment."""
    from manylora.launch.ray_serve import keep

    keep(json.loads(plan), typer.echo)
