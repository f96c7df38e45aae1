"""Opens a gateway: the registry, connections to replicas, and HTTP. It has no model, no engine and no tokenizer."""

from __future__ import annotations

import secrets
from functools import partial

import manylora
from manylora.config import GatewayConfig
from manylora.errors import ConfigError
from manylora.registry.servers import Server
from manylora.server.cluster.membership import Membership
from manylora.server.run import Announce, Role, Start, run_server


def serve_gateway(config: GatewayConfig, announce: Announce) -> int:
    """Pass requests on until a signal ends it; returns the exit code and raises as `run_server`."""
    return run_server(config, announce, partial(_open, config))


async def _open(config: GatewayConfig, start: Start) -> Role:
    try:
        from manylora.server.cluster.app import open_gateway
    except ImportError as error:
        raise ConfigError(
            "A gateway needs aiohttp: pip install 'manylora[cluster]'.", param="server.role"
        ) from error
    app, metrics = await open_gateway(config, start.registry, start.shutdown.drain, start.stack)
    start.listen()
    own = Server(
        name=start.name,
        role="gateway",
        boot_id=secrets.token_hex(8),
        url=config.server.advertised_url or start.url,
        version=manylora.__version__,
    )
    membership = Membership(start.registry.servers, own)
    await membership.start()
    start.stack.push_async_callback(membership.stop)
    start.shutdown.before_drain = membership.drain
    about = "gateway, which passes requests on to the replicas of its registry"
    return Role(app, metrics, about)
