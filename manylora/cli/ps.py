"""`manylora ps`: the memory of the running engine, or the servers behind a gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from manylora.cli.options import JSON, KEY, SERVER, URL, connect
from manylora.cli.table import (
    LOADS,
    REASONS,
    SERVERS,
    counts_text,
    in_words,
    num_paused,
    print_table,
    server_rows,
    servers_line,
    show,
)
from manylora.errors import ClientError

if TYPE_CHECKING:
    from manylora.client import Client

HEADER = ("ADAPTER", "TIER", "PAGES", "PREFIX", "RUNNING", "HOLDS", "HITS", "PINNED")
PLACES = ("ADAPTER", "SERVER", "TIER", "RUNNING", "HOLDS")
NUMBERS = ("PAGES", "PREFIX", "RUNNING", "HOLDS", "HITS")
TIERS = ("device", "loading", "host")
SHORT_DIGEST = len("sha256:") + 12


def ps(url: URL = None, key: KEY = None, as_json: JSON = False, server: SERVER = None) -> None:
    """List the adapters in memory, and the content of the memory pages. Needs the admin key.

    PREFIX counts pages of KV cache that were computed with the adapter, HOLDS the waiting requests for it, HITS the
    requests that ran with it since it came into memory.

    A gateway lists its servers and the places of adapters. BACKLOG is the work that waits at a replica, IN FLIGHT
    counts the requests that this gateway sent there.
    """
    client = connect(url, key)
    servers = None if server else client.servers()
    body = client.engine(server) if servers is None else servers
    if as_json:
        show(body, True, ())
        return
    if servers is not None:
        _print_servers(client, servers)
        return
    residents = sorted(
        body["residents"],
        key=lambda resident: (TIERS.index(resident["tier"]), adapter_name(resident)),
    )
    if residents:
        print_table([HEADER, *(_row(resident) for resident in residents)], NUMBERS)
        typer.echo("")
    for line in _summary(body):
        typer.echo(line)


def _print_servers(client: Client, body: Mapping[str, Any]) -> None:
    """Print the servers and the places of adapters. A replica that does not answer is named on stderr."""
    print_table([SERVERS, *server_rows(body)], LOADS)
    typer.echo(f"\n{servers_line(body)}")
    places: list[tuple[str, ...]] = []
    for server in (
        each["name"]
        for each in body["data"]
        if each["role"] == "replica" and each["state"] == "ready"
    ):
        try:
            residents = client.engine(server)["residents"]
        except ClientError as error:
            typer.echo(f"manylora: {server}: {error.message}", err=True)
            continue
        places.extend(
            (adapter_name(each), server, each["tier"], f"{each['running']:,}", f"{each['holds']:,}")
            for each in residents
        )
    if places:
        typer.echo("")
        print_table([PLACES, *sorted(places)], NUMBERS)


def _row(resident: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (
        f"{resident[name]:,}" for name in ("pages", "prefix_pages", "running", "holds", "uses")
    )
    return adapter_name(resident), resident["tier"], *counts, "yes" if resident["pinned"] else ""


def adapter_name(resident: Mapping[str, Any]) -> str:
    """First name of an adapter, and the number of others with the same bytes; without a version, a short digest."""
    names = resident["adapters"]
    if not names:
        return str(resident["digest"])[:SHORT_DIGEST]
    return f"{names[0]} (+{len(names) - 1})" if len(names) > 1 else str(names[0])


def _summary(body: Mapping[str, Any]) -> list[str]:
    ready = body["ready"]
    on_device = sum(resident["tier"] == "device" for resident in body["residents"])
    queries = body["prefix_queries"]
    hits = body["prefix_hits"]
    share = f" ({hits / queries:.1%})" if queries else ""
    return [
        f"{body['model']} on {ready['device']}: {body['running']:,} running ({num_paused(body):,} paused), "
        f"{body['waiting']:,} waiting, {on_device:,} of {body['slots']:,} adapter slots in use",
        f"waiting     {counts_text(in_words(body['waiting_reasons'], REASONS))}",
        f"pages       {ready['memory']['num_pages']:,}: {counts_text(body['pages'])}",
        f"host pages  {ready['memory']['host_pages']:,}: {counts_text(body['host_pages'])}",
        f"prefix      {hits:,} of {queries:,} prompt tokens found{share}",
        *(f"{name:11} {counts_text(body[name])}" for name in ("evictions", "preemptions", "loads")),
    ]
