"""`weft key`."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.options import JSON, KEY, LIMIT, URL, connect, limits_of
from weft.cli.table import show

COLUMNS = ("id", "tenant", "name", "prefix", "scopes", "limits", "expires_at", "created_at")
app = typer.Typer(help="Make, list and revoke API keys; needs the admin key.", no_args_is_help=True)


@app.command()
def create(  # noqa: PLR0913 - one parameter per option
    tenant: str,
    name: Annotated[str | None, typer.Option(help="What the key is for.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="infer, adapters or usage; repeat. [default: all]")] = None,
    expires_at: Annotated[str | None, typer.Option(help="ISO-8601 with an offset.")] = None,
    limit: LIMIT = None,
    url: URL = None,
    key: KEY = None,
    as_json: JSON = False,
) -> None:
    """Make a key and print its secret, this once."""
    fields = {"name": name, "scopes": scope or None, "expires_at": expires_at, "limits": limits_of(limit or ())}
    made = connect(url, key).create_key(tenant, **fields)
    show(made, as_json, (*COLUMNS[:3], "scopes", "limits", "expires_at", "key"))


@app.command("ls")
def list_keys(tenant: str, url: URL = None, key: KEY = None, as_json: JSON = False) -> None:
    """List a tenant's keys."""
    show(connect(url, key).list_keys(tenant), as_json, COLUMNS)


@app.command()
def rotate(
    key_id: str,
    grace_s: Annotated[int, typer.Option(help="Seconds for which the old key goes on working.")] = 0,
    url: URL = None,
    key: KEY = None,
    as_json: JSON = False,
) -> None:
    """Make a key like this one, which itself stops working; print the new secret, this once."""
    made = connect(url, key).rotate_key(key_id, grace_s)
    show(made, as_json, (*COLUMNS[:3], "scopes", "expires_at", "key"))


@app.command()
def revoke(key_id: str, url: URL = None, key: KEY = None) -> None:
    """Make a key useless, at once."""
    connect(url, key).revoke_key(key_id)
    typer.echo(f"revoked {key_id}")
