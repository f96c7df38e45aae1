"""Listens for HTTP, and ends by signals; for every role of a server."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import AsyncExitStack, contextmanager
from functools import partial

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from manylora.errors import ConfigError
from manylora.server.http.wire import BoundedReads, ConnectionRoom
from manylora.server.process.descriptors import most_connections
from manylora.server.process.drain import Drain

log = structlog.get_logger("manylora.server")
KEEP_ALIVE_S = 65
BACKLOG = 2048
"""Connections that wait to be taken in."""
METRICS_CONNECTIONS = 32
STOP_S = 3
"""Seconds that connections have to close once everything was drained."""


class ApiServer(uvicorn.Server):
    """uvicorn with signals left to `Shutdown` and a bounded number of connections.

    Args:
        app: What it serves.
        most: Most connections at once; as many as there are descriptors for when None.
    """

    def __init__(self, app: object, most: int | None = None) -> None:
        most = most or most_connections()
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=partial(BoundedReads, ConnectionRoom(most)),  # type: ignore[arg-type]
                backlog=min(
                    BACKLOG, most
                ),  # all that wait are taken in before the first of them is closed again
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


class Shutdown:
    """Effect of signals: the first drains, the second cuts running requests, the third exits without waiting.

    Before the server listens, the first signal ends the start, which is the task that makes this.
    """

    def __init__(self, drain_s: float) -> None:
        self.drain = Drain()
        self.num_asked = 0
        self._starting = asyncio.current_task()
        self._drain_s = drain_s
        self.server: ApiServer | None = None
        """The server that is ended when asked; None before it listens."""
        self.before_drain: Callable[[], float] = lambda: 0.0
        """Tells others that the server drains; returns how many seconds they need to notice."""
        self._draining: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask)

    def ask(self) -> None:
        """A signal came."""
        self.num_asked += 1
        if self.server is None:
            if self._starting is not None:
                self._starting.cancel()
        elif self._draining is None:
            self._draining = asyncio.ensure_future(self._drain_then_exit(self.server))
        elif self.num_asked == 2:
            self.drain.hurry()
        else:
            self.server.should_exit = self.server.force_exit = True

    async def _drain_then_exit(self, server: ApiServer) -> None:
        notice_s = self.before_drain()
        log.info(
            "draining", running=self.drain.num_running, notice_s=notice_s, limit_s=self._drain_s
        )
        num_cut = await self.drain.drain(self._drain_s, notice_s)
        log.info("drained", cut=num_cut)
        server.should_exit = True


@contextmanager
def bind(
    host: str, port: int, setting: str = "server.port"
) -> Generator[socket.socket, None, None]:
    """A socket bound to the address, not yet listening: another process may bind it as well, until one of them listens.

    Args:
        host: Address.
        port: 0 takes a free one.
        setting: Where the port comes from.

    Raises:
        ConfigError: The address is not ours, or taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"server.host {host!r} cannot be used: {error.strerror}.", param="server.host"
        ) from error
    with bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _in_words(host, port, setting):
            bound.bind(address)
        yield bound


def listen(bound: socket.socket) -> None:
    """Let clients connect; they wait until a server takes the socket.

    A server does this before it says that it listens, since uvloop does not tell when it fails.

    Raises:
        ConfigError: Another process has listened there since the socket was bound.
    """
    host, port = bound.getsockname()[:2]
    with _in_words(host, port, "server.port"):
        bound.listen(BACKLOG)


@contextmanager
def _in_words(host: str, port: int, setting: str) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        message = f"Cannot listen on {host} port {port}: {error.strerror}. Choose another server.host or {setting}."
        raise ConfigError(message, param=setting) from error


def listen_beside(stack: AsyncExitStack, app: object, host: str, port: int) -> None:
    """Serve another app on a port of its own until `stack` closes.

    Raises:
        ConfigError: The port is taken.
    """
    listener = stack.enter_context(bind(host, port, "server.metrics_port"))
    server = ApiServer(app, METRICS_CONNECTIONS)
    serving = asyncio.create_task(server.serve([listener]))

    async def stop() -> None:
        server.should_exit = server.force_exit = True
        await serving

    stack.push_async_callback(stop)


def metrics_app(page: Callable[[], Awaitable[Response]]) -> ASGIApp:
    """For a port of its own: answers GET /metrics with `page`."""

    async def metrics(_: Request) -> Response:
        return await page()

    return Starlette(routes=[Route("/metrics", metrics)])


def url_of(host: str, listener: socket.socket) -> str:
    """The address of a listening socket."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
