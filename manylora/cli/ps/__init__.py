"""`manylora ps`: what is in the running engine's memory, or which servers there are behind a gateway."""

from __future__ import annotations

from typing import Annotated

import typer

from manylora.cli.options import SERVER, ServerCall, admin_command, fail
from manylora.cli.ps.tables import blocks

Watch = Annotated[bool, typer.Option("--watch", help="Draw the state again and again.")]
Interval = Annotated[
    float, typer.Option("--interval", min=0.1, help="With --watch: seconds between two states.")
]


@admin_command
def ps(
    call: ServerCall, server: SERVER = None, is_watching: Watch = False, interval: Interval = 1.0
) -> None:
    """List the adapters in memory, the tenants with requests, and what the memory pages hold; needs the admin key.

    PREFIX counts pages of KV cache that were computed with the adapter, HOLDS the waiting requests for it, HITS the
    requests that have run with it since it came into memory. DUE is the share of the service that a tenant's weight
    gives, SERVED its share of the last seconds, WAIT the time that a new request is predicted to wait.

    A gateway lists its servers. BACKLOG is the work that waits at a replica, IN FLIGHT counts the requests that this
    gateway sent there; --server shows the engine of one replica.

    With --watch the busiest adapters and tenants that fit on the terminal are shown until Ctrl-C.
    """
    if is_watching:
        from rich.console import Console

        from manylora.cli.ps.watch import watch

        console = Console(highlight=False)
        if call.as_json or not console.is_terminal:
            fail("--watch draws on a terminal, without --json. Leave it out.")
        watch(console, call.client, server, interval)
        return
    body = call.client.state(server)
    call.tell("\n\n".join("\n".join(block) for block in blocks(body)), body)
