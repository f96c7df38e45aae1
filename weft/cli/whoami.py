"""`weft whoami`."""

from __future__ import annotations

import typer

from weft.cli.options import JSON, KEY, TENANT, URL, connect
from weft.cli.table import print_table, show


def whoami(tenant: TENANT = None, url: URL = None, key: KEY = None, as_json: JSON = False) -> None:
    """Show the tenant and the rights of the key, its limits, and how much of them is used."""
    me = connect(url, key, tenant).me()
    if as_json:
        show(me, True, ())
        return
    own, owner = me.get("key") or {}, me.get("tenant") or {}
    facts = {"role": me.get("role"), "tenant": owner.get("name"), "tenant_id": owner.get("id"), "key": own.get("id")}
    facts |= {name: own.get(name) for name in ("name", "scopes", "expires_at")}
    show(facts, False, list(facts))
    rows = [
        (holder, name, str(used), str(me["limits"][holder].get(name, "-")))
        for holder, counts in me.get("used", {}).items()
        for name, used in counts.items()
    ]
    if rows:
        typer.echo("")
        print_table([("LIMIT OF", "LIMIT", "USED", "ALLOWED"), *rows], ("USED", "ALLOWED"))
