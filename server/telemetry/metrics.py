"""Prometheus metrics, in a registry of their own.

Labels come from closed or capped sets: tenants and adapters are named in order of their first request until the room is
used up, and all others are `_other`, so the page stays small. Exact figures per tenant come from
SQL. Engine figures are read from a status at scrape time.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

import manylora
from manylora.engine.status import EngineStatus
from manylora.registry.limits import TENANT_LIMITS
from manylora.server.telemetry.vllm_names import VllmNames

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_LABELS = 100
"""Most adapters whose place is shown by name."""
PAIR_BYTES = 16_000
"""Room for the names of tenants with their adapters; each stands in up to eight lines of the page."""
LINE_BYTES = 60
"""Bytes of such a line beside the names."""
OTHER = "_other"
BASE = "_base"
"""Label of requests to the base model."""
NO_TENANT = "_admin"
NOT_READY = (
    "server.draining",
    "engine_starting",
    "storage.full",
    "storage.unavailable",
    "db.lost",
    "db.unavailable",
)
"""Codes of the errors by which a server says that it is not ready."""
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
EVICTED = ("adapter", "prefix")
LOADED = tuple(
    f"{origin}>device:{result}" for origin in ("host", "stored") for result in ("failed", "ok")
)
"""They start at 0, because Prometheus does not see a rise from no value to 1."""
ADAPTER_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
FamilyT = TypeVar("FamilyT", CounterMetricFamily, GaugeMetricFamily)


class Metrics(Collector):
    """Counts of what Manylora does. Thread: the event loop's.

    Args:
        vllm: Shows the figures under vLLM's names too.
    """

    def __init__(self, vllm: VllmNames | None = None) -> None:
        self._vllm = vllm
        self.registry = CollectorRegistry()
        # They would be a second line for every counter, which no dashboard reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._pairs = _Capped(PAIR_BYTES, lambda names: sum(map(len, names)) + LINE_BYTES)
        self._adapters = _Capped(MAX_LABELS, lambda _: 1)
        self._tenants = _Capped(MAX_LABELS, lambda _: 1)
        self._digests: dict[str, tuple[str, int]] = {}
        """Names and ranks of adapters, those asked for last at the end."""
        self._last_step = ("", 0)
        self._status: EngineStatus | None = None
        own = self.registry
        self._requests = Counter(
            "manylora_requests",
            "Generation requests.",
            ["tenant", "adapter", "status"],
            registry=own,
        )
        self._tokens = Counter(
            "manylora_tokens", "Tokens accounted.", ["tenant", "adapter", "kind"], registry=own
        )
        of_request = partial(Histogram, buckets=LATENCY_BUCKETS, registry=own)
        self._ttft = of_request("manylora_ttft_seconds", "Time to the first token.")
        self.whole = of_request("manylora_request_seconds", "Time to the end of the answer.")
        self._queue = of_request("manylora_queue_seconds", "Time before the first step.")
        self.itl = Histogram(
            "manylora_itl_seconds", "Time between tokens.", buckets=STEP_BUCKETS, registry=own
        )
        self._step = Histogram(
            "manylora_step_seconds", "Length of a step.", buckets=STEP_BUCKETS, registry=own
        )
        self._batch = Histogram(
            "manylora_batch_adapters", "Adapters in a step.", buckets=ADAPTER_BUCKETS, registry=own
        )
        about_limits = "Requests refused by a tenant's or key's limit, and chats without max_tokens that it ended."
        self._limited = Counter("manylora_limited", about_limits, ["limit"], registry=own)
        for limit in TENANT_LIMITS:
            self._limited.labels(limit)
        about_refusals = "Requests that would have waited too long."
        self._refused = Counter(
            "manylora_refused", about_refusals, ["code", "tenant"], registry=own
        )
        self._responses = Counter(
            "manylora_responses", "Answers to HTTP requests by class.", ["status"], registry=own
        )
        for hundreds in range(2, 6):
            self._responses.labels(f"{hundreds}xx")
        self._engine_up = Gauge(
            "manylora_engine_up", "1 while the engine answers, else 0.", registry=own
        )
        self._not_ready = Gauge(
            "manylora_not_ready",
            "1 for the reason why requests are refused, else 0.",
            ["reason"],
            registry=own,
        )
        self._lag = Gauge(
            "manylora_usage_outbox_lag_seconds",
            "Age of the oldest usage event not in SQL.",
            registry=own,
        )
        Gauge("manylora_build_info", "Always 1.", ["version"], registry=own).labels(
            manylora.__version__
        ).set(1)
        own.register(self)

    def learn_adapter(self, digest: str, tenant: str, name: str, rank: int) -> None:
        """Remember the name of a digest: residents are shown by name."""
        (label,) = self._adapters.labels(f"{tenant}/{name}")
        if label != OTHER:
            self._digests.pop(digest, None)
            self._digests[digest] = (label, rank)
            while len(self._digests) > 4 * MAX_LABELS:
                del self._digests[next(iter(self._digests))]

    def request_ended(
        self, tenant: str | None, adapter: str | None, status: str, tokens: dict[str, int]
    ) -> None:
        """Count a request and its tokens.

        Args:
            tenant: The tenant's name; None is the admin.
            adapter: `tenant/name`; None is the base.
            status: How it ended.
            tokens: Tokens by kind: prompt, cached, completion.
        """
        pair = self._pairs.labels(
            NO_TENANT if tenant is None else tenant, BASE if adapter is None else adapter
        )
        self._requests.labels(*pair, status).inc()
        for kind, count in tokens.items():
            self._tokens.labels(*pair, kind).inc(count)

    def first_token(self, ttft_s: float, queue_s: float | None) -> None:
        """Observe how long a request waited for its first token."""
        self._ttft.observe(ttft_s)
        if queue_s is not None:
            self._queue.observe(queue_s)

    def limited(self, limit: str) -> None:
        """Count a refusal by one of the limits of a tenant or key."""
        self._limited.labels(limit).inc()

    def refused(self, code: str, tenant: str | None) -> None:
        """Count a request that was refused because it would have waited, or has waited, too long.

        Args:
            code: The error code.
            tenant: The tenant's name; None is the admin.
        """
        (label,) = (NO_TENANT,) if tenant is None else self._tenants.labels(tenant)
        self._refused.labels(code, label).inc()

    def answered(self, status: int) -> None:
        """Count an answer by the class of its HTTP status, also of requests that come to no generation."""
        self._responses.labels(f"{status // 100}xx").inc()

    def render(
        self, status: EngineStatus | None, usage_lag_s: float, not_ready: str | None = None
    ) -> bytes:
        """The text that Prometheus reads; `status` is None while the engine is away."""
        self._lag.set(usage_lag_s)
        for reason in NOT_READY:
            self._not_ready.labels(reason).set(reason == not_ready)
        self._engine_up.set(status is not None)
        self._status = status
        if status is not None:
            self._take_steps(status)
        page = generate_latest(self.registry)
        return (
            page
            if self._vllm is None
            else page + self._vllm.render(self.registry, status, self._digests)
        )

    def _take_steps(self, status: EngineStatus) -> None:
        boot_id, last = self._last_step
        if boot_id != status.boot_id:
            last = 0
        for step in status.last_steps:
            if step.step > last:
                self._step.observe(step.seconds)
                self._batch.observe(step.adapters)
                last = step.step
        self._last_step = (status.boot_id, last)

    def collect(self) -> Iterable[Metric]:
        """The figures of the engine's last status; called by `registry`."""
        status = self._status
        if status is None:
            return
        yield GaugeMetricFamily("manylora_running_requests", "Requests that run.", status.running)
        yield GaugeMetricFamily("manylora_waiting_requests", "Requests that wait.", status.waiting)
        yield GaugeMetricFamily(
            "manylora_engine_paused",
            "1 while the engine is paused, else 0.",
            status.pause is not None,
        )
        yield _labelled(GaugeMetricFamily, "manylora_pages", "Pages by kind.", "kind", status.pages)
        about = "Pages of the host slab by kind."
        yield _labelled(GaugeMetricFamily, "manylora_host_pages", about, "kind", status.host_pages)
        about = "Running requests that lost their pages."
        yield _labelled(
            CounterMetricFamily, "manylora_preemptions", about, "how", status.preemptions
        )
        about = "Adapters, and blocks of cached KV, dropped."
        evictions = dict.fromkeys(EVICTED, 0) | status.evictions
        yield _labelled(CounterMetricFamily, "manylora_evictions", about, "kind", evictions)
        about = "Prompt tokens looked up in the prefix cache."
        yield CounterMetricFamily("manylora_prefix_cache_queries", about, status.prefix_queries)
        yield CounterMetricFamily(
            "manylora_prefix_cache_hits", "Prompt tokens found there.", status.prefix_hits
        )
        about = "Kernels compiled while requests were served."
        yield CounterMetricFamily("manylora_kernel_compiles", about, status.kernel_compiles)
        loads = CounterMetricFamily(
            "manylora_adapter_loads", "Adapter loads.", labels=["from", "to", "result"]
        )
        for key, count in {**dict.fromkeys(LOADED, 0), **status.loads}.items():
            path, _, result = key.partition(":")
            source, _, target = path.partition(">")
            loads.add_metric([source, target, result], count)
        yield loads
        yield SummaryMetricFamily(
            "manylora_adapter_load_seconds",
            "Time spent loading adapters.",
            count_value=sum(status.loads.values()),
            sum_value=status.load_seconds,
        )
        places = Counts(
            (self._digests.get(r.digest, (OTHER,))[0], r.tier) for r in status.residents
        )
        residents = GaugeMetricFamily(
            "manylora_adapter_resident", "Adapters by place.", labels=["adapter", "tier"]
        )
        for place, count in places.items():
            residents.add_metric(place, count)
        yield residents


def _labelled(
    kind: type[FamilyT], name: str, about: str, label: str, counts: Mapping[str, int]
) -> FamilyT:
    """A family with one value for each value of its only label."""
    family = kind(name, about, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


class _Capped:
    """Lets names through until the room is used up; all later ones become `OTHER`."""

    def __init__(self, room: int, cost: Callable[[tuple[str, ...]], int]) -> None:
        self._known: set[tuple[str, ...]] = set()
        self._room = room
        self._cost = cost

    def labels(self, *names: str) -> tuple[str, ...]:
        if names not in self._known:
            if (cost := self._cost(names)) > self._room:
                return (OTHER,) * len(names)
            self._known.add(names)
            self._room -= cost
        return names
