"""`manylora top`: watch the running engine."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manylora.cli.options import KEY, NO_ANSWER, SERVER, URL, connect
from manylora.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from manylora.client import Client

RETRY_S = 1.0
POLL_S = 1.0
GIVE_UP_S = 30.0
"""How long a server may be away before `manylora top` ends."""
AWAY = frozenset({404, 503})
"""Statuses that a server that was there has while it restarts; 404 is a gateway's, of a replica that is not ready."""
Interval = Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between updates.")]
Once = Annotated[bool, typer.Option("--once", help="Show one frame and exit.")]


def top(
    url: URL = None,
    key: KEY = None,
    interval: Interval = 1.0,
    once: Once = False,
    server: SERVER = None,
) -> None:
    """Watch the running engine until Ctrl-C: steps, memory pages, adapters, tenants; needs the admin key.

    Of a gateway it shows the servers, and with --server the engine of one replica. Where the output is no terminal,
    each update is one line. Ctrl-C (SIGINT) ends with status 0.
    """
    from rich.console import Console

    from manylora.cli.top.frame import frame

    console, client = Console(highlight=False), connect(url, key)
    if once:
        body = (None if server else client.servers()) or client.engine(server)
        console.print(frame(body, 0.0, console.size))
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGINT, signal.default_int_handler if console.is_terminal else _end_now
        )
    try:
        _watch(console, client, interval, server)
    except KeyboardInterrupt:
        return


def _end_now(*_: object) -> None:
    """End the process on SIGINT at once.

    A normal end would first wait until a full pipe takes what is not yet written. A shell script starts its background
    jobs with SIGINT ignored; this handler also ends those.
    """
    os._exit(0)


@dataclass
class _Seen:
    """The last snapshot of the stream, and why there is no newer one."""

    snapshot: dict[str, Any] | None = None
    received_s: float = 0.0
    trouble: str | None = None
    """Why there is no newer snapshot."""
    is_news: threading.Event = field(default_factory=threading.Event)
    end: ClientError | None = None
    """Why no more events will come."""
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, name: str, data: dict[str, Any]) -> None:
        """Keep an event of the stream."""
        if name == "engine_error":
            self.trouble = str(data["error"]["message"])
        elif name == "message":
            self.snapshot, self.received_s, self.trouble = data, time.monotonic(), None
        self.is_news.set()

    def stop(self, error: ClientError) -> None:
        """Note why no more events will come."""
        self.end = error
        self.ended.set()
        self.is_news.set()

    @property
    def age_s(self) -> float:
        """Seconds since the snapshot came."""
        return time.monotonic() - self.received_s


def _watch(console: Console, client: Client, interval: float, server: str | None) -> None:
    """Show snapshots until no more come.

    Raises:
        ClientError: No more come; the message says why.
    """
    seen = _Seen()
    threading.Thread(target=_follow, args=(client, seen, server), daemon=True).start()
    seen.is_news.wait()
    if console.is_terminal:
        _draw(console, seen, interval)
    else:
        _write(seen, interval)
    if seen.end is not None:
        raise seen.end


def _draw(console: Console, seen: _Seen, interval: float) -> None:
    """Draw frames on the whole terminal."""
    from rich.live import Live
    from rich.text import Text

    from manylora.cli.top.frame import frame

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not seen.ended.is_set():
            shown: RenderableType = Text(seen.trouble or "", "bold red")
            if seen.snapshot is not None:
                shown = frame(seen.snapshot, seen.age_s, console.size, seen.trouble)
            live.update(shown, refresh=True)
            seen.ended.wait(interval)


def _write(seen: _Seen, interval: float) -> None:
    """Print one line per update, and troubles on stderr when they change."""
    from manylora.cli.top.frame import line

    told: str | None = None
    while not seen.ended.is_set():
        trouble = seen.trouble
        if trouble is not None and trouble != told:
            typer.echo(f"manylora: {trouble}", err=True)
        told = trouble
        if seen.snapshot is not None and told is None:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            typer.echo(f"{now} {line(seen.snapshot, seen.age_s)}")
        seen.ended.wait(interval)


def _events(client: Client, server: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """What an engine tells when it changes, or a gateway once a second."""
    body = None if server else client.servers()
    if body is None:
        yield from client.watch_engine(server)
    while body is not None:
        yield "message", body
        time.sleep(POLL_S)
        body = client.servers()


def _follow(client: Client, seen: _Seen, server: str | None) -> None:
    """Keep `seen` up to date until the server refuses, was never there, or has been away for too long."""
    lost_s: float | None = None
    while True:
        try:
            for name, data in _events(client, server):
                seen.take(name, data)
                lost_s = None
            why = "the server ended the stream."
        except ClientError as error:
            why = error.message
            if not seen.is_news.is_set() or not (error.status in AWAY or error.code in NO_ANSWER):
                return seen.stop(error)
        lost_s = lost_s or time.monotonic()
        if time.monotonic() - lost_s >= GIVE_UP_S:
            message = f"{client.url} has been away for {GIVE_UP_S:.0f} s: {why}"
            return seen.stop(ClientError(message, code="unreachable"))
        seen.trouble = f"The server is away, trying for {GIVE_UP_S:.0f} s: {why}"
        time.sleep(RETRY_S)
