"""The servers behind a gateway, as `weft ps` and `weft top` show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from weft.cli.table import seconds_text

SERVER = Annotated[str | None, typer.Option("--server", help="Behind a gateway: the replica whose engine is shown.")]
LOADS = ("RUNNING", "WAITING", "BACKLOG", "IN FLIGHT", "DEVICE", "HOST")
SERVERS = ("SERVER", "ROLE", "STATE", *LOADS, "URL")


def server_rows(body: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Gateways first; of a replica that the gateway does not reach, no figures.

    IN FLIGHT counts requests that this gateway has sent and that have not ended, DEVICE and HOST adapters by tier.
    """
    for each in sorted(body["data"], key=lambda server: (server["role"], server["name"])):
        load: tuple[str, ...] = ("-",) * len(LOADS)
        if "running" in each:
            counts = each["in_flight"], each["adapters"]["device"], each["adapters"]["host"]
            backlog = seconds_text(each["backlog_s"])
            load = f"{each['running']:,}", f"{each['waiting']:,}", backlog, *(f"{count:,}" for count in counts)
        yield each["name"], each["role"], each["state"], *load, each["url"]


def servers_line(body: Mapping[str, Any]) -> str:
    """All of them in one line."""
    replicas = [each for each in body["data"] if each["role"] == "replica"]
    sums = Counter[str]()
    for each in replicas:
        sums.update(ready=each["state"] == "ready", running=each.get("running", 0), waiting=each.get("waiting", 0))
    longest = seconds_text(max((each["backlog_s"] for each in replicas if "running" in each), default=None))
    ready = f"{sums['ready']:,} of {len(replicas):,} replicas ready, {len(body['data']) - len(replicas):,} gateways"
    return f"{ready}; {sums['running']:,} running, {sums['waiting']:,} waiting, longest backlog {longest}"
