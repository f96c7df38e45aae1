"""`weft tenant`."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from weft.cli.client import DEFAULT_URL, JSON, KEY, LIMIT, URL, call, limits_of, show

COLUMNS = ("name", "id", "limits", "weight", "created_at")
WEIGHT = Annotated[float | None, typer.Option(help="Part of the engine beside other tenants, 0.01 to 100; default 1.")]
app = typer.Typer(help="Make, list and remove tenants; needs the admin key.", no_args_is_help=True)


@app.command()
def create(
    name: str,
    limit: LIMIT = None,
    weight: WEIGHT = None,
    url: URL = DEFAULT_URL,
    key: KEY = None,
    as_json: JSON = False,
) -> None:
    """Make a tenant. Limits that are not given are the server's defaults; NAME=none is no limit."""
    body: dict[str, object] = {"name": name, "limits": limits_of(limit or ())}
    if weight is not None:
        body["weight"] = weight
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


@app.command("weight")
def weigh_tenant(
    name: str,
    weight: Annotated[float, typer.Argument(help="0.01 to 100; 1 is usual.")],
    url: URL = DEFAULT_URL,
    key: KEY = None,
    as_json: JSON = False,
) -> None:
    """Set a tenant's weight: its part of the engine beside other tenants, in force at once."""
    path = f"/v1/tenants/{quote(name, safe='')}"
    show(call(url, key, "PATCH", path, json={"weight": weight}), as_json, COLUMNS)


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
