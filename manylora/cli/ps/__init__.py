"""`manylora ps`: what is in the running engine's memory, or which servers there are behind a gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manylora.cli.options import JSON, KEY, SERVER, URL, connect
from manylora.cli.ps.tables import PLACES, PLACES_NUMBERS, adapter_name, blocks
from manylora.cli.table import show, table_lines
from manylora.errors import ClientError

if TYPE_CHECKING:
    from manylora.client import Client

Watch = Annotated[bool, typer.Option("--watch", help="Show the state again and again.")]
Interval = Annotated[
    float, typer.Option("--interval", min=0.1, help="With --watch: seconds between two states.")
]


def ps(
    url: URL = None,
    key: KEY = None,
    as_json: JSON = False,
    server: SERVER = None,
    is_watching: Watch = False,
    interval: Interval = 1.0,
) -> None:
    """List the adapters in memory, the tenants with requests, and what the memory pages hold; needs the admin key.

    PREFIX counts pages of KV cache that were computed with the adapter, HOLDS the waiting requests for it, HITS the
    requests that have run with it since it came into memory. DUE is the share of the service that a tenant's weight
    gives, SERVED its share of the last seconds, WAIT the time that a new request is predicted to wait.

    A gateway lists its servers, and on which of them adapters are. BACKLOG is the work that waits at a replica, IN
    FLIGHT counts the requests that this gateway sent there.

    With --watch the busiest adapters and tenants that fit are shown until Ctrl-C (SIGINT), which ends with status 0.
    Where the output is no terminal, each state is printed whole.
    """
    client = connect(url, key)
    if is_watching:
        if as_json:
            raise typer.BadParameter("--json prints one state. Leave out --watch.")
        from manylora.cli.ps.watch import watch

        watch(client, server, interval)
        return
    body = client.state(server)
    if as_json:
        show(body, True, ())
        return
    found = blocks(body)
    if "ready" not in body and (places := _places(client, body)):
        found.append(places)
    typer.echo("\n\n".join("\n".join(block) for block in found))


def _places(client: Client, body: Mapping[str, Any]) -> list[str]:
    """Make the table of where adapters are; a replica that does not say it is named on stderr."""
    places: list[tuple[str, ...]] = []
    for server in body["data"]:
        if server["role"] != "replica" or server["state"] != "ready":
            continue
        name = server["name"]
        try:
            residents = client.engine(name)["residents"]
        except ClientError as error:
            typer.echo(f"manylora: {name}: {error.message}", err=True)
            continue
        places.extend(
            (adapter_name(each), name, each["tier"], f"{each['running']:,}", f"{each['holds']:,}")
            for each in residents
        )
    return list(table_lines([PLACES, *sorted(places)], PLACES_NUMBERS)) if places else []
