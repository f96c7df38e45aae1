"""Puts a gateway together: outer layers, behind them its own few routes with its metrics, and the passing on."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import manylora
from manylora.config import GatewayConfig
from manylora.errors import CapacityError
from manylora.registry.registry import Registry
from manylora.server.auth.callers import require_admin
from manylora.server.auth.middleware import outer_layers
from manylora.server.cluster.gateway import REASONS, Gateway
from manylora.server.cluster.links import Links
from manylora.server.cluster.router import Router
from manylora.server.cluster.wire import cluster_token
from manylora.server.process.drain import Drain

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
        state = links.router.states[name]
        adapters = {"device": 0, "host": 0, **Counts(state.tiers.values())}
        if seen["state"] == "ready" and links.router.is_ejected(name):
            seen["state"] = "ejected"
        return {**seen, "adapters": adapters, "in_flight": state.in_flight}


class GatewayMetrics(Collector):
    """Counts of a gateway; those of requests, tokens and engines are the replicas' own. Thread: the event loop's."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._registry = CollectorRegistry()
        disable_created_metrics()  # type: ignore[no-untyped-call]
        about = "Answers to HTTP requests by class; replicas count the same answers, without the label role."
        self._responses = Counter(
            "manylora_responses", about, ["role", "status"], registry=self._registry
        )
        for hundreds in range(2, 6):
            self._responses.labels("gateway", f"{hundreds}xx")
        Gauge("manylora_build_info", "Always 1.", ["version"], registry=self._registry).labels(
            manylora.__version__
        ).set(1)
        self._registry.register(self)

    def answered(self, status: int) -> None:
        """Count an answer."""
        self._responses.labels("gateway", f"{status // 100}xx").inc()

    def collect(self) -> Iterable[Metric]:
        """Read the states when Prometheus asks."""
        about = "1 for the reason why this gateway refuses requests, else 0."
        not_ready = GaugeMetricFamily("manylora_not_ready", about, labels=["role", "reason"])
        found = self._why_not_ready()
        for reason in REASONS:
            not_ready.add_metric(["gateway", reason], reason == found)
        yield not_ready
        about = "Requests sent to another replica than the first."
        yield CounterMetricFamily("manylora_gateway_retries", about, self._gateway.num_retried)
        about = "Answers that ended early because their replica was lost."
        yield CounterMetricFamily("manylora_gateway_lost_answers", about, self._gateway.num_lost)
        about = "Requests refused by a limit of their tenant or key before their body was read."
        limited = CounterMetricFamily("manylora_limited", about, labels=["role", "limit"])
        limited.add_metric(["gateway", "concurrent_requests"], self._gateway.num_refused)
        yield limited
        ready = GaugeMetricFamily(
            "manylora_replica_ready", "Whether a replica takes requests.", labels=["replica", "url"]
        )
        backlog = GaugeMetricFamily(
            "manylora_replica_backlog_seconds", "Work that waits in a replica.", labels=["replica"]
        )
        for server in self._gateway.links.listed:
            report = self._gateway.links.reports.get(server.name)
            is_asked = not self._gateway.links.router.is_ejected(server.name)
            is_ready = report is not None and report.state == "ready" and is_asked
            ready.add_metric([server.name, server.url], is_ready)
            backlog.add_metric([server.name], report.backlog_s if report else 0.0)
        yield from (ready, backlog)

    def _why_not_ready(self) -> str | None:
        try:
            self._gateway.check_ready()
        except CapacityError as error:
            return error.code
        return None

    async def page(self) -> Response:
        """For Prometheus."""
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE})
