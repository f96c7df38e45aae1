"""`manylora ps --watch`: the state on a terminal, drawn again and again."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from manylora.cli.options import NO_ANSWER
from manylora.cli.ps.tables import blocks
from manylora.errors import ClientError

if TYPE_CHECKING:
    from rich.console import Console

    from manylora.client import Client

GIVE_UP_S = 30.0
"""Seconds that a server may be away before the command ends."""
AWAY = frozenset({404, 503})
"""Statuses that a server that was there has while it restarts; 404 is a gateway's, of a replica that is not ready."""
LEAST_LINES = 3
"""A header, a row, and how many more there are."""


def watch(console: Console, client: Client, server: str | None, interval: float) -> None:
    """Draw states until Ctrl-C.

    Raises:
        ClientError: The server refuses, was never there, or has been away for too long.
    """
    if threading.current_thread() is threading.main_thread():
        # The background of a shell has it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    body = client.state(server)
    heard_s = time.monotonic()
    trouble: list[str] = []
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            lines = [*trouble, *screen_lines(blocks(body), console.height - len(trouble))]
            live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            time.sleep(interval)
            try:
                body = client.state(server)
                heard_s = time.monotonic()
                trouble = []
            except ClientError as error:
                is_away = error.status in AWAY or error.code in NO_ANSWER
                if not is_away or time.monotonic() - heard_s >= GIVE_UP_S:
                    raise
                trouble = [f"The server is away, trying for {GIVE_UP_S:.0f} s: {error.message}"]


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
