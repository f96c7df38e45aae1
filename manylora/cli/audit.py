"""`manylora audit`."""

from __future__ import annotations

from typing import Annotated

import typer

from manylora.cli.options import JSON, KEY, URL, connect
from manylora.cli.table import show

Tenant = Annotated[
    str | None, typer.Option(help="Only changes of this tenant, its keys and its adapters.")
]
Most = Annotated[int, typer.Option(help="Most entries.", min=1, max=1000)]


def audit(
    tenant: Tenant = None, limit: Most = 50, url: URL = None, key: KEY = None, as_json: JSON = False
) -> None:
    """Show the last changes and their authors, newest first. Needs the admin key."""
    show(
        connect(url, key, tenant).audit(limit),
        as_json,
        ("at", "actor", "action", "tenant", "target", "detail"),
    )
