"""Preempted requests: by swap or to be computed anew, and what becomes of their pages on the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from manylora.engine.request import FlowKey, GenerationRequest
from manylora.engine.scheduling.preemption import Preemption
from manylora.memory.eviction import PageCosts
from simulation.driven import RECOMPUTES, SWAPS, Simulator, adapter, expected_tokens, request


def pressed(**settings: object) -> tuple[Simulator, list[GenerationRequest]]:
    """A pool in which two requests can start, and which is too small for what they grow to."""
    simulator = Simulator(**{"num_pages": 12, "step_tokens": 64, "costs": SWAPS, **settings})  # type: ignore[arg-type]
    requests = [request("old", prompt=18, max_tokens=20), request("new", prompt=18, max_tokens=12)]
    simulator.submit(*requests)
    return simulator, requests


def until_preempted(simulator: Simulator) -> None:
    while not simulator.num_preemptions:
        simulator.pump()


def finish(simulator: Simulator, requests: list[GenerationRequest]) -> None:
    simulator.run()
    for each in requests:
        assert simulator.last(each.request_id).finish_reason == "length"
        assert simulator.tokens(each.request_id) == expected_tokens(each, each.params.max_tokens)
    assert simulator.swap.num_used == 0
    assert simulator.images.make_room(simulator.slab.num_pages)
    assert simulator.pool.counts()["kv"] == 0
    simulator.core.check()


@pytest.mark.parametrize("has_prefixes", [True, False])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_a_swapped_request_computes_nothing_twice(has_prefixes: bool, num_groups: int) -> None:
    simulator, requests = pressed(
        has_prefixes=has_prefixes, num_groups=num_groups, num_pages=12 * num_groups
    )
    finish(simulator, requests)
    assert simulator.scheduler.table.preemptions == {"swap": 1, "recompute": 0}
    positions = [
        position
        for plan in simulator.runner.plans
        for chunk in plan.chunks
        if chunk.request_id == "new"
        for position in range(chunk.start, chunk.start + len(chunk.token_ids))
    ]
    assert positions == list(range(18 + 12 - 1))
    assert simulator.core.status().preemptions == {"swap": 1, "recompute": 0}


@pytest.mark.parametrize(("copy_s", "how"), [(0.49, "swap"), (0.51, "recompute")])
def test_what_is_cheaper_decides(copy_s: float, how: str) -> None:
    """At 0.5 s a page is as dear to copy twice as the tokens in it are to compute."""
    costs = SimpleNamespace(copy_s=copy_s, load_s=1.0, token_s=1.0)
    simulator, requests = pressed(has_prefixes=False, costs=costs)
    new = simulator.scheduler.table.requests["new"]
    while not simulator.num_preemptions:
        num_tokens = max(new.pages.num_computed, 1)
        costs.token_s = -(-num_tokens // 4) / num_tokens
        simulator.pump()
    assert simulator.scheduler.table.preemptions[how] == 1
    finish(simulator, requests)


def test_a_step_that_only_swaps_computes_nothing() -> None:
    simulator = Simulator(num_pages=8, step_tokens=64, costs=SWAPS, has_prefixes=False)
    requests = [request("old", prompt=16, max_tokens=12), request("new", prompt=13, max_tokens=12)]
    simulator.submit(*requests)
    until_preempted(simulator)
    assert simulator.runner.plans[-1].chunks == []
    assert simulator.core.status().last_steps[-1].requests == 0
    finish(simulator, requests)


@pytest.mark.parametrize("costs", [SWAPS, RECOMPUTES])
def test_a_preempted_request_that_is_aborted_tells_what_was_computed_before(
    costs: PageCosts,
) -> None:
    simulator, (old, _) = pressed(costs=costs, has_prefixes=False)
    until_preempted(simulator)
    simulator.core.abort("new")
    finish(simulator, [old])
    assert simulator.last("new").computed_prompt_tokens == 18


def test_host_pages_of_a_request_aborted_in_mid_step_are_kept_until_its_copies_are_done() -> None:
    simulator, _ = pressed()
    while (plan := simulator.scheduler.plan()) is not None and not plan.swap_out:
        simulator.scheduler.commit(plan, simulator.runner.execute(plan))
        simulator.scheduler.complete(plan.step)
    assert plan is not None
    simulator.core.abort("new")
    assert simulator.swap.num_used == len(plan.swap_out)
    simulator.scheduler.commit(plan, simulator.runner.execute(plan))
    simulator.scheduler.complete(plan.step)
    assert simulator.swap.num_used == 0
    simulator.run()
    assert simulator.last("old").finish_reason == "length"


def test_a_plan_that_fails_loses_no_host_page_and_leaves_no_page_in_quarantine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other, _ = pressed()
    until_preempted(other)
    simulator, (_, new) = pressed()
    simulator.pump(other.core.num_steps - 1)  # the next plan preempts
    with monkeypatch.context() as broken:
        broken.setattr(Preemption, "room_to_grow", lambda _: 1 / 0)
        simulator.pump()
    assert simulator.scheduler.table.preemptions["swap"] == 1
    assert simulator.last("old").finish_reason == "error"
    assert (simulator.swap.num_used, simulator.pool.num_quarantined) == (0, 0)
    finish(simulator, [new])


def test_cached_blocks_that_others_share_are_not_swapped() -> None:
    simulator = Simulator(num_pages=14, step_tokens=64, costs=SWAPS)
    prompt = [100 + i for i in range(16)]
    requests = [request("old", [*prompt, 1], 28), request("new", [*prompt, 2], 20)]
    simulator.submit(requests[0])
    simulator.pump()
    simulator.submit(requests[1])
    until_preempted(simulator)
    num_blocks = -(-simulator.scheduler.table.requests["new"].pages.num_computed // 4)
    assert len(simulator.runner.plans[-1].swap_out) == num_blocks - 4
    finish(simulator, requests)
    assert simulator.scheduler.table.preemptions == {"swap": 1, "recompute": 0}
    assert sum(len(plan.swap_in) for plan in simulator.runner.plans) > 0


def test_trying_in_vain_to_return_is_no_use_of_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator(num_pages=12, load_ticks=1, costs=RECOMPUTES)
    simulator.submit(request("old", prompt=8, max_tokens=30))
    simulator.submit(request("new", prompt=8, max_tokens=30, ref=adapter("a")))
    release = simulator.residency.release
    steps: list[int] = []

    def note(digest: str, last_step: int = 0) -> None:
        steps.append(last_step)
        release(digest, last_step)

    monkeypatch.setattr(simulator.residency, "release", note)
    simulator.run()

    runs = sum(simulator.scheduler.table.preemptions.values()) + 1
    assert runs > 1
    assert steps.count(0) > 0
    assert len(steps) - steps.count(0) == runs


@pytest.mark.parametrize("on_host", [True, False])
def test_an_adapter_of_known_size_comes_only_when_there_are_pages_for_its_request(
    on_host: bool,
) -> None:
    simulator = Simulator(
        num_pages=12, max_running=2, load_ticks=1, step_tokens=64, adapter_pages=2
    )
    (simulator.put_on_host if on_host else simulator.know)(adapter("a"))
    simulator.submit(
        request("runs", prompt=8, max_tokens=24)
    )  # 2 pages, 8 in the end: less than a quantum
    simulator.submit(request("waits", prompt=36, max_tokens=2, ref=adapter("a")))  # 2 pages and 9
    while not simulator.outputs.get("runs") or simulator.last("runs").finish_reason is None:
        assert simulator.num_holds == 0
        simulator.pump()
    simulator.run()
    assert simulator.num_preemptions == 0
    assert simulator.tokens("waits") == expected_tokens(request("waits", 36, ref=adapter("a")), 2)


def test_an_adapter_of_unknown_size_is_read_at_once() -> None:
    simulator = Simulator(
        num_pages=16, max_running=2, load_ticks=1, step_tokens=128, adapter_pages=2
    )
    simulator.submit(request("runs", prompt=16, max_tokens=16))  # 4 pages
    simulator.submit(
        request("waits", prompt=50, max_tokens=2, ref=adapter("a"))
    )  # 13 pages, without the adapter
    simulator.pump()
    assert simulator.num_holds == 1
    simulator.run()


def test_adapters_that_come_together_leave_pages_for_the_requests_of_all_of_them() -> None:
    simulator = Simulator(num_pages=11, max_running=3, step_tokens=64, adapter_pages=2)
    simulator.know(adapter("a"), adapter("b"))
    simulator.submit(request("runs", prompt=8, max_tokens=16))  # 2 pages
    for name in ("a", "b"):
        simulator.submit(request(name, prompt=16, max_tokens=2, ref=adapter(name)))  # 2 pages and 4
    simulator.pump()
    assert simulator.num_holds == 1
    simulator.run()


def test_who_cannot_start_yet_keeps_no_smaller_request_behind_it_from_its_adapter() -> None:
    simulator = Simulator(num_pages=13, max_running=3, step_tokens=64, adapter_pages=2)
    simulator.put_on_host(adapter("a"), adapter("b"))
    simulator.submit(request("runs", prompt=8, max_tokens=24))
    simulator.submit(request("large", prompt=40, max_tokens=2, ref=adapter("a")))
    simulator.submit(request("small", prompt=4, max_tokens=2, ref=adapter("b")))
    ended: list[str] = []
    while len(ended) < 3:
        ended += [
            output.request_id for output in simulator.pump() if output.finish_reason is not None
        ]
    assert ended == ["small", "runs", "large"]
    assert simulator.num_preemptions == 0


@pytest.mark.parametrize("on_host", [True, False])
def test_small_requests_pass_one_that_lacks_pages_for_its_adapter_only_so_often(
    on_host: bool,
) -> None:
    simulator = Simulator(
        num_pages=20, max_running=8, load_ticks=1, step_tokens=64, adapter_pages=2, policy="fcfs"
    )
    (simulator.put_on_host if on_host else simulator.know)(adapter("a"))
    simulator.submit(request("runs", prompt=8, max_tokens=9))
    simulator.submit(request("large", prompt=66, max_tokens=2, ref=adapter("a")))  # 2 pages and 17
    ended: list[str] = []
    for number in range(200):
        simulator.submit(request(f"small-{number}", prompt=12, max_tokens=6))
        ended += [
            output.request_id for output in simulator.pump() if output.finish_reason is not None
        ]
    assert "large" in ended
    simulator.run()


def test_a_tenant_behind_its_share_gets_an_adapter_from_the_host_and_pages_beside_a_flood_at_once() -> (
    None
):
    simulator = Simulator(
        num_pages=64, max_running=16, step_tokens=256, adapter_pages=4, costs=RECOMPUTES
    )
    simulator.put_on_host(adapter("a"))
    flood = [
        request(f"flood-{i}", prompt=12, max_tokens=200, flow=FlowKey(tenant="flood"))
        for i in range(12)
    ]
    simulator.submit(*flood)
    simulator.pump(20)
    before = simulator.num_preemptions
    quiet = request(
        "quiet", prompt=120, max_tokens=4, ref=adapter("a"), flow=FlowKey(tenant="quiet")
    )
    simulator.submit(quiet)
    simulator.pump(8)
    assert simulator.last("quiet").finish_reason is not None
    assert simulator.num_preemptions - before <= len(flood)


def test_a_running_request_that_lacks_pages_leaves_loads_alone_that_have_none() -> None:
    simulator = Simulator(
        num_pages=4, max_running=2, load_ticks=40, adapter_pages=2, costs=RECOMPUTES
    )
    simulator.submit(request("old", prompt=4, max_tokens=9))
    simulator.submit(request("new", prompt=4, max_tokens=9))
    simulator.submit(request("waits", prompt=4, max_tokens=2, ref=adapter("a")))
    while simulator.num_preemptions == 0:
        simulator.pump()
        assert simulator.num_holds == 1
    simulator.run()


def test_a_running_request_takes_the_adapter_of_the_newest_that_waits_and_leaves_the_others() -> (
    None
):
    simulator = Simulator(num_pages=32, max_running=1, load_ticks=1, adapter_pages=2, policy="fcfs")
    simulator.submit(request("old", prompt=8, max_tokens=121))  # 32 pages in the end
    names = ("a", "b", "c")
    for name in names:
        simulator.submit(request(name, prompt=4, max_tokens=2, ref=adapter(name)))
    resident = []
    while not simulator.outputs.get("old") or simulator.last("old").finish_reason is None:
        simulator.pump()
        resident.append(
            [name for name in names if simulator.residency.state(adapter(name).digest) == "device"]
        )
    order = [
        there for index, there in enumerate(resident) if index == 0 or there != resident[index - 1]
    ]
    assert order[-4:] == [["a", "b", "c"], ["a", "b"], ["a"], []]
    assert simulator.num_preemptions == 0
    simulator.run()


def test_a_paused_request_that_loses_its_pages_keeps_its_place_in_the_queue() -> None:
    simulator = Simulator(num_pages=64, max_running=2, step_tokens=64)
    requests = [
        request(name, prompt=20, max_tokens=60, flow=FlowKey(tenant=name)) for name in "abcd"
    ]
    simulator.submit(*requests)
    table = simulator.scheduler.table
    while not table.paused:
        simulator.pump()
    (state, *_) = table.paused
    before = (state.place.queue_key, state.place.standing.stopped_s, table.order.num_queued)
    simulator.scheduler._preemption.preempt(state, None)
    assert (state.status, state.place.has_row) == ("waiting", False)
    assert state not in table.paused
    assert (state.place.queue_key, state.place.standing.stopped_s, table.order.num_queued) == before
    simulator.core.check()
    finish(simulator, requests)
