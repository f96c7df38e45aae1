"""`weft tenant`."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from weft.server.commands.client import DEFAULT_URL, JSON, KEY, LIMIT, URL, call, limits_of, show

COLUMNS = ("name", "id", "limits", "created_at")
app = typer.Typer(help="Make, list and remove tenants; needs the admin key.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Add the commands."""
    parent.add_typer(app, name="tenant")


@app.command()
def create(name: str, limit: LIMIT = None, url: URL = DEFAULT_URL, key: KEY = None, as_json: JSON = False) -> None:
    """Make a tenant."""
    body = {"name": name, "limits": limits_of(limit or ())}
    show(call(url, key, "POST", "/v1/tenants", json=body), as_json, COLUMNS)


@app.command("limit")
def limit_tenant(
    name: str,
    limits: Annotated[list[str], typer.Argument(metavar="NAME=NUMBER...", help="none takes a limit away.")],
    url: URL = DEFAULT_URL,
    key: KEY = None,
    as_json: JSON = False,
) -> None:
    """Set some of a tenant's limits, in force at once; the others stay."""
    path = f"/v1/tenants/{quote(name, safe='')}"
    given = limits_of(limits)
    merged = {**call(url, key, "GET", path)["limits"], **given}
    show(call(url, key, "PATCH", path, json={"limits": merged}), as_json, COLUMNS)


@app.command("ls")
def list_tenants(url: URL = DEFAULT_URL, key: KEY = None, as_json: JSON = False) -> None:
    """List tenants."""
    show(call(url, key, "GET", "/v1/tenants", params={"limit": 1000}), as_json, COLUMNS)


@app.command("show")
def show_tenant(name: str, url: URL = DEFAULT_URL, key: KEY = None, as_json: JSON = False) -> None:
    """Show one tenant."""
    show(call(url, key, "GET", f"/v1/tenants/{quote(name, safe='')}"), as_json, COLUMNS)


@app.command("rm")
def remove(name: str, url: URL = DEFAULT_URL, key: KEY = None) -> None:
    """Delete a tenant with its keys and adapters; its usage stays."""
    call(url, key, "DELETE", f"/v1/tenants/{quote(name, safe='')}")
    typer.echo(f"deleted {name}")
