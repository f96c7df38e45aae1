"""The servers behind a gateway, as `weft ps` and `weft top` show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.table import seconds_text
from weft.errors import ClientError

if TYPE_CHECKING:
    from weft.client import Client

SERVER = Annotated[str | None, typer.Option("--server", help="Behind a gateway: the replica whose engine is shown.")]
HEADER = ("SERVER", "ROLE", "STATE", "URL", "RUNNING", "WAITING", "BACKLOG", "IN FLIGHT", "DEVICE", "HOST")
NUMBERS = HEADER[4:]


def server_rows(body: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Gateways first; of a replica that the gateway does not reach, no figures.

    IN FLIGHT counts requests that this gateway has sent and that have not ended, DEVICE and HOST adapters by tier.
    """
    for each in sorted(body["data"], key=lambda server: (server["role"], server["name"])):
        place = each["name"], each["role"], each["state"], each["url"]
        if "running" not in each:
            yield *place, *("-" for _ in NUMBERS)
            continue
        counts = each["in_flight"], each["adapters"]["device"], each["adapters"]["host"]
        load = f"{each['running']:,}", f"{each['waiting']:,}", seconds_text(each["backlog_s"])
        yield *place, *load, *(f"{count:,}" for count in counts)


def servers_line(body: Mapping[str, Any]) -> str:
    """All of them in one line."""
    replicas = [each for each in body["data"] if each["role"] == "replica"]
    sums = Counter[str]()
    for each in replicas:
        sums.update(ready=each["state"] == "ready", running=each.get("running", 0), waiting=each.get("waiting", 0))
    longest = seconds_text(max((each["backlog_s"] for each in replicas if "running" in each), default=None))
    ready = f"{sums['ready']:,} of {len(replicas):,} replicas ready, {len(body['data']) - len(replicas):,} gateways"
    return f"{ready}; {sums['running']:,} running, {sums['waiting']:,} waiting, longest backlog {longest}"


def residents_of(client: Client, body: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The adapters in memory of each replica that is ready, by its name; one that does not answer is told on stderr."""
    found = {}
    for name in (each["name"] for each in body["data"] if each["role"] == "replica" and each["state"] == "ready"):
        try:
            found[name] = client.engine(name)["residents"]
        except ClientError as error:
            typer.echo(f"weft: {name}: {error.message}", err=True)
    return found
