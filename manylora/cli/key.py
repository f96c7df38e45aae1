"""`manylora key`, and `manylora whoami`."""

from __future__ import annotations

from typing import Annotated

import typer

from manylora.cli.options import (
    LIMIT,
    ServerCall,
    admin_command,
    limits_of,
    tenant_command,
)
from manylora.cli.table import print_table

COLUMNS = ("id", "tenant", "name", "prefix", "scopes", "limits", "expires_at", "created_at")
Scopes = Annotated[
    list[str] | None, typer.Option(help="infer, adapters or usage; repeat for more. [default: all]")
]
Expiry = Annotated[
    str | None,
    typer.Option(help="When it stops working, as 2027-01-01T00:00:00Z. [default: never]"),
]
Grace = Annotated[int, typer.Option("--grace-s", help="Seconds that the old key still works.")]
app = typer.Typer(
    help="Create, list, rotate and revoke API keys; needs the admin key.", no_args_is_help=True
)


@app.command()
@admin_command
def create(
    call: ServerCall,
    tenant: str,
    name: Annotated[str | None, typer.Option(help="What the key is for.")] = None,
    scope: Scopes = None,
    expires_at: Expiry = None,
    limit: LIMIT = None,
) -> None:
    """Create a key and print its secret, which is never shown again."""
    fields = {
        "name": name,
        "scopes": scope or None,
        "expires_at": expires_at,
        "limits": limits_of(limit or ()),
    }
    made = call.client.create_key(tenant, **fields)
    call.show(made, (*COLUMNS[:3], "scopes", "limits", "expires_at", "key"))


@app.command("ls")
@admin_command
def list_keys(call: ServerCall, tenant: str) -> None:
    """List a tenant's keys."""
    call.show(call.client.list_keys(tenant), COLUMNS)


@app.command()
@admin_command
def rotate(call: ServerCall, key_id: str, grace_s: Grace = 0) -> None:
    """Replace a key by a new one with the same rights, and print its secret, which is never shown again."""
    made = call.client.rotate_key(key_id, grace_s)
    call.show(made, (*COLUMNS[:3], "scopes", "expires_at", "key"))


@app.command()
@admin_command
def revoke(call: ServerCall, key_id: str) -> None:
    """Make a key invalid at once."""
    call.client.revoke_key(key_id)
    call.tell(f"revoked {key_id}")


@tenant_command
def whoami(call: ServerCall) -> None:
    """Show the tenant and the rights of the key, its limits, and their use."""
    me = call.client.me()
    if call.as_json:
        call.show(me, ())
        return
    own = me.get("key") or {}
    owner = me.get("tenant") or {}
    facts = {
        **own,
        "role": me.get("role"),
        "tenant": owner.get("name"),
        "tenant_id": owner.get("id"),
        "key": own.get("id"),
    }
    call.show(facts, ("role", "tenant", "tenant_id", "key", "name", "scopes", "expires_at"))
    rows = [
        (holder, name, str(used), str(me["limits"][holder].get(name, "-")))
        for holder, counts in me.get("used", {}).items()
        for name, used in counts.items()
    ]
    if rows:
        typer.echo("")
        print_table([("LIMIT OF", "LIMIT", "USED", "ALLOWED"), *rows], ("USED", "ALLOWED"))
