"""`manylora tenant`."""

from __future__ import annotations

from typing import Annotated

import typer

from manylora.cli.options import LIMIT, ServerCall, admin_command, limits_of

COLUMNS = ("name", "id", "limits", "weight", "created_at")
WEIGHT = Annotated[
    float | None,
    typer.Option(help="Share of the engine beside other tenants, 0.01 to 100. [default: 1]"),
]
LIMITS = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME=NUMBER...", help="As adapters=50; adapters=none removes the limit."
    ),
]
NEW_WEIGHT = Annotated[float, typer.Argument(help="0.01 to 100; 1 is usual.")]
app = typer.Typer(
    help="Create, list, change and delete tenants; needs the admin key.", no_args_is_help=True
)


@app.command()
@admin_command
def create(call: ServerCall, name: str, limit: LIMIT = None, weight: WEIGHT = None) -> None:
    """Create a tenant. A limit that is not given has the server's default; NAME=none is no limit."""
    call.show(call.client.create_tenant(name, limits_of(limit or ()), weight), COLUMNS)


@app.command("limit")
@admin_command
def limit_tenant(call: ServerCall, name: str, limits: LIMITS) -> None:
    """Set some of a tenant's limits, in force at once. The others stay."""
    call.show(call.client.set_limits(name, limits_of(limits)), COLUMNS)


@app.command("weight")
@admin_command
def weigh_tenant(call: ServerCall, name: str, weight: NEW_WEIGHT) -> None:
    """Set a tenant's weight, in force at once. A tenant with weight 3 gets three times as much as one with 1."""
    call.show(call.client.update_tenant(name, weight=weight), COLUMNS)


@app.command("ls")
@admin_command
def list_tenants(call: ServerCall) -> None:
    """List tenants."""
    call.show(call.client.list_tenants(), COLUMNS)


@app.command("show")
@admin_command
def show_tenant(call: ServerCall, name: str) -> None:
    """Show one tenant."""
    call.show(call.client.get_tenant(name), COLUMNS)


@app.command("rm")
@admin_command
def remove(call: ServerCall, name: str) -> None:
    """Delete a tenant with its keys and adapters. Its usage stays."""
    call.client.delete_tenant(name)
    call.tell(f"deleted {name}")
