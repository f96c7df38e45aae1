"""Output of commands: tables, bodies of the API as tables or JSON, and counts in words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import typer

LOADS = ("RUNNING", "WAITING", "BACKLOG", "IN FLIGHT", "DEVICE", "HOST")
SERVERS = ("SERVER", "ROLE", "STATE", *LOADS, "URL")


def table_lines(rows: Sequence[Sequence[str]], numbers: Collection[str] = ()) -> Iterator[str]:
    """Align rows in columns. A column is aligned right if its first cell is in `numbers`.

    No cell is cut or folded.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(rows[0], row, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()


def print_table(rows: Sequence[Sequence[str]], numbers: Collection[str] = ()) -> None:
    """Print rows as `table_lines` aligns them."""
    for line in table_lines(rows, numbers):
        typer.echo(line)


def show(
    body: Mapping[str, Any] | Sequence[Mapping[str, Any]], as_json: bool, columns: Sequence[str]
) -> None:
    """Print a body as JSON, or these columns of it: a table for a list, one line per column for one object.

    No cell is cut or folded, so keys and digests can be copied.
    """
    if isinstance(body, Sequence):
        body = {"object": "list", "data": body, "next": None}
    if as_json:
        typer.echo(json.dumps(body, indent=2, ensure_ascii=False))
    elif body.get("object") == "list":
        header = [column.upper() for column in columns]
        print_table(
            [header, *([_cell(row.get(column)) for column in columns] for row in body["data"])]
        )
    else:
        print_table([[column, _cell(body.get(column))] for column in columns])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return " ".join(f"{name}={value_text(inner)}" for name, inner in value.items()) or "-"
    return value_text(value) or "-"


def value_text(value: object) -> str:
    """Write a value as the commands read it: `1:95,2:5`, `none`."""
    if isinstance(value, dict):
        parts = {
            name: f"({value_text(inner)})" if isinstance(inner, dict) else value_text(inner)
            for name, inner in value.items()
        }
        return ",".join(f"{name}:{part}" for name, part in parts.items())
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.3f}"
    return (
        {None: "none", True: "yes", False: "no"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


REASONS = {
    "LOADING": "loading",
    "NO_ROOM": "no room",
    "GRAMMAR": "grammar",
    "NO_PAGES": "no pages",
    "FORK": "shared prompt",
    "NEW": "in line",
}
"""Words for the reasons to wait: the load of the adapter; pages or a slot for it; the grammar of the answer; pages of
KV cache; the prompt that the choices of a request share; the turn of the tenant."""
REFUSALS = {
    "limit.queue": "over share",
    "server.overloaded": "overload",
    "engine_overloaded": "queue full",
    "deadline.queue": "too late",
}
"""Words for codes of refusals. Other codes are shown as they are."""


def counts_text(counts: Mapping[str, int]) -> str:
    """Write counts with their names, separated by commas."""
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items()) or "none"


def seconds_text(seconds: float | None) -> str:
    """Write a time with its unit; "-" for None."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def in_words(counts: Mapping[str, int], words: Mapping[str, str]) -> dict[str, int]:
    """Replace names of counts by words; the largest comes first, zeros are left out."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {words.get(code, code): count for code, count in ordered if count}


def num_paused(body: Mapping[str, Any]) -> int:
    """Number of running requests that the last step did not compute, from the body of `GET /v1/engine`."""
    return sum(load["paused"] for load in body["tenants"].values())


def server_rows(body: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of a table of servers, gateways first. A replica that the gateway does not reach has no figures.

    IN FLIGHT counts requests that this gateway has sent and that have not ended, DEVICE and HOST adapters by tier.
    """
    for each in sorted(body["data"], key=lambda server: (server["role"], server["name"])):
        load: tuple[str, ...] = ("-",) * len(LOADS)
        if "running" in each:
            counts = each["in_flight"], each["adapters"]["device"], each["adapters"]["host"]
            backlog = seconds_text(each["backlog_s"])
            load = (
                f"{each['running']:,}",
                f"{each['waiting']:,}",
                backlog,
                *(f"{count:,}" for count in counts),
            )
        yield each["name"], each["role"], each["state"], *load, each["url"]


def servers_line(body: Mapping[str, Any]) -> str:
    """Sum up all servers in one line."""
    replicas = [each for each in body["data"] if each["role"] == "replica"]
    sums = Counter[str]()
    for each in replicas:
        sums.update(
            ready=each["state"] == "ready",
            running=each.get("running", 0),
            waiting=each.get("waiting", 0),
        )
    longest = seconds_text(
        max((each["backlog_s"] for each in replicas if "running" in each), default=None)
    )
    ready = f"{sums['ready']:,} of {len(replicas):,} replicas ready, {len(body['data']) - len(replicas):,} gateways"
    return f"{ready}; {sums['running']:,} running, {sums['waiting']:,} waiting, longest backlog {longest}"
