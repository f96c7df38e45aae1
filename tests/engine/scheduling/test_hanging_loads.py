"""A load that hangs, as a store does that has lost its network, keeps nobody waiting but those who wait for it."""

from __future__ import annotations

from dataclasses import replace

from simulation import driven
from simulation.adapters import LoadFaults, adapter_ref
from simulation.engine import Simulation
from simulation.scenario import Action, draw
from weft.adapters.ref import AdapterRef
from weft.engine.request import FlowKey, GenerationRequest
from weft.engine.sampling_params import SamplingParams
from weft.engine.scheduling.request_table import MAX_BYPASSES

PINNED, LARGE, SMALL, HANGING = (adapter_ref(index, "t0") for index in range(4))
SOON_S = 10.0


def arrival(at_s: float, request_id: str, num_tokens: int, adapter: AdapterRef) -> Action:
    request = GenerationRequest(
        request_id=request_id,
        prompt_token_ids=list(range(1, num_tokens + 1)),
        params=SamplingParams(max_tokens=1, temperature=0.0),
        adapter=adapter,
        flow=FlowKey(tenant="t0"),
    )
    return Action(at_s=at_s, verb="submit", request=request)


def test_it_does_not_keep_a_stall_from_being_resolved() -> None:
    """A request lacks pages for good, as an adapter is pinned, and the hold on its own adapter keeps the next one out.

    Nobody waits any more for the load that hangs.
    """
    scenario = replace(
        draw(0),
        num_pages=10,
        page_tokens=4,
        num_groups=1,
        host_pages=12,
        slots=6,
        max_running=4,
        step_tokens=48,
        load_threads=2,
        policy="fcfs",
        step_raises=0.0,
        unsound=0.0,
        faults=LoadFaults(),
        adapters={PINNED.digest: 3, LARGE.digest: 3, SMALL.digest: 1, HANGING.digest: 1},
        actions=[
            Action(at_s=0.0, verb="pin", adapter=PINNED),
            arrival(2.0, "given up", 4, HANGING),
            Action(at_s=2.5, verb="abort", request_id="given up"),
            arrival(2.5, "too large beside the pin", 18, LARGE),
            arrival(2.6, "small", 3, SMALL),
        ],
    )
    simulation = Simulation(scenario)
    simulation.loader.hanging.add(HANGING.digest)
    ended_s: dict[str, float] = {}
    simulation.on_event = lambda _: [
        ended_s.setdefault(request_id, simulation.time.now_s)
        for request_id, life in simulation.lives.items()
        if life.has_ended
    ]
    simulation.run()
    assert simulation.lives["small"].outputs[-1].finish_reason == "length"
    assert ended_s["small"] < SOON_S


def test_a_request_that_was_overtaken_often_enough_waits_for_the_store_like_others() -> None:
    simulator = driven.Simulator()
    simulator.store.ticks = 1 << 30
    simulator.scheduler.submit(driven.request("unread", ref=driven.adapter("a")))
    simulator.pump()
    simulator.scheduler.table.requests["unread"].num_bypasses = MAX_BYPASSES
    simulator.scheduler.submit(driven.request("base"))
    for _ in range(20):
        simulator.pump()
    assert simulator.last("base").finish_reason == "length"
