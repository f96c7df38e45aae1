"""Routers before many replicas, in virtual time: how many requests wait for an adapter, and how even the load is.

A replica serves 32 requests at a time, each for a time that no router knows, and keeps the adapters it used last. A
request whose adapter is not there waits for the load, and then for a slot. Each gateway has a router of its own and
sees the replicas as they were some seconds ago.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np

from manylora.server.cluster.router import Router, Target
from registry_samples import server_sample

SLOTS = 32
UNITS = 200.0
"""Mean work of a request, which routers take for that of each; a slot does it in a second on average."""
LOAD_S = 0.3
"""Time to load an adapter."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is simulated."""

    num_replicas: int
    num_gateways: int = 1
    view_s: float = 0.0
    """How old a report is when a gateway gets it."""
    period_s: float = 0.25
    """Time between the reports of a replica."""
    zipf: float = 0.9
    num_adapters: int = 2000
    max_cached: int = 64
    """Adapters that a replica keeps."""
    utilisation: float = 0.8
    """Requests per second over what all slots serve. From 1 on: clients per slot, each asks again when it is served."""
    warm_s: float = 30.0
    """Time before the measurement, in which caches fill."""
    seconds: float = 25.0
    """Time measured."""
    is_power_of_two: bool = False
    """The router to compare with: the less loaded of two replicas, whatever adapters they have."""
    new_share: float = 0.0
    """Share of requests that is for one new adapter, from the start of the measurement on."""
    num_slow: int = 0
    """Replicas that serve at half the rate."""
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured."""

    num_requests: int
    cold: float
    """Share of requests that waited for a load."""
    imbalance: float
    """Requests in flight at the replica with the most, over the mean; both averaged over time."""
    copies: float
    """Replicas that served an adapter, averaged over adapters."""
    p99_wait_s: float
    """Time from arrival to slot."""
    throughput: float
    """Requests per second over what all slots can serve."""


@dataclass(frozen=True, slots=True)
class _Request:
    arrived_s: float
    router: Router
    target: Target
    name: str
    server: _Server


@dataclass
class _Server:
    cached: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """When each adapter's load ends; the one used last is last."""
    waiting: deque[_Request] = field(default_factory=deque)
    speed: float = 1.0
    running: int = 0
    in_flight: int = 0
    counted_from_s: float = 0.0
    area: float = 0.0
    """Requests in flight, integrated over the time measured."""

    def count(self, change: int, now_s: float) -> None:
        if now_s > self.counted_from_s:
            self.area += self.in_flight * (now_s - self.counted_from_s)
            self.counted_from_s = now_s
        self.in_flight += change

    def load_s(self, digest: str, now_s: float, max_cached: int) -> float:
        """Seconds until the adapter is there."""
        if digest not in self.cached:
            if len(self.cached) >= max_cached:
                self.cached.popitem(last=False)
            self.cached[digest] = now_s + LOAD_S
        self.cached.move_to_end(digest)
        return max(0.0, self.cached[digest] - now_s)


class RouterSimulation:
    """One run."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.now_s = 0.0
        self.end_s = case.warm_s + case.seconds
        self._random = random.Random(case.seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._ids = count()
        self.servers = {
            f"r{i}": _Server(speed=0.5 if i < case.num_slow else 1.0, counted_from_s=case.warm_s)
            for i in range(case.num_replicas)
        }
        members = [server_sample(name=name, boot_id="1") for name in self.servers]
        self.routers = [
            Router(lambda: self.now_s, random.Random(case.seed + i))
            for i in range(case.num_gateways)
        ]
        for router in self.routers:
            router.set_replicas(members)
        weights = np.arange(1, case.num_adapters + 1) ** -case.zipf
        draw = np.random.default_rng(case.seed)
        self._adapters = iter(
            draw.choice(case.num_adapters, 1_000_000, p=weights / weights.sum()).tolist()
        )
        self._num_arrived = self._num_cold = self._num_ended = 0
        self._waits: list[float] = []
        self._pairs: set[tuple[str, str]] = set()
        """Adapters and replicas that served them."""

    def run(self) -> Outcome:
        case = self.case
        if case.utilisation >= 1:
            for _ in range(int(case.utilisation * SLOTS * case.num_replicas)):
                self._at(self._random.random(), self._arrive)
        else:
            self._at(0.0, self._arrive)
        for i, name in enumerate(self.servers):
            self._at(i * case.period_s / case.num_replicas, self._report, name)
        while self._events[0][0] < self.end_s:
            self.now_s, _, act, args = heapq.heappop(self._events)
            act(*args)
        for server in self.servers.values():
            server.count(0, self.end_s)
            self._waits += [self.end_s - request.arrived_s for request in server.waiting]
        areas = [server.area for server in self.servers.values()]
        return Outcome(
            num_requests=self._num_arrived,
            cold=self._num_cold / self._num_arrived,
            imbalance=max(areas) * len(areas) / sum(areas),
            copies=len(self._pairs) / len({digest for digest, _ in self._pairs}),
            p99_wait_s=sorted(self._waits)[int(0.99 * len(self._waits))],
            throughput=self._num_ended / case.seconds / (SLOTS * case.num_replicas),
        )

    def _at(self, at_s: float, act: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._ids), act, args))

    def _report(self, name: str) -> None:
        """Send what is so now; on average, all requests that are there have the same work left."""
        server = self.servers[name]
        rate = SLOTS * UNITS * server.speed
        tiers = dict.fromkeys(server.cached, "device")
        backlog_s = server.in_flight * UNITS / rate
        told = partial(
            Router.report, name=name, boot_id="1", backlog_s=backlog_s, rate=rate, tiers=tiers
        )
        for router in self.routers:
            self._at(self.now_s + self.case.view_s, told, router)
        self._at(self.now_s + self.case.period_s, self._report, name)

    def _arrive(self) -> None:
        case = self.case
        if case.utilisation < 1:
            rate = case.utilisation * SLOTS * case.num_replicas
            self._at(self.now_s + self._random.expovariate(rate), self._arrive)
        is_measured = self.now_s >= case.warm_s
        digest = f"{case.seed}-{next(self._adapters)}"
        if is_measured and self._random.random() < case.new_share:
            digest = "new"
        target = Target(adapter=digest, units=UNITS, tenant=digest[-2:])  # about a hundred tenants
        router = self._random.choice(self.routers)
        name = router.order(replace(target, adapter=None) if case.is_power_of_two else target)[
            0
        ].name
        router.sent(name, target)
        server = self.servers[name]
        server.count(1, self.now_s)
        load_s = server.load_s(digest, self.now_s, case.max_cached)
        if is_measured:
            self._num_arrived += 1
            self._num_cold += load_s > 0
            self._pairs.add((digest, name))
        self._at(
            self.now_s + load_s, self._loaded, _Request(self.now_s, router, target, name, server)
        )

    def _loaded(self, request: _Request) -> None:
        if request.server.running < SLOTS:
            self._start(request)
        else:
            request.server.waiting.append(request)

    def _start(self, request: _Request) -> None:
        request.server.running += 1
        if request.arrived_s >= self.case.warm_s:
            self._waits.append(self.now_s - request.arrived_s)
        self._at(self.now_s + self._random.expovariate(request.server.speed), self._end, request)

    def _end(self, request: _Request) -> None:
        request.router.ended(request.name, request.target)
        server = request.server
        server.count(-1, self.now_s)
        server.running -= 1
        self._num_ended += self.now_s >= self.case.warm_s
        if server.waiting:
            self._start(server.waiting.popleft())
        if self.case.utilisation >= 1:
            self._arrive()
