"""`manylora ps --watch`: the state again and again, on a terminal or in a pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from manylora.cli.options import NO_ANSWER
from manylora.cli.ps.tables import blocks
from manylora.errors import ClientError

if TYPE_CHECKING:
    from manylora.client import Client

GIVE_UP_S = 30.0
"""Seconds that a server may be away before the command ends."""
AWAY = frozenset({404, 503})
"""Statuses that a server that was there has while it restarts; 404 is a gateway's, of a replica that is not ready."""
LEAST_LINES = 3
"""A header, a row, and how many more there are."""


def watch(client: Client, server: str | None, interval: float) -> None:
    """Show states until Ctrl-C.

    Raises:
        ClientError: The server refuses, was never there, or has been away for too long.
    """
    console = Console(highlight=False)
    if threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGINT, signal.default_int_handler if console.is_terminal else _end_now
        )
    with contextlib.suppress(KeyboardInterrupt):
        if console.is_terminal:
            _draw(console, states(client, server, interval))
        else:
            _write(states(client, server, interval))


def states(
    client: Client, server: str | None, interval: float
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Ask for the state again and again; yields the last one, and why there is no newer one.

    Raises:
        ClientError: The server refuses, was never there, or has been away for too long.
    """
    body: dict[str, Any] | None = None
    heard_s = time.monotonic()
    while True:
        trouble = None
        try:
            body = client.state(server)
            heard_s = time.monotonic()
        except ClientError as error:
            if body is None or not (error.status in AWAY or error.code in NO_ANSWER):
                raise
            if time.monotonic() - heard_s >= GIVE_UP_S:
                message = f"{client.url} has been away for {GIVE_UP_S:.0f} s: {error.message}"
                raise ClientError(message, code="unreachable") from error
            trouble = f"The server is away, trying for {GIVE_UP_S:.0f} s: {error.message}"
        yield body, trouble
        time.sleep(interval)


def screen_lines(found: Sequence[Sequence[str]], height: int) -> list[str]:
    """Lines for a screen of this height: the summary, then as much of each table as there is room for."""
    *tables, summary = found
    lines = [*summary[:height]]
    for left, table in zip(range(len(tables), 0, -1), reversed(tables), strict=True):
        room = (height - len(lines)) // left - 1
        if len(table) <= room:
            lines += ["", *table]
        elif room >= LEAST_LINES:
            lines += ["", *table[: room - 1], f"and {len(table) - room + 1:,} more"]
    return lines


def _draw(console: Console, seen: Iterator[tuple[dict[str, Any], str | None]]) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for body, trouble in seen:
            first = [trouble] if trouble else []
            lines = [*first, *screen_lines(blocks(body), console.height - len(first))]
            live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)


def _write(seen: Iterator[tuple[dict[str, Any], str | None]]) -> None:
    """Print each state whole, and troubles on stderr when they change."""
    said: str | None = None
    for body, trouble in seen:
        if trouble is not None and trouble != said:
            typer.echo(f"manylora: {trouble}", err=True)
        said = trouble
        if trouble is None:
            typer.echo(datetime.now().astimezone().isoformat(timespec="seconds"))
            typer.echo("\n\n".join("\n".join(block) for block in blocks(body)) + "\n")


def _end_now(*_: object) -> None:
    """End the process on SIGINT at once.

    A normal end would first wait until a full pipe takes what is not yet written. A shell script starts its background
    jobs with SIGINT ignored; this handler also ends those.
    """
    os._exit(0)
