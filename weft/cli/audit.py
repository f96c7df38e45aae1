"""`weft audit`."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.client import DEFAULT_URL, JSON, KEY, URL, call, show


def audit(
    tenant: Annotated[str | None, typer.Option(help="Only changes of this tenant's objects.")] = None,
    limit: Annotated[int, typer.Option(help="Most entries.", min=1, max=1000)] = 50,
    url: URL = DEFAULT_URL,
    key: KEY = None,
    as_json: JSON = False,
) -> None:
    """Show who changed what, newest first; needs the admin key."""
    page = call(url, key, "GET", "/v1/audit", params={"tenant": tenant, "limit": limit})
    show(page, as_json, ("at", "actor", "action", "tenant", "target", "detail"))
