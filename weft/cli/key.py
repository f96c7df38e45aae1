"""`weft key`."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from weft.cli.client import DEFAULT_URL, JSON, KEY, LIMIT, URL, call, limits_of, show

COLUMNS = ("id", "tenant", "name", "prefix", "scopes", "limits", "expires_at", "created_at")
app = typer.Typer(help="Make, list and revoke API keys; needs the admin key.", no_args_is_help=True)


@app.command()
def create(  # noqa: PLR0913 - one parameter per option
    tenant: str,
    name: Annotated[str | None, typer.Option(help="What the key is for.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="infer, adapters or usage; repeat. [default: all]")] = None,
    expires_at: Annotated[str | None, typer.Option(help="ISO-8601 with an offset.")] = None,
    limit: LIMIT = None,
    url: URL = DEFAULT_URL,
    key: KEY = None,
    as_json: JSON = False,
) -> None:
    """Make a key and print its secret, this once."""
    body = {"name": name, "scopes": scope or None, "expires_at": expires_at, "limits": limits_of(limit or ())}
    made = call(url, key, "POST", f"/v1/tenants/{quote(tenant, safe='')}/keys", json=body)
    show(made, as_json, (*COLUMNS[:3], "scopes", "limits", "expires_at", "key"))


@app.command("ls")
def list_keys(tenant: str, url: URL = DEFAULT_URL, key: KEY = None, as_json: JSON = False) -> None:
    """List a tenant's keys."""
    show(call(url, key, "GET", f"/v1/tenants/{quote(tenant, safe='')}/keys"), as_json, COLUMNS)


@app.command()
def rotate(
    key_id: str,
    grace_s: Annotated[int, typer.Option(help="Seconds for which the old key goes on working.")] = 0,
    url: URL = DEFAULT_URL,
    key: KEY = None,
    as_json: JSON = False,
) -> None:
    """Make a key like this one, which itself stops working; print the new secret, this once."""
    made = call(url, key, "POST", f"/v1/keys/{quote(key_id, safe='')}/rotate", json={"grace_s": grace_s})
    show(made, as_json, (*COLUMNS[:3], "scopes", "expires_at", "key"))


@app.command()
def revoke(key_id: str, url: URL = DEFAULT_URL, key: KEY = None) -> None:
    """Make a key useless, at once."""
    call(url, key, "DELETE", f"/v1/keys/{quote(key_id, safe='')}")
    typer.echo(f"revoked {key_id}")
