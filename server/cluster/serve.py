"""Runs a gateway: the registry, connections to replicas, and HTTP. It has no model, no engine and no tokenizer."""

from __future__ import annotations

import asyncio
import gc
import secrets
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

import manylora
from manylora.config import GatewayConfig, environment
from manylora.errors import ConfigError
from manylora.registry.registry import Registry
from manylora.registry.servers import Server, server_name
from manylora.server.auth.admin_key import (
    IS_OFF,
    VARIABLE,
    admin_key,
    check_shared_secrets,
    given_pepper,
)
from manylora.server.auth.browser import sign_in_fragment
from manylora.server.cluster.membership import Membership
from manylora.server.http.connection_room import most_connections
from manylora.server.http.listen import (
    ApiServer,
    Shutdown,
    bind,
    listen,
    listen_beside,
    run_until_signal,
    url_of,
)
from manylora.server.process.logs import configure_logs
from manylora.server.process.threads import cancel_all, share_database

Announce = Callable[[str], None]


def serve_gateway(config: GatewayConfig, announce: Announce) -> int:
    """Pass requests on until a signal ends it; returns the exit code.

    Raises:
        ConfigError: A setting is wrong, a secret is missing, or the port is taken.
    """
    configure_logs()
    return run_until_signal(partial(_serve_until, config, announce), config.server.drain_s)


async def _serve_until(config: GatewayConfig, announce: Announce, shutdown: Shutdown) -> None:
    try:
        from manylora.server.cluster.app import open_gateway
    except ImportError as error:
        raise ConfigError(
            "A gateway needs aiohttp: pip install 'manylora[cluster]'.", param="server.role"
        ) from error
    server = config.server
    environ = environment()
    pepper = given_pepper(environ)
    check_shared_secrets("gateway", pepper, environ.get(VARIABLE))
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bind(server.host, server.port))
        key = admin_key(server.data_dir, environ)
        registry = await Registry.open(
            config.registry.database_url, server.data_dir, key.secret, pepper=pepper
        )
        share_database(registry.database)
        stack.push_async_callback(registry.close)
        apps = await open_gateway(config, registry, shutdown.drain, stack)
        url = url_of(server.host, listener)
        own = Server(
            name=await asyncio.to_thread(server_name, server.data_dir),
            role="gateway",
            boot_id=secrets.token_hex(8),
            url=server.advertised_url or url,
            version=manylora.__version__,
        )
        listen(listener)
        membership = Membership(registry.servers, own)
        await membership.start()
        shutdown.before_drain = membership.drain
        stack.push_async_callback(membership.stop)
        if server.metrics_port is not None:
            listen_beside(stack, apps.metrics, server.host, server.metrics_port)
        http = shutdown.server = ApiServer(
            apps.main, most_connections(descriptors_each=2)
        )  # with one to a replica
        gc.freeze()
        gc.set_threshold(10_000, 20)  # else collections are a part of the time under load
        announce("manylora: gateway, which passes requests on to the replicas of its registry")
        if server.auth == "off":
            announce(IS_OFF)
        elif sign_in := await sign_in_fragment(registry, key.secret):
            announce(
                f"manylora: dashboard {url}/{sign_in} (signs in as admin, once, within 10 minutes)"
            )
        announce(f"manylora: listening on {url}")
        sys.stdout.flush()
        await http.serve([listener])
        await cancel_all(http.server_state.tasks)
