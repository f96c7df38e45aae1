"""A paused engine computes nothing, keeps what it has, and goes on where it was."""

from __future__ import annotations

import pytest

from manylora.engine.request import FlowKey
from manylora.engine.sampling_params import BeamParams
from manylora.memory.eviction import PageCosts
from simulation.driven import RECOMPUTES, SWAPS, Simulator, adapter, expected_tokens, request

ADAPTER = adapter("pirate")


def pages(simulator: Simulator) -> dict[str, int]:
    return simulator.core.status().pages


@pytest.mark.parametrize("ref", [None, ADAPTER], ids=["base", "adapter"])
def test_kept_requests_keep_their_pages_and_go_on_with_the_same_tokens(ref: object) -> None:
    simulator = Simulator(load_ticks=1)
    first, second = request("first", max_tokens=30, ref=ref), request("second", max_tokens=9)  # type: ignore[arg-type]
    simulator.submit(first)
    simulator.pump(8)
    simulator.core.pause("keep")
    simulator.submit(second)
    before, steps, so_far = (
        pages(simulator),
        simulator.core.num_steps,
        len(simulator.tokens("first")),
    )
    assert 0 < so_far < 30
    simulator.pump(100)
    assert (pages(simulator), simulator.core.num_steps) == (before, steps)
    assert simulator.core.has_work()
    status = simulator.core.status()
    assert (status.pause, status.running, status.waiting) == ("keep", 1, 1)
    simulator.core.pause("keep")
    simulator.pump(10)
    simulator.core.pause(None)
    simulator.run()
    for each in (first, second):
        assert simulator.tokens(each.request_id) == expected_tokens(each, each.params.max_tokens)
    assert simulator.core.status().pause is None


def test_requests_whose_deadline_passes_end_in_a_paused_engine() -> None:
    simulator = Simulator()
    simulator.core.pause("keep")
    simulator.submit(request("late", flow=FlowKey(deadline_s=5.0)), request("patient"))
    simulator.pump(4)
    assert simulator.outputs == {}
    simulator.pump(4)
    error = simulator.last("late").error
    assert error is not None
    assert error.code == "deadline.queue"
    assert "patient" not in simulator.outputs
    simulator.core.pause(None)
    simulator.run()
    assert simulator.last("patient").finish_reason == "length"


def test_a_deadline_is_kept_though_many_requests_with_one_have_ended() -> None:
    simulator = Simulator()
    simulator.core.pause("keep")
    for number in range(64):
        simulator.submit(request(f"left{number}", flow=FlowKey(deadline_s=100.0)))
        simulator.core.abort(f"left{number}")
    simulator.submit(
        *(request(f"late{number}", flow=FlowKey(deadline_s=5.0)) for number in range(4))
    )
    simulator.pump(8)
    for number in range(4):
        error = simulator.last(f"late{number}").error
        assert error is not None
        assert error.code == "deadline.queue"


def test_waiting_for_the_end_lets_only_what_has_started_go_on() -> None:
    simulator = Simulator(max_running=2)
    started = [request(name, max_tokens=12) for name in ("a", "b")]
    simulator.submit(*started)
    simulator.pump(3)
    later = [request(f"later{number}") for number in range(200)]  # more than a plan looks at
    simulator.submit(*later)
    simulator.core.pause("wait")
    assert simulator.core.status().pause == "wait"
    simulator.pump(60)
    assert set(simulator.outputs) == {"a", "b"}
    assert simulator.core.status().pause == "keep"
    simulator.core.pause("wait")
    simulator.pump(2)
    assert simulator.core.status().pause == "keep"
    simulator.core.pause(None)
    simulator.run()
    for each in (*started, *later):
        assert simulator.tokens(each.request_id) == expected_tokens(each, each.params.max_tokens)


@pytest.mark.parametrize("costs", [SWAPS, RECOMPUTES], ids=["swap", "recompute"])
def test_what_was_preempted_ends_before_the_engine_is_paused(costs: PageCosts) -> None:
    """Also behind more fresh requests than a plan looks at, some of which were overtaken too often already."""
    simulator = Simulator(num_pages=12, step_tokens=64, costs=costs, has_prefixes=False)
    started = [request("old", prompt=18, max_tokens=20), request("new", prompt=18, max_tokens=12)]
    simulator.submit(*started)
    while not simulator.num_preemptions:
        simulator.pump()
    fresh = [
        request(f"fresh{number}", flow=FlowKey(tenant=f"t{number}", weight=100.0))
        for number in range(150)
    ]
    simulator.submit(*fresh)
    for state in list(simulator.scheduler.table.waiting):
        if state.request_id.startswith("fresh"):
            simulator.scheduler.table.waiting.bypass(state, 100)
    simulator.core.pause("wait")
    simulator.pump(200)
    assert set(simulator.outputs) == {"old", "new"}
    for each in started:
        assert simulator.tokens(each.request_id) == expected_tokens(each, each.params.max_tokens)
    assert simulator.core.status().pause == "keep"
    simulator.core.pause(None)
    simulator.run()
    assert {simulator.last(each.request_id).finish_reason for each in fresh} == {"length"}


def test_a_pause_may_end_everything() -> None:
    simulator = Simulator(max_running=4)
    search = request("search", max_tokens=20, beam=BeamParams(width=3))
    simulator.submit(request("running", max_tokens=50), search, request("waiting", max_tokens=50))
    simulator.pump(5)
    for _ in range(2):
        simulator.core.pause("keep", is_ending=True)
    simulator.pump()
    for name in ("running", "search", "waiting"):
        last = simulator.last(name)
        assert last.error is not None
        assert (last.finish_reason, last.error.code, last.error.kind) == (
            "error",
            "server.paused",
            "capacity",
        )
    assert pages(simulator)["kv"] == 0
    simulator.submit(request("next"))
    simulator.pump(5)
    assert "next" not in simulator.outputs
    simulator.core.pause(None)
    simulator.run()
    assert simulator.last("next").finish_reason == "length"


def test_the_prefix_cache_forgets_what_no_request_uses() -> None:
    simulator = Simulator()
    prompt = list(range(40))
    simulator.submit(request("before", prompt))
    simulator.run()
    simulator.submit(request("running", [*range(500, 540)], max_tokens=40))
    simulator.pump(6)
    cached = pages(simulator)["prefix"]
    simulator.core.reset_prefix_cache()
    simulator.core.check()
    held = pages(simulator)["prefix"]
    assert 0 < held < cached
    simulator.run()
    assert simulator.tokens("running") == expected_tokens(
        request("running", [*range(500, 540)]), 40
    )
    simulator.core.reset_prefix_cache()
    assert pages(simulator)["prefix"] == 0
    simulator.submit(request("again", prompt))
    simulator.run()
    assert simulator.outputs["again"][0].cached_tokens == 0
    simulator.core.check()
