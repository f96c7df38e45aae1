"""Puts a gateway together: CORS, request ids, authentication, and behind them its own few routes and the passing on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from manylora.config import GatewayConfig
from manylora.registry.registry import Registry
from manylora.server.auth.callers import require_admin
from manylora.server.boundary import outer_layers
from manylora.server.cluster.gateway import Gateway
from manylora.server.cluster.links import Links
from manylora.server.cluster.metrics import GatewayMetrics
from manylora.server.cluster.router import Router
from manylora.server.cluster.wire import cluster_token
from manylora.server.process.drain import Drain


async def open_gateway(
    config: GatewayConfig, registry: Registry, drain: Drain, stack: AsyncExitStack
) -> tuple[ASGIApp, Callable[[], Awaitable[Response]]]:
    """Connect to the replicas; `stack` closes the connections. Returns the app, and the page of its metrics.

    Raises:
        CapacityError: The database cannot answer.
    """
    links = Links(registry.servers, Router(time.monotonic), cluster_token(registry.key_ring))
    stack.push_async_callback(links.close)
    await links.start()
    gateway = Gateway(config.server, registry, links, drain)
    metrics = GatewayMetrics(gateway)
    app: ASGIApp = OwnRoutes(gateway, metrics)
    for layer, arguments, options in reversed(
        outer_layers(config.server, registry, drain, metrics.answered)
    ):
        app = layer(app, *arguments, **options)
    return app, metrics.page


class OwnRoutes:
    """Routes that are about this gateway itself."""

    def __init__(self, gateway: Gateway, metrics: GatewayMetrics) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._routes = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._show_metrics,
            "/v1/servers": self._show_servers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        own = self._routes.get(scope["path"]) if scope["method"] in ("GET", "HEAD") else None
        if own is None:
            await self._gateway(scope, receive, send)
        else:
            await (await own(Request(scope)))(scope, receive, send)

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        self._gateway.check_ready()
        return JSONResponse({"status": "ready"})

    async def _show_metrics(self, request: Request) -> Response:
        await require_admin(request)
        return await self._metrics.page()

    async def _show_servers(self, request: Request) -> Response:
        """All servers by the registry, and how this gateway sees the replicas."""
        await require_admin(request)
        servers = [
            {**asdict(server), **(self._seen(server.name) if server.role == "replica" else {})}
            for server in await self._gateway.registry.servers.listed()
        ]
        return JSONResponse({"object": "list", "data": servers})

    def _seen(self, name: str) -> dict[str, Any]:
        links = self._gateway.links
        report = links.reports.get(name)
        if report is None:
            return {"state": "lost"}
        seen = {
            field: getattr(report, field)
            for field in ("state", "backlog_s", "rate", "running", "waiting")
        }
        adapters = {"device": 0, "host": 0, **Counter(links.tiers[name].values())}
        if seen["state"] == "ready" and links.router.is_ejected(name):
            seen["state"] = "ejected"
        return {**seen, "adapters": adapters, "in_flight": links.router.states[name].in_flight}
