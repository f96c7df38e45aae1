"""`manylora audit`."""

from __future__ import annotations

from typing import Annotated

import typer

from manylora.cli.options import ServerCall, tenant_command

COLUMNS = ("at", "actor", "action", "tenant", "target", "detail")
Most = Annotated[int, typer.Option(help="Most entries.", min=1, max=1000)]


@tenant_command
def audit(call: ServerCall, limit: Most = 50) -> None:
    """Show the last changes and their authors, newest first; with --tenant, of this tenant. Needs the admin key."""
    call.show(call.client.audit(limit), COLUMNS)
