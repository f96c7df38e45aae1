"""A model of an engine and its clients in virtual time, to try the gate under overload without a server or sleeping.

The engine computes steps of up to `ROWS` rows and about `STEP_UNITS`, shared fairly among tenants by weight and first
come first served inside a tenant. A step takes as long as its units; nothing else costs time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from manylora.engine.fairness.service import Prices, TenantLoad
from manylora.engine.status import EngineLoad
from manylora.errors import CapacityError, RateLimitError
from manylora.server.limits.gate import Admission, Gate
from manylora.server.limits.prediction import AdmissionRequest

CAPACITY = 4000.0
"""Units per second that the engine computes."""
MAX_WAIT_S = 10.0
PROMPT = OUTPUT = 100
"""Tokens of a prompt, and about so many of an answer."""
ROWS = 64
STEP_UNITS = 512.0
REPORT_S = 0.1
RATE_SPAN_S = 1.0


@dataclass(eq=False)
class Client:
    """One request of somebody, with how often it was tried and what became of it."""

    tenant: str
    key: int
    output: int
    manner: str
    """honest: comes back when told; impatient: after a second, whatever it is told; once: never; half: after half."""
    arrived_s: float
    tries: int = 0
    told_s: list[float] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    admitted_s: float | None = None
    ttft_s: float | None = None
    """Since it was let in."""
    left: int = 0
    is_started: bool = False
    admission: Admission | None = None


class ModelEngine:
    """Computes steps for the tenants that share it."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.prices = Prices()
        self.weights = weights
        self.requests: dict[str, list[Client]] = {}
        self.served: dict[str, float] = defaultdict(float)
        self.recent: list[tuple[float, str, float]] = []
        self.load: EngineLoad | None = None
        self.units: dict[str, float] = defaultdict(float)

    def submit(self, client: Client) -> None:
        if not self.requests.get(client.tenant):
            active = [self.served[name] for name, waiting in self.requests.items() if waiting]
            last = max(self.served.values(), default=0.0)
            self.served[client.tenant] = max(self.served[client.tenant], min(active, default=last))
        self.requests.setdefault(client.tenant, []).append(client)

    def step(self, now_s: float) -> tuple[float, list[Client], list[Client]]:
        """Seconds that the step takes, who got a first output, and who ended."""
        chosen: list[Client] = []
        taken: Counter[str] = Counter()
        spent: dict[str, float] = defaultdict(float)
        while len(chosen) < ROWS and sum(spent.values()) < STEP_UNITS:
            waiting = [name for name, there in self.requests.items() if taken[name] < len(there)]
            if not waiting:
                break
            name = min(waiting, key=lambda name: (self.served[name] / self.weights[name], name))
            client = self.requests[name][taken[name]]
            taken[name] += 1
            cost = self.prices.output + (PROMPT + client.output - client.left) * self.prices.context
            if not client.is_started:
                cost += PROMPT * (self.prices.prompt + self.prices.prompt_context * PROMPT / 2)
            self.served[name] += cost
            spent[name] += cost
            chosen.append(client)
        first = [client for client in chosen if not client.is_started]
        for client in chosen:
            client.is_started = True
            client.left -= 1
        ended = [client for client in chosen if not client.left]
        for client in ended:
            self.requests[client.tenant].remove(client)
        seconds = sum(spent.values()) / CAPACITY
        self.recent += [(now_s + seconds, name, units) for name, units in spent.items()]
        for name, units in spent.items():
            self.units[name] += units
        return seconds, first, ended

    def report(self, now_s: float) -> None:
        self.recent = [entry for entry in self.recent if entry[0] > now_s - RATE_SPAN_S]
        rates: dict[str, float] = defaultdict(float)
        for _, name, units in self.recent:
            rates[name] += units / RATE_SPAN_S
        self.load = EngineLoad(
            rate=CAPACITY,
            rows=ROWS,
            tenants={
                name: TenantLoad(weight=self.weights[name], rate=rates[name])
                for name, there in self.requests.items()
                if there
            },
        )


@dataclass(kw_only=True)
class Traffic:
    """Poisson arrivals of one tenant."""

    tenant: str
    per_s: float
    start_s: float = 0.0
    end_s: float = 60.0
    manner: Callable[[random.Random], str] = lambda _: "honest"
    same_body: bool = False
    """All of them send the same body."""


class Overload:
    """Runs traffic against a gate before a model engine."""

    def __init__(self, traffic: list[Traffic]) -> None:
        self.now_s = 1000.0
        self.engine = ModelEngine(dict.fromkeys((one.tenant for one in traffic), 1.0))
        self.engine.report(self.now_s)
        self.gate = Gate(MAX_WAIT_S, 4096, lambda: self.engine.load, lambda: self.now_s)
        self.clients: list[Client] = []
        self._draw = random.Random(1)
        self.traffic = traffic
        self.events: list[tuple[float, int, Client]] = []
        self._numbers = itertools.count()

    def run(self, seconds: float) -> None:
        """Let everybody come, and compute, for so long."""
        begin_s = self.now_s
        for one in self.traffic:
            at_s = begin_s + one.start_s
            while (at_s := at_s + self._draw.expovariate(one.per_s)) < begin_s + one.end_s:
                number = next(self._numbers)
                client = Client(
                    tenant=one.tenant,
                    key=hash(one.tenant) if one.same_body else number,
                    output=max(1, round(self._draw.lognormvariate(0, 0.6) * OUTPUT / 1.2)),
                    manner=one.manner(self._draw),
                    arrived_s=at_s,
                )
                self.clients.append(client)
                heapq.heappush(self.events, (at_s, number, client))
        next_report_s = self.now_s
        while self.now_s < begin_s + seconds:
            while self.events and self.events[0][0] <= self.now_s:
                self._try(heapq.heappop(self.events)[2])
            if self.now_s >= next_report_s:
                self.engine.report(self.now_s)
                next_report_s = self.now_s + REPORT_S
            took_s, first, ended = self.engine.step(self.now_s)
            self.now_s += took_s or 0.005
            for client in first:
                assert client.admission is not None
                assert client.admitted_s is not None
                client.ttft_s = self.now_s - client.admitted_s
                client.admission.started(client.ttft_s)
            for client in ended:
                assert client.admission is not None
                client.admission.finished(PROMPT, PROMPT, client.output)
                client.admission.end()

    def _try(self, client: Client) -> None:
        client.tries += 1
        try:
            client.admission = self.gate.admit(
                AdmissionRequest(
                    tenant=client.tenant,
                    name=client.tenant,
                    weight=self.engine.weights[client.tenant],
                    adapter=None,
                    num_bytes=4 * PROMPT,
                    num_choices=1,
                    max_tokens=4096,
                    deadline_s=None,
                    key=client.key,
                )
            )
        except (RateLimitError, CapacityError) as error:
            client.codes.append(error.code)
            client.told_s.append(error.retry_after_s or 0.0)
            again_s = {
                "honest": client.told_s[-1],
                "impatient": 1.0,
                "half": client.told_s[-1] / 2 if client.tries == 1 else None,
            }.get(client.manner)
            if again_s is not None and client.tries < 20:
                heapq.heappush(self.events, (self.now_s + again_s, next(self._numbers), client))
        else:
            client.admitted_s = self.now_s
            client.left = client.output
            self.engine.submit(client)
