"""`manylora tenant`."""

from __future__ import annotations

from typing import Annotated

import typer

from manylora.cli.options import JSON, KEY, LIMIT, URL, connect, limits_of
from manylora.cli.table import show

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
def create(
    name: str,
    limit: LIMIT = None,
    weight: WEIGHT = None,
    url: URL = None,
    key: KEY = None,
    as_json: JSON = False,
) -> None:
    """Create a tenant. A limit that is not given has the server's default; NAME=none is no limit."""
    show(connect(url, key).create_tenant(name, limits_of(limit or ()), weight), as_json, COLUMNS)


@app.command("limit")
def limit_tenant(
    name: str, limits: LIMITS, url: URL = None, key: KEY = None, as_json: JSON = False
) -> None:
    """Set some of a tenant's limits, in force at once. The others stay."""
    show(connect(url, key).set_limits(name, limits_of(limits)), as_json, COLUMNS)


@app.command("weight")
def weigh_tenant(
    name: str, weight: NEW_WEIGHT, url: URL = None, key: KEY = None, as_json: JSON = False
) -> None:
    """Set a tenant's weight, in force at once. A tenant with weight 3 gets three times as much as one with 1."""
    show(connect(url, key).update_tenant(name, weight=weight), as_json, COLUMNS)


@app.command("ls")
def list_tenants(url: URL = None, key: KEY = None, as_json: JSON = False) -> None:
    """List tenants."""
    show(connect(url, key).list_tenants(), as_json, COLUMNS)


@app.command("show")
def show_tenant(name: str, url: URL = None, key: KEY = None, as_json: JSON = False) -> None:
    """Show one tenant."""
    show(connect(url, key).get_tenant(name), as_json, COLUMNS)


@app.command("rm")
def remove(name: str, url: URL = None, key: KEY = None) -> None:
    """Delete a tenant with its keys and adapters. Its usage stays."""
    connect(url, key).delete_tenant(name)
    typer.echo(f"deleted {name}")
