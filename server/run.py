"""Runs a server of any role: binds its port, opens its registry and its role, serves until a signal, and closes all.

Imports neither engine nor cluster: a gateway has no engine, and a single server no cluster.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp

from manylora.config import Config, GatewayConfig, environment
from manylora.registry.db.database import Database
from manylora.registry.registry import Registry
from manylora.registry.servers import server_name
from manylora.server.auth.admin_key import (
    IS_OFF,
    VARIABLE,
    admin_key,
    check_shared_secrets,
    given_pepper,
)
from manylora.server.auth.browser import sign_in_fragment
from manylora.server.http.listen import (
    ApiServer,
    Shutdown,
    bind,
    listen,
    listen_beside,
    metrics_app,
    url_of,
)
from manylora.server.process.descriptors import most_connections, raise_descriptor_limit
from manylora.server.process.fair_semaphore import FairSemaphore
from manylora.server.process.logs import configure_logs
from manylora.server.process.threads import cancel_all, keep_interpreter_moving, place_in

Announce = Callable[[str], None]
MAX_THREADS = 128
READERS = 4
"""Reads of the database at the same time; with the spare ones and the writer, as many as there are connections."""
SPARE_READERS = 3
OTHER_BILL_S = 10.0
"""Seconds after a replica starts again in which gateways may bill the requests that it was killed under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Parts of a server that its role is opened with."""

    name: str
    """Name of this server among those over one database."""
    url: str
    registry: Registry
    shutdown: Shutdown
    stack: AsyncExitStack
    """Closes what is opened."""
    announce: Announce
    """Told how the start goes on."""
    listen: Callable[[], None]
    """Lets clients connect; a role calls it once it is open, before others hear of it."""


class Role(NamedTuple):
    """The part of a server that differs by role, open and listening."""

    app: ASGIApp
    metrics: Callable[[], Awaitable[Response]]
    """The page of a port of its own."""
    about: str
    """A line for the operator."""


OpenRole = Callable[[Start], Awaitable[Role]]


def share_database(database: Database) -> None:
    """Let tenants take turns at the database: one that writes or reads much waits behind its own requests."""
    readers = FairSemaphore(READERS, spare=SPARE_READERS)
    database.share(partial(place_in, FairSemaphore(1)), partial(place_in, readers))


def run_server(config: Config | GatewayConfig, announce: Announce, open_role: OpenRole) -> int:
    """Serve in an event loop of its own until a signal ends it, also during the start; returns the exit code.

    Raises:
        ConfigError: A setting is wrong, a secret is missing, or the port is taken.
    """
    configure_logs()
    raise_descriptor_limit()

    async def run() -> int:
        # More than all that take places, so that none of them waits for another one's thread.
        threads = ThreadPoolExecutor(MAX_THREADS, "manylora-work")
        asyncio.get_running_loop().set_default_executor(threads)
        shutdown = Shutdown(config.server.drain_s)
        try:
            await _serve_until(config, announce, open_role, shutdown)
        except asyncio.CancelledError:
            if not shutdown.num_asked:
                raise
        return 0

    loop_factory = uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run())


async def _serve_until(
    config: Config | GatewayConfig,
    announce: Announce,
    open_role: OpenRole,
    shutdown: Shutdown,
) -> None:
    server = config.server
    pepper = given_pepper(environment())
    if server.role != "all":
        check_shared_secrets(server.role, pepper, environment().get(VARIABLE))
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bind(server.host, server.port))
        key = admin_key(server.data_dir, environment())
        registry = await Registry.open(
            config.registry.database_url,
            server.data_dir,
            key.secret,
            pepper=pepper,
            grace_s=OTHER_BILL_S if server.role == "replica" else 0.0,
        )
        stack.push_async_callback(registry.close)
        share_database(registry.database)
        start = Start(
            name=await asyncio.to_thread(server_name, server.data_dir),
            url=url_of(server.host, listener),
            registry=registry,
            shutdown=shutdown,
            stack=stack,
            announce=announce,
            listen=partial(listen, listener),
        )
        app, metrics, about = await open_role(start)
        if server.metrics_port is not None:
            listen_beside(stack, metrics_app(metrics), server.host, server.metrics_port)
        http = shutdown.server = ApiServer(
            app, most_connections(2 if server.role == "gateway" else 1)
        )  # a gateway has one to a replica for each
        keep_interpreter_moving()
        lines = [*key.announcement, *([IS_OFF] if server.auth == "off" else []), about]
        if server.auth == "on" and (sign_in := await sign_in_fragment(registry, key.secret)):
            lines.append(
                f"dashboard {start.url}/{sign_in} (signs in as admin, once, within 10 minutes)"
            )
        for line in (*lines, f"listening on {start.url}"):
            announce(f"manylora: {line}")
        sys.stdout.flush()
        await http.serve([listener])
        # Requests that are left after a second signal: their usage is still recorded.
        await cancel_all(http.server_state.tasks)
