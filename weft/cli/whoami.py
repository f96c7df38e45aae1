"""`weft whoami`."""

from __future__ import annotations

import typer

from weft.cli.client import DEFAULT_URL, JSON, KEY, TENANT, URL, call, show
from weft.cli.table import print_rows


def whoami(tenant: TENANT = None, url: URL = DEFAULT_URL, key: KEY = None, as_json: JSON = False) -> None:
    """Show whose key this is, what it may do, its limits and what is used of them."""
    me = call(url, key, "GET", "/v1/me", params={"tenant": tenant})
    if as_json:
        show(me, True, ())
        return
    own, owner = me.get("key") or {}, me.get("tenant") or {}
    facts = {"role": me.get("role"), "tenant": owner.get("name"), "tenant_id": owner.get("id"), "key": own.get("id")}
    facts |= {name: own.get(name) for name in ("name", "scopes", "expires_at")}
    show(facts, False, list(facts))
    rows = [
        [holder, name, str(used), str(me["limits"][holder].get(name, "-"))]
        for holder, counts in me.get("used", {}).items()
        for name, used in counts.items()
    ]
    if rows:
        typer.echo("")
        print_rows([["OF", "LIMIT", "USED", "MOST"], *rows], numbers=(2, 3))
