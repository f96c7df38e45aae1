"""Puts a gateway together: CORS, request ids, authentication, and behind them its own few routes and the passing on."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any, NamedTuple

import orjson
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.config import GatewayConfig
from weft.registry.registry import Registry
from weft.server.auth.callers import require_admin
from weft.server.auth.middleware import AuthMiddleware
from weft.server.boundary import Boundary
from weft.server.cluster.forwarding import no_replica
from weft.server.cluster.gateway import Gateway
from weft.server.cluster.links import Links
from weft.server.cluster.metrics import GatewayMetrics
from weft.server.cluster.router import Router
from weft.server.cluster.wire import cluster_token
from weft.server.drain import Drain
from weft.server.listen import metrics_app

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class GatewayApps(NamedTuple):
    """What a gateway serves."""

    main: ASGIApp
    metrics: ASGIApp
    """For a port of its own: GET /metrics without a key."""


async def open_gateway(config: GatewayConfig, registry: Registry, drain: Drain, stack: AsyncExitStack) -> GatewayApps:
    """Connect to the replicas; `stack` closes the connections.

    Raises:
        CapacityError: The database cannot answer.
    """
    token = cluster_token(registry.key_ring)
    router = Router(time.monotonic)
    links = Links(registry.servers, router, token)
    stack.push_async_callback(links.close)
    await links.start()
    metrics = GatewayMetrics(links, router)
    metrics.gateway = gateway = Gateway(config.server, registry, links, router, token, drain)
    app: ASGIApp = OwnRoutes(gateway, registry, links, router, metrics, drain)
    app = AuthMiddleware(app, keys=registry if config.server.auth == "on" else None)
    app = Boundary(app, drain=drain, answered=metrics.answered)
    if origins := config.server.allowed_origins:
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"])

    async def page() -> Response:
        return _page(metrics)

    return GatewayApps(app, metrics_app(page))


class OwnRoutes:
    """Answers what is about this gateway itself."""

    def __init__(
        self, gateway: Gateway, registry: Registry, links: Links, router: Router, metrics: GatewayMetrics, drain: Drain
    ) -> None:
        self._gateway = gateway
        self._drain = drain
        self._registry = registry
        self._links = links
        self._router = router
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
        return _json({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        self._drain.check()
        if not any(report.state == "ready" for report in self._links.reports.values()):
            raise no_replica()
        return _json({"status": "ready"})

    async def _show_metrics(self, request: Request) -> Response:
        await require_admin(request)
        return _page(self._metrics)

    async def _show_servers(self, request: Request) -> Response:
        """All servers by the registry, and how this gateway sees the replicas."""
        await require_admin(request)
        servers = [
            {**asdict(server), **(self._seen(server.name) if server.role == "replica" else {})}
            for server in await self._registry.servers.listed()
        ]
        return _json({"object": "list", "data": servers})

    def _seen(self, name: str) -> dict[str, Any]:
        report = self._links.reports.get(name)
        if report is None:
            return {"state": "lost"}
        told = {field: getattr(report, field) for field in ("state", "backlog_s", "rate", "running", "waiting")}
        adapters = {"device": 0, "host": 0, **Counter(self._links.tiers[name].values())}
        return {**told, "adapters": adapters, "in_flight": self._router.states[name].in_flight}


def _page(metrics: GatewayMetrics) -> Response:
    return Response(metrics.render(), headers={"content-type": METRICS_TYPE})


def _json(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
