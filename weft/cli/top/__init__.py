"""`weft top`: watch the running engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from weft.cli.options import KEY, URL, connect
from weft.cli.top import frame as top_frame
from weft.errors import ClientError

if TYPE_CHECKING:
    import httpx
    from rich.console import Console, RenderableType

    from weft.client import Client

READ_S = 20.0
"""A line that says nothing for so long is dead: comments come every few seconds."""
CONNECT_S = 10.0
RETRY_S = 1.0
GIVE_UP_S = 30.0
"""How long a server that was there may be away."""
UNAVAILABLE = 503
Interval = Annotated[float, typer.Option("--interval", min=0.1, help="Seconds from one look to the next.")]
Once = Annotated[bool, typer.Option("--once", help="Show one frame and exit.")]


def top(url: URL = None, key: KEY = None, interval: Interval = 1.0, once: Once = False) -> None:
    """Watch steps, pages and adapters of the running engine until Ctrl-C; needs the admin key.

    Where the output is no terminal, a line is written at each look. Ctrl-C (SIGINT) is a good end: the status is 0.
    """
    from rich.console import Console

    console, client = Console(highlight=False), connect(url, key)
    if once:
        console.print(top_frame.frame(client.engine(), 0.0, console.size))
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler if console.is_terminal else _end_now)
    try:
        asyncio.run(_watch(console, client, interval))
    except KeyboardInterrupt:
        return


def _end_now(*_: object) -> None:
    """End the process, which holds nothing, on SIGINT.

    asyncio would only cancel the task: one that waits in a write to a full pipe never sees that. Installed also where
    the process was started with SIGINT ignored, as the background jobs of a shell script are.
    """
    os._exit(0)


@dataclass
class _Seen:
    """What the stream has told."""

    snapshot: dict[str, Any] | None = None
    received_s: float = 0.0
    trouble: str | None = None
    """Why there is no newer snapshot."""
    is_news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, name: str, data: dict[str, Any]) -> None:
        """Take an event in."""
        if name == "engine_error":
            self.trouble = str(data["error"]["message"])
        elif name == "message":
            self.snapshot, self.received_s, self.trouble = data, time.monotonic(), None
        self.is_news.set()

    @property
    def age_s(self) -> float:
        """Seconds since the snapshot came."""
        return time.monotonic() - self.received_s


async def _watch(console: Console, client: Client, interval: float) -> None:
    """Show what comes until nothing does.

    Raises:
        ClientError: Nothing comes any more.
    """
    seen = _Seen()
    following = asyncio.create_task(_follow(client, seen))
    try:
        first = asyncio.create_task(seen.is_news.wait())
        await asyncio.wait([following, first], return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if not following.done():
            await (
                _draw(console, seen, following, interval) if console.is_terminal else _write(seen, following, interval)
            )
        await following
    finally:
        following.cancel()


async def _draw(console: Console, seen: _Seen, following: asyncio.Task[NoReturn], interval: float) -> None:
    """Frames on the whole terminal."""
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not following.done():
            shown: RenderableType = Text(seen.trouble or "", "bold red")
            if seen.snapshot is not None:
                shown = top_frame.frame(seen.snapshot, seen.age_s, console.size, seen.trouble)
            live.update(shown, refresh=True)
            await asyncio.wait([following], timeout=interval)


async def _write(seen: _Seen, following: asyncio.Task[NoReturn], interval: float) -> None:
    """Lines, and what is wrong on stderr whenever that changes."""
    told: str | None = None
    while not following.done():
        if seen.trouble is not None and seen.trouble != told:
            typer.echo(f"weft: {seen.trouble}", err=True)
        told = seen.trouble
        if seen.snapshot is not None and told is None:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            typer.echo(f"{now} {top_frame.line(seen.snapshot, seen.age_s)}")
        await asyncio.wait([following], timeout=interval)


async def _follow(client: Client, seen: _Seen) -> NoReturn:
    """Keep `seen` up to date.

    Raises:
        ClientError: The server refuses, was never there, or has been away for too long.
    """
    import httpx

    from weft.client import unreachable

    lost_s: float | None = None
    timeout = httpx.Timeout(CONNECT_S, read=READ_S)
    async with httpx.AsyncClient(headers=client.headers, timeout=timeout, trust_env=client.trust_env) as http:
        while True:
            try:
                async with http.stream("GET", f"{client.url}/v1/engine/events") as answer:
                    await _check(answer, client)
                    async for name, data in _events(answer):
                        seen.take(name, data)
                        lost_s = None
                why = "the server ended the stream"
            except httpx.HTTPError as error:
                why = str(error) or type(error).__name__
                if not seen.is_news.is_set():
                    raise unreachable(client.url, error) from error
            lost_s = lost_s or time.monotonic()
            left_s = GIVE_UP_S - (time.monotonic() - lost_s)
            if left_s <= 0:
                raise ClientError(f"{client.url} has been away for {GIVE_UP_S:.0f} s: {why}.", code="unreachable")
            seen.trouble = f"The server is away, trying for {GIVE_UP_S:.0f} s: {why.rstrip('.')}."
            await asyncio.sleep(RETRY_S)


async def _check(answer: httpx.Response, client: Client) -> None:
    import httpx

    from weft.client import not_weft, refusal

    if answer.is_error:
        await answer.aread()
        refused = refusal(answer, client.key)
        if answer.status_code != UNAVAILABLE:
            raise refused
        raise httpx.RemoteProtocolError(f"{refused.message} ({refused.code})")  # it starts or ends, which passes
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        raise not_weft(client.url)


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Names and contents of events, as they come."""
    name = "message"
    async for line in answer.aiter_lines():
        field_name, _, value = line.partition(": ")
        if field_name == "event":
            name = value
        elif field_name == "data":
            yield name, json.loads(value)
            name = "message"
