"""Metrics of a gateway for Prometheus; those of requests, tokens and engines are the replicas' own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

import manylora
from manylora.errors import CapacityError
from manylora.server.cluster.gateway import REASONS, Gateway

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class GatewayMetrics(Collector):
    """Counts of a gateway. Thread: the event loop's."""

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
        limited.add_metric(
            ["gateway", "concurrent_requests"], self._gateway.before_body.num_refused
        )
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
