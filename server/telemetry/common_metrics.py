"""Metrics that servers of every role have."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.registry import Collector

import manylora

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class CommonMetrics(Collector):
    """Counts of answers, and the version, in a registry of their own. Thread: the event loop's.

    A subclass adds what it has, and collects what is read at scrape time.

    Args:
        labels: Labels of all answers, by name.
    """

    def __init__(self, **labels: str) -> None:
        self.registry = CollectorRegistry()
        # They would be a second line for every counter, which no dashboard reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._labels = tuple(labels.values())
        self._responses = Counter(
            "manylora_responses",
            "Answers to HTTP requests by class; a gateway counts those of its replicas too, with the label role.",
            [*labels, "status"],
            registry=self.registry,
        )
        for hundreds in range(2, 6):
            self._responses.labels(*self._labels, f"{hundreds}xx")
        Gauge("manylora_build_info", "Always 1.", ["version"], registry=self.registry).labels(
            manylora.__version__
        ).set(1)
        self.registry.register(self)

    def answered(self, status: int) -> None:
        """Count an answer by the class of its HTTP status, also of requests that come to no generation."""
        self._responses.labels(*self._labels, f"{status // 100}xx").inc()
