"""Manylora's figures under vLLM's names, for routers, load generators and dashboards that read those.

They are made of Manylora's own metrics at each scrape, with the one label `model_name`; the rest is what routers ask of
LoRA: which adapters run, wait and are resident. Adapters have the names that Manylora's own metrics know, as
`tenant/name`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manylora.engine.status import EngineStatus

LEVELS = {"device": "gpu", "host": "cpu"}


@dataclass(frozen=True, slots=True)
class Alias:
    """One of Manylora's metrics, summed over its labels."""

    name: str
    own: str
    only: Mapping[str, str] = field(default_factory=dict)
    """Sums what has these labels only."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Labels that stay, by their names here."""


ALIASES = (
    Alias("vllm:num_requests_running", "manylora_running_requests"),
    Alias("vllm:num_requests_waiting", "manylora_waiting_requests"),
    Alias("vllm:num_preemptions", "manylora_preemptions"),
    Alias("vllm:prefix_cache_queries", "manylora_prefix_cache_queries"),
    Alias("vllm:prefix_cache_hits", "manylora_prefix_cache_hits"),
    Alias("vllm:prompt_tokens", "manylora_tokens", {"kind": "prompt"}),
    Alias("vllm:generation_tokens", "manylora_tokens", {"kind": "completion"}),
    Alias("vllm:request_success", "manylora_requests", kept={"finished_reason": "status"}),
    Alias("vllm:time_to_first_token_seconds", "manylora_ttft_seconds", kept={"le": "le"}),
    Alias("vllm:inter_token_latency_seconds", "manylora_itl_seconds", kept={"le": "le"}),
    Alias("vllm:request_queue_time_seconds", "manylora_queue_seconds", kept={"le": "le"}),
    Alias("vllm:e2e_request_latency_seconds", "manylora_request_seconds", kept={"le": "le"}),
)
REASONS = {"aborted": "abort"}
"""vLLM's words for how a request ended, where they are others."""


class VllmNames(Collector):
    """Thread: the event loop's.

    Args:
        model_name: The base's served name.
        max_adapters: Adapter slots of the engine.
        now: Seconds since 1970.
    """

    def __init__(
        self, model_name: str, max_adapters: int, now: Callable[[], float] = time.time
    ) -> None:
        self._model_name = model_name
        self._max_adapters = max_adapters
        self._now = now
        self._own = CollectorRegistry()
        self._status: EngineStatus | None = None
        self._names: Mapping[str, tuple[str, int]] = {}
        self._busy = ("", "")
        """Adapters that run, and that wait."""
        self._busy_since_s = now()

    def render(
        self,
        own: CollectorRegistry,
        status: EngineStatus | None,
        names: Mapping[str, tuple[str, int]],
    ) -> bytes:
        """The text for Prometheus.

        Args:
            own: Manylora's metrics.
            status: Of the engine; None while it is away.
            names: Names and ranks of adapters, by digest, the ones asked for last at the end.
        """
        self._own = own
        self._status = status
        self._names = names
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        """All families."""
        own = {family.name: family for family in self._own.collect()}
        for alias in ALIASES:
            if alias.own in own:
                yield self._renamed(alias, own[alias.own])
        if self._status is not None:
            yield from self._engine(self._status)

    def _renamed(self, alias: Alias, own: Metric) -> Metric:
        sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        if own.type == "counter" and not alias.kept:
            sums["_total", ()] = 0  # a rise from no value is not seen
        for sample in own.samples:
            if alias.only.items() <= sample.labels.items():
                kept = (
                    (name, sample.labels[label])
                    for name, label in alias.kept.items()
                    if label in sample.labels
                )
                labels = tuple((name, REASONS.get(value, value)) for name, value in kept)
                sums[sample.name.removeprefix(own.name), labels] += sample.value
        family = Metric(alias.name, own.documentation, own.type)
        for (suffix, labels), value in sums.items():
            family.add_sample(
                alias.name + suffix, {"model_name": self._model_name, **dict(labels)}, value
            )
        return family

    def _engine(self, status: EngineStatus) -> Iterable[Metric]:
        num_pages = sum(status.pages.values())
        used = 1 - status.available_pages / num_pages if num_pages else 0.0
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Part of the pages that is neither free nor evictable.",
            used,
        )
        yield self._gauge("vllm:max_gpu_lora_adapters", "Adapter slots.", self._max_adapters)
        num_loaded = sum(resident.tier == "device" for resident in status.residents)
        yield self._gauge(
            "vllm:num_gpu_loaded_lora_adapters", "Adapters on the device.", num_loaded
        )
        yield self._requests(status)
        yield self._loaded(status)

    def _requests(self, status: EngineStatus) -> Metric:
        known = [(self._names[r.digest][0], r) for r in status.residents if r.digest in self._names]
        running = ",".join(sorted({name for name, resident in known if resident.running}))
        waiting = ",".join(sorted({name for name, resident in known if resident.holds}))
        if self._busy != (running, waiting):
            self._busy = (running, waiting)
            self._busy_since_s = self._now()
        labels = {"max_lora": str(self._max_adapters)}
        labels |= {"running_lora_adapters": running, "waiting_lora_adapters": waiting}
        about = "Adapters with requests; the value is the time of the last change."
        return self._gauge("vllm:lora_requests_info", about, self._busy_since_s, labels)

    def _loaded(self, status: EngineStatus) -> Metric:
        """Adapters in memory; of one with several versions, the version asked for last."""
        digests = {name: digest for digest, (name, _) in self._names.items()}
        residents = {
            resident.digest: resident for resident in status.residents if resident.tier in LEVELS
        }
        family = Metric("vllm:lora_adapter_loaded", "Adapters in memory.", "gauge")
        for name, digest in digests.items():
            if (resident := residents.get(digest)) is not None:
                labels = {
                    "adapter_name": name,
                    "level": LEVELS[resident.tier],
                    "rank": str(self._names[digest][1]),
                }
                labels |= {"pinned": str(resident.pinned).lower(), "model_name": self._model_name}
                family.add_sample(family.name, labels, 1)
        return family

    def _gauge(
        self, name: str, about: str, value: float, labels: Mapping[str, str] | None = None
    ) -> Metric:
        labels = {"model_name": self._model_name, **(labels or {})}
        family = GaugeMetricFamily(name, about, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
