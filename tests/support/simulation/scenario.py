"""Scenario of one simulation: sizes, settings, faults and clients, all drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from manylora.adapters.ref import AdapterRef
from manylora.engine.fairness.service import Prices
from manylora.engine.request import FlowKey, GenerationRequest
from manylora.engine.sampling_params import SamplingParams
from manylora.memory.eviction import PageCosts
from simulation.adapters import LoadFaults, adapter
from simulation.truth import MAX_MODEL_LEN, VOCAB_SIZE, Truth

Verb = Literal[
    "submit",
    "abort",
    "abort_paused",
    "pin",
    "unpin",
    "delete",
    "lose",
    "restore",
    "freeze",
    "thaw",
    "jump",
]


@dataclass(frozen=True, kw_only=True)
class Action:
    """Something done to the engine from outside."""

    at_s: float
    verb: Verb
    request: GenerationRequest | None = None
    request_id: str = ""
    adapter: AdapterRef | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One simulation."""

    seed: int
    num_pages: int
    page_tokens: int
    num_groups: int
    host_pages: int
    max_swap_pages: int
    slots: int
    max_running: int
    step_tokens: int
    load_threads: int
    policy: Literal["fcfs", "fair"]
    inner: Literal["fifo", "shortest", "slack", "mlfq"]
    itl_target_ms: float | None
    prices: Prices
    """The lower an output token's is, the sooner rows change hands."""
    tenants: frozenset[str]
    is_caching: bool
    costs: PageCosts
    token_s: float
    """Seconds that a step takes per token."""
    step_raises: float
    """Share of steps that raise."""
    unsound: float
    """Share of chunks whose scores are no numbers."""
    faults: LoadFaults
    pages_at_once: int = 0
    """Pages of adapters that the engine's own thread may copy between two steps."""
    adapters: dict[str, int] = field(default_factory=dict)
    """Pages by digest."""
    actions: list[Action] = field(default_factory=list)


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    page_tokens, num_groups = rng.choice([2, 4, 4, 8]), rng.choice([1, 1, 2])
    num_pages = min(max(rng.choice([40, 60, 90, 140, 240]) // page_tokens * num_groups, 8), 80)
    is_faulty = rng.random() < 0.4
    copy_s = rng.choice([0.0001, 0.0001, 0.001, 0.05])
    faults = LoadFaults(
        load_s=rng.choice([0.002, 0.02, 0.1]),
        copy_s=rng.choice([0.001, 0.01, 0.04]),
        fails=rng.choice([0.05, 0.2]) if is_faulty else 0.0,
        hangs=rng.choice([0.0, 0.1]) if is_faulty else 0.0,
        copy_fails=rng.choice([0.0, 0.1]) if is_faulty else 0.0,
    )
    tenants = [f"t{index}" for index in range(rng.randint(1, 3))]
    refs = [
        adapter(f"adapter {index}", rng.choice(tenants))
        for index in range(rng.choice([0, 1, 2, 4, 6, 8]))
    ]
    sizes = {
        ref.digest: rng.choice([1, 1, 2, 2, 3, 3, num_pages // 6, num_pages // 3]) for ref in refs
    }
    if refs and rng.random() < 0.2:
        sizes[refs[-1].digest] = num_pages - rng.choice([0, num_groups])
    clients = _Clients(rng, tenants, refs, is_rushed=rng.random() < 0.5)
    return Scenario(
        seed=seed,
        num_pages=num_pages,
        page_tokens=page_tokens,
        num_groups=num_groups,
        host_pages=(host_pages := rng.choice([0, 6, 16, 40])),
        max_swap_pages=rng.choice([0, host_pages // 2, host_pages, host_pages]),
        slots=rng.choice([1, 2, 3, 6]),
        max_running=(max_running := rng.choice([1, 2, 3, 6])),
        step_tokens=max(rng.choice([4, 8, 16, 48]), max_running),
        load_threads=rng.choice([1, 2]),
        policy=rng.choice(["fcfs", "fair", "fair"]),
        inner=rng.choice(["fifo", "fifo", "shortest", "slack", "mlfq", "mlfq"]),
        itl_target_ms=rng.choice([None, None, 5.0]),
        prices=Prices(output=rng.choice([0.05, 0.3, 2.0]), page_load=rng.choice([2.0, 20.0])),
        tenants=frozenset(tenants),
        is_caching=rng.random() < 0.8,
        costs=PageCosts(
            copy_s=copy_s, load_s=faults.load_s, token_s=rng.choice([0.0001, 0.01, 0.1, 0.1])
        ),
        token_s=rng.choice([0.0001, 0.002, 0.01]),
        step_raises=rng.choice([0.0, 0.02, 0.1]) if is_faulty else 0.0,
        unsound=rng.choice([0.0, 0.01]) if is_faulty else 0.0,
        faults=faults,
        adapters=sizes,
        actions=sorted(clients.actions, key=lambda action: action.at_s),
        pages_at_once=rng.choice([0, 0, 2, 8]),
    )


class _Clients:
    """Everything that is asked of the engine from outside."""

    def __init__(
        self, rng: random.Random, tenants: list[str], refs: list[AdapterRef], *, is_rushed: bool
    ) -> None:
        self._rng = rng
        self._tenants = tenants
        self._refs = refs
        self._end_s = 0.05 if is_rushed else 1.0
        self._system_prompts = [
            self._tokens(rng.choice([3, 8, 13, 24])),
            self._tokens(rng.choice([1, 2, 4])) * 8,  # equal blocks after different beginnings
        ]
        self._talks: list[Truth] = []
        """Requests that a later one may go on from."""
        self._num_requests = 0
        self.actions: list[Action] = []
        for _ in range(rng.choice([6, 12, 20, 30])):
            self._add_request()
        for ref in refs:
            self._add_adapter_events(ref)
        for _ in range(rng.choice([0, 0, 1, 4])):
            self.actions.append(Action(at_s=rng.uniform(0, 2 * self._end_s), verb="abort_paused"))
        if rng.random() < 0.3:
            at_s = rng.uniform(0, self._end_s)
            self.actions.append(Action(at_s=at_s, verb="freeze"))
            self.actions.append(Action(at_s=at_s + rng.choice([0.1, 1.0]), verb="thaw"))
        if rng.random() < 0.3:
            self.actions.append(
                Action(
                    at_s=rng.uniform(0, self._end_s), verb="jump", seconds=rng.choice([30.0, 1e7])
                )
            )

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1, VOCAB_SIZE) for _ in range(count)]

    def _add_request(self) -> None:
        rng = self._rng
        tenant, adapter = rng.choice(self._tenants), rng.choice([None, *self._refs])
        prompt = self._tokens(rng.choice([1, 3, 6, 10, 20, 40]))
        at_s = rng.uniform(0, self._end_s)
        kind = rng.random()
        if kind < 0.3 and self._talks:  # the next turn of a talk
            talk = rng.choice(self._talks)
            tenant, adapter = talk.request.flow.tenant, talk.request.adapter
            prompt = talk.tokens + prompt[:4]
        elif kind < 0.4 and self._talks:  # the same once more
            prompt = rng.choice(self._talks).request.prompt_token_ids
        elif kind < 0.7:
            prompt = rng.choice(self._system_prompts) + prompt
        max_tokens = rng.choice([0, 1, 5, 12, 30, 45])
        prompt = prompt[: MAX_MODEL_LEN - max_tokens]
        n = rng.choice([2, 3]) if rng.random() < 0.25 and max_tokens else 1
        first_id = f"r{self._num_requests}"
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=rng.random() < 0.5,
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        )
        lane, priority = int(rng.random() < 0.2), rng.choice([-1, 0, 0, 0, 1])
        deadline_s = rng.choice([0.05, 1.0, 30.0]) if rng.random() < 0.15 else None
        generated = rng.randint(0, max_tokens) if rng.random() < 0.05 and n == 1 else 0
        for choice in range(n):
            request = GenerationRequest(
                request_id=f"r{self._num_requests}",
                prompt_token_ids=prompt,
                params=params,
                adapter=adapter,
                flow=FlowKey(
                    lane=lane,
                    tenant=tenant,
                    weight=rng.choice(
                        [0.5, 1.0, 3.0]
                    ),  # of the tenant, from now on: weights change all the time
                    priority=priority,
                    deadline_s=deadline_s,
                ),
                choice_index=choice,
                fork_of=first_id if choice else None,
            )
            truth = Truth(request)
            if generated:
                request.generated_token_ids[:] = truth.output[
                    : min(generated, len(truth.output) - 1)
                ]
            self._num_requests += 1
            self._talks.append(truth)
            self.actions.append(Action(at_s=at_s, verb="submit", request=request))
            if rng.random() < 0.15:
                abort_s = at_s + rng.choice([0.0, rng.uniform(0, 0.1), rng.uniform(0, 3.0)])
                self.actions.append(
                    Action(at_s=abort_s, verb="abort", request_id=request.request_id)
                )

    def _add_adapter_events(self, ref: AdapterRef) -> None:
        rng = self._rng
        if rng.random() < 0.3:
            at_s = rng.uniform(0, self._end_s)
            self.actions.append(Action(at_s=at_s, verb="pin", adapter=ref))
            if rng.random() < 0.7:
                self.actions.append(
                    Action(at_s=at_s + rng.uniform(0, 1.0), verb="unpin", adapter=ref)
                )
        if rng.random() < 0.1:
            self.actions.append(
                Action(at_s=rng.uniform(0, self._end_s), verb="delete", adapter=ref)
            )
        elif rng.random() < 0.1:
            at_s = rng.uniform(0, self._end_s)
            self.actions.append(Action(at_s=at_s, verb="lose", adapter=ref))
            self.actions.append(
                Action(at_s=at_s + rng.uniform(0, 1.0), verb="restore", adapter=ref)
            )
