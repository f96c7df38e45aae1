from __future__ import annotations

import random
from collections import Counter

import pytest

from manylora.engine.fairness.fair_order import MAX_STOPPED_PER_ROW, FairOrder
from manylora.engine.fairness.inner_order import AT_THE_FRONT, MAX_PAUSE_S, InnerOrder, Mlfq
from manylora.engine.fairness.shares import MAX_IDLE_SHARES, FairPlace, FairShare, Flow
from manylora.engine.request import FlowKey
from simulation.driven import Simulator, adapter, request

pytestmark = pytest.mark.no_cover

QUANTUM = 10.0


class Crowd:
    """An order and the requests in it, numbered by arrival."""

    def __init__(
        self, policy: str = "fair", num_rows: int = 64, inner: InnerOrder | None = None
    ) -> None:
        self.order = FairOrder(policy, inner or InnerOrder(), QUANTUM, num_rows)  # type: ignore[arg-type]
        self._arrivals = 0

    def arrive(
        self,
        tenant: str = "t",
        ref: str | None = None,
        *,
        lane: int = 0,
        weight: float = 1.0,
        priority: int = 0,
    ) -> FairPlace:
        self._arrivals += 1
        flow = FlowKey(tenant=tenant, lane=lane, weight=weight, priority=priority)
        place = FairPlace(
            request_id=f"r{self._arrivals}",
            key=flow,
            arrival_index=self._arrivals,
            arrived_s=0.0,
            adapter=ref,
            num_prompt=5,
            priority=priority,
        )
        self.order.enter(place)
        return place

    def run(self, *tenants: str) -> list[FairPlace]:
        """One request in the step for each name."""
        places = [self.arrive(tenant) for tenant in tenants]
        for place in places:
            self.order.start(place)
        return places

    def counter(self, tenant: str) -> float:
        return self.order.root.children[0].children[tenant].counter

    def line(self, limit: int = 100) -> list[float]:
        return [place.arrival_index for place in self.order.candidates(limit)]


def least(share: FairShare) -> FairShare | None:
    """The child that is next, found by a look at each."""
    children = [
        child for child in share.children.values() if child.num_queued and not child.is_closed
    ]
    return min(
        children,
        key=lambda child: (
            child.queue[child.cursor][1].priority
            if isinstance(child, Flow) and child.cursor < child.num_queued
            else 0,
            child.counter + child.quantum * (child.rows + child.promised + 1) / child.weight,
            child.ticket,
        ),
        default=None,
    )


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_the_child_that_is_first_is_the_least(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`first` looks only at children that have changed."""
    first = FairShare.first
    num_asked = Counter[bool]()

    def checked(share: FairShare) -> FairShare | None:
        found = first(share)
        assert found is least(share)
        num_asked[len(share.children) > 1] += 1
        return found

    monkeypatch.setattr(FairShare, "first", checked)
    draw, crowd = random.Random(seed), Crowd()
    running: list[FairPlace] = []
    for _ in range(60):
        for _ in range(draw.randrange(4)):
            tenant, ref, priority = (
                draw.choice("abcdef"),
                draw.choice([None, "x", "y"]),
                draw.choice([0, 0, 0, -1]),
            )
            weight = draw.choice([1.0, 3.0])
            crowd.arrive(tenant, ref, lane=draw.randrange(2), weight=weight, priority=priority)
        line = crowd.order.candidates(draw.randrange(1, 12))
        looked: list[FairPlace] = []
        for place in line:
            looked.append(place)
            if draw.random() < 0.3:
                crowd.order.pass_over(draw.choice(looked))
            elif draw.random() < 0.3:
                crowd.order.start(place)
                running.append(place)
        crowd.order.charge([(place, draw.uniform(0, 40)) for place in running])
        for place in draw.sample(running, min(len(running), draw.randrange(3))):
            running.remove(place)
            (crowd.order.stop if draw.random() < 0.5 else crowd.order.leave)(place)
    assert num_asked[True] > 100


def test_within_an_adapter_requests_go_by_priority_then_the_preempted_then_arrival() -> None:
    crowd = Crowd()
    crowd.arrive()
    preempted = crowd.arrive()
    crowd.arrive(priority=-1)
    crowd.order.leave(preempted)
    preempted.has_started = True
    crowd.order.enter(preempted)
    assert crowd.line() == [3, 2, 1]
    assert crowd.line(2) == [3, 2]


def test_first_come_first_served_knows_neither_tenants_nor_adapters() -> None:
    crowd = Crowd("fcfs")
    places = [
        crowd.arrive(tenant, ref)
        for tenant, ref in (("a", None), ("a", "x"), ("b", None), ("a", None))
    ]
    crowd.order.start(places[0])
    crowd.order.charge([(places[0], 1000.0)])
    assert crowd.line() == [2, 3, 4]
    assert crowd.order.row_for(places[2]) is None


def test_a_tenants_adapters_share_its_part() -> None:
    crowd = Crowd()
    for ref in ("x", "x", "x", "y"):
        crowd.arrive("a", ref)
    crowd.arrive("b")
    assert crowd.line() == [1, 5, 4, 2, 3]


def test_an_adapter_of_the_flooding_tenant_takes_a_row_from_its_other_adapter() -> None:
    crowd = Crowd()
    flood = [crowd.arrive("a", "x") for _ in range(4)]
    quiet = crowd.run("b")
    for place in flood:
        crowd.order.start(place)
    other = crowd.arrive("a", "y")
    assert crowd.order.row_for(other) is flood[-1]
    assert crowd.order.row_for(crowd.arrive("a", "x")) is None
    assert quiet[0].has_row


def test_rows_do_not_change_hands_for_less_than_a_quantum() -> None:
    crowd = Crowd()
    (row,) = crowd.run("a")
    crowd.order.charge([(row, QUANTUM)])
    other = crowd.arrive("b")  # lifted to the row's counter
    assert crowd.order.row_for(other) is None
    crowd.order.charge([(row, QUANTUM - 1)])
    assert crowd.order.row_for(other) is None
    crowd.order.charge([(row, 1.0)])
    assert crowd.order.row_for(other) is row


def test_the_more_were_stopped_the_longer_a_turn_is() -> None:
    crowd = Crowd(num_rows=4)
    first, *stopped = crowd.run("a", "a", "a")
    for place in stopped:
        crowd.order.stop(place)
    other = crowd.arrive("b")
    crowd.order.charge([(first, 2 * QUANTUM - 1)])
    assert crowd.order.row_for(other) is None, (
        "half as many were stopped as there are rows: a turn is twice as long"
    )
    crowd.order.charge([(first, 1.0)])
    assert crowd.order.row_for(other) is first
    for place in crowd.run("c", "c"):
        crowd.order.stop(place)
    crowd.order.charge([(first, 1e9)])
    assert crowd.order.row_for(other) is None, (
        "as many were stopped as there are rows: who has begun ends first"
    )


def test_where_fewer_fit_than_there_are_rows_those_that_began_end_first() -> None:
    crowd = Crowd(num_rows=64)
    first, *_ = crowd.run(*"abcdefghi")
    for place in crowd.run(*"jklm"):
        crowd.order.stop(place)
    other = crowd.arrive("z")
    crowd.run("n")
    crowd.order.charge([(first, 5 * QUANTUM - 1)])
    assert crowd.order.row_for(other) is None, (
        "four were stopped beside ten: a turn is five times as long"
    )
    crowd.order.charge([(first, 2.0)])
    assert crowd.order.row_for(other) is first


def test_a_request_that_must_make_progress_keeps_its_row() -> None:
    crowd = Crowd()
    flood = crowd.run("a", "a", "a")
    flood[-1].is_protected = True
    assert crowd.order.row_for(crowd.arrive("b")) is flood[1]


def test_a_tenants_own_priorities_come_before_the_shares_of_its_adapters_and_no_others() -> None:
    crowd = Crowd()
    (theirs,) = crowd.run("b")
    ours = crowd.arrive("a", "x", priority=5)
    crowd.order.start(ours)
    urgent = crowd.arrive("a", "y", priority=-5)
    assert crowd.order.row_for(urgent) is ours
    crowd.order.leave(ours)
    assert crowd.order.row_for(urgent) is None, "a priority is no claim on another tenant"
    assert theirs.has_row
    later = crowd.arrive("a", "x")
    assert crowd.line() == [urgent.arrival_index, later.arrival_index]


def test_a_request_of_low_priority_takes_no_row_from_its_tenants_urgent_ones() -> None:
    crowd = Crowd()
    urgent = [crowd.arrive("a", "x", priority=-1) for _ in range(4)]
    for place in urgent:
        crowd.order.start(place)
    crowd.order.charge([(place, 1000.0) for place in urgent])
    assert crowd.order.row_for(crowd.arrive("a", "y")) is None


def test_a_priority_keeps_no_row_from_another_tenant() -> None:
    crowd = Crowd()
    flood = [crowd.arrive("a", priority=-1) for _ in range(4)]
    for place in flood:
        crowd.order.start(place)
    crowd.order.charge([(place, 1000.0) for place in flood])
    assert crowd.order.row_for(crowd.arrive("b")) is flood[-1]


def test_where_nobody_is_active_the_last_leaver_counts() -> None:
    crowd = Crowd()
    (runs,) = crowd.run("busy")
    crowd.order.charge([(runs, 1000.0)])
    crowd.order.leave(runs)
    crowd.arrive("new")
    crowd.arrive("busy")
    assert crowd.counter("new") == crowd.counter("busy") == 1000.0


def test_counters_of_idle_tenants_are_bounded() -> None:
    crowd = Crowd()
    crowd.run("always")
    for index in range(2 * MAX_IDLE_SHARES):
        place = crowd.arrive(f"t{index}")
        crowd.order.leave(place)
    assert len(crowd.order.check()) == 1
    lane = crowd.order.root.children[0]
    assert len(lane.idle) <= MAX_IDLE_SHARES
    assert len(lane.ready) <= 4 * len(lane.children) + 65


def test_an_interactive_request_takes_a_row_of_a_batch() -> None:
    crowd = Crowd()
    rows = [crowd.arrive("b", lane=1) for _ in range(8)]
    for place in rows:
        crowd.order.start(place)
    crowd.order.charge([(place, 100.0) for place in rows])
    assert crowd.order.row_for(crowd.arrive("a")) is rows[-1]


def test_passed_over_adapters_are_left_out_for_one_plan() -> None:
    crowd = Crowd()
    for ref in ("x", "x", "y"):
        crowd.arrive("a", ref)
    seen = []
    for place in crowd.order.candidates(10):
        seen.append(place.arrival_index)
        if place.arrival_index == 1:
            crowd.order.pass_over(place)
    assert seen == [1, 3]
    assert crowd.line() == [1, 3, 2]


@pytest.mark.parametrize("num_adapters", [1, 200])
def test_a_tenant_whose_adapters_never_load_keeps_nobody_else_from_being_looked_at(
    num_adapters: int,
) -> None:
    simulator = Simulator(num_pages=400, max_running=8, step_tokens=32, checked=False)
    simulator.store.ticks = 1 << 30
    for index in range(200):
        ref = adapter(f"hangs{index % num_adapters}")
        simulator.submit(request(f"h{index}", ref=ref, flow=FlowKey(tenant="hangs")))
    for index in range(400):
        simulator.submit(request(f"b{index}", prompt=4, max_tokens=20, flow=FlowKey(tenant="busy")))
    simulator.pump(1200)
    assert (
        sum(outputs[-1].finish_reason == "length" for outputs in simulator.outputs.values()) == 400
    )


def flood(simulator: Simulator, name: str, count: int, lane: int = 0) -> None:
    for index in range(count):
        flow = FlowKey(tenant=name, lane=lane)
        simulator.submit(request(f"{name}{index}", prompt=4, max_tokens=100, flow=flow))


def served(simulator: Simulator, name: str, num_steps: int) -> float:
    tenants = simulator.scheduler.table.service.tenants
    before = tenants[name].service if name in tenants else 0.0
    simulator.pump(num_steps)
    return tenants[name].service - before


def roomy() -> Simulator:
    return Simulator(
        num_pages=1500, max_running=8, step_tokens=64, checked=False, max_model_len=4000
    )


@pytest.mark.parametrize("burst", ["modest", "newcomer"])
def test_a_modest_tenant_earns_no_credit_for_itself_or_a_newcomer(burst: str) -> None:
    simulator = roomy()
    simulator.submit(request("m", prompt=4, max_tokens=3000, flow=FlowKey(tenant="modest")))
    flood(simulator, "flood", 150)
    served(simulator, "flood", 500)
    flood(simulator, burst, 100)
    served(simulator, "flood", 100)  # what it left to others is settled within a quantum a row
    assert served(simulator, "flood", 400) > 0.4 * 400 * 2 * 8 * 0.9


def test_a_batch_that_had_an_idle_engine_still_has_its_twentieth() -> None:
    simulator = roomy()
    simulator.submit(request("m", prompt=4, max_tokens=3000, flow=FlowKey(tenant="modest")))
    flood(simulator, "batch", 200, lane=1)
    served(simulator, "batch", 400)
    flood(simulator, "flood", 150)
    served(simulator, "batch", 200)
    share = served(simulator, "batch", 600) / (600 * 2 * 8)
    assert 0.03 < share < 0.1


def test_a_batch_has_its_part_of_the_tokens_beside_prompts_without_end() -> None:
    simulator = Simulator(num_pages=400, max_running=4, step_tokens=16, checked=False)
    for index in range(300):
        simulator.submit(
            request(f"i{index}", prompt=200, max_tokens=1, flow=FlowKey(tenant="interactive"))
        )
    simulator.submit(
        request("batch", prompt=20, max_tokens=4, flow=FlowKey(tenant="batch", lane=1))
    )
    simulator.pump(1000)
    assert simulator.last("batch").finish_reason == "length"
    assert len(simulator.scheduler.table.waiting) > 100


def test_a_load_is_charged_once_however_many_wait_for_it() -> None:
    def service(count: int, ref_pages: int) -> float:
        simulator = Simulator(
            num_pages=400,
            max_running=8,
            step_tokens=64,
            adapter_pages=ref_pages,
            has_prefixes=False,
        )
        for index in range(count):
            flow = FlowKey(tenant="t", lane=index % 2)
            simulator.submit(request(f"r{index}", ref=adapter("x"), flow=flow))
        simulator.run()
        return simulator.scheduler.table.service.tenants["t"].service

    price = service(1, 20) - service(1, 10)
    assert price > 0
    assert service(8, 20) - service(8, 10) == pytest.approx(price)


def test_a_request_that_is_looked_at_out_of_turn_settles_nothing() -> None:
    crowd = Crowd()
    flood = crowd.run(*"aaaa")
    crowd.order.charge([(place, 500.0) for place in flood])
    newcomer, more = crowd.arrive("b"), crowd.arrive("a")
    assert crowd.order.row_for(more) is None
    assert [
        place for place in crowd.order.candidates(1) if crowd.order.row_for(place) is flood[-1]
    ] == [newcomer]


def test_a_request_that_loses_its_row_while_others_are_looked_at_shows_none_of_them_twice() -> None:
    crowd = Crowd()
    (row,) = crowd.run("a")
    crowd.arrive("a")
    crowd.arrive("a")
    seen = []
    for place in crowd.order.candidates(10):
        seen.append(place.arrival_index)
        if place.arrival_index == 2:
            crowd.order.stop(row)
    assert seen == [2, 3]


def test_a_heavier_tenant_takes_a_row_though_a_lighter_one_before_it_may_not() -> None:
    crowd = Crowd()
    (row,) = crowd.run("runs")
    light, heavy = crowd.arrive("light"), crowd.arrive("heavy", weight=4.0)
    crowd.order.charge([(row, 16.0), (light, 10.0), (heavy, 4 * 19.5)])
    taken = {place.key.tenant: crowd.order.row_for(place) for place in crowd.order.candidates(10)}
    assert list(taken.items()) == [("light", None), ("heavy", row)]


def test_a_tenant_without_rows_takes_one_though_another_before_it_has_too_many() -> None:
    crowd = Crowd(num_rows=4)
    many, few, *paused = crowd.run("many", "few", "many", "many", "many", "many")
    for place in paused:
        crowd.order.stop(
            place
        )  # as many are paused as there are rows: only who has more rows gives one up
    crowd.run("many", "many")
    new = crowd.arrive("new")
    crowd.order.charge([(many, 0.0), (few, 300.0), (new, 10.0)])
    assert crowd.order.row_for(paused[0]) is None
    assert crowd.order.row_for(new) is not None


def test_who_gives_pages_up_is_counted_as_if_those_before_had_done_so() -> None:
    crowd = Crowd()
    flood = crowd.run(*"aaaa")
    newcomer = crowd.arrive("b")
    assert list(crowd.order.yielding(newcomer, reversed(flood))) == [flood[3], flood[2], flood[1]]
    assert list(crowd.order.yielding(flood[0], [newcomer])) == []


def low_and_running(crowd: Crowd, count: int) -> list[FairPlace]:
    """Requests in the step that have used up the quantum of their first level."""
    rows = crowd.run(*["t"] * count)
    crowd.order.charge([(row, 64.0) for row in rows])
    return rows


def test_short_requests_take_rows_from_long_ones_only_until_so_many_wait_to_have_theirs_back() -> (
    None
):
    crowd = Crowd(num_rows=4, inner=Mlfq())
    rows = low_and_running(crowd, 4)
    for _ in range(4 * MAX_STOPPED_PER_ROW):
        newcomer = crowd.arrive("t")
        row = crowd.order.row_for(newcomer)
        assert row is not None
        crowd.order.stop(row)
        crowd.order.start(newcomer)
        crowd.order.charge([(newcomer, 64.0)])
    assert crowd.order.row_for(crowd.arrive("t")) is None
    crowd.order.tick(MAX_PAUSE_S)
    back = next(crowd.order.candidates(1))
    assert back in rows
    assert crowd.order.row_for(back) is not None, (
        "one that waited long enough takes a row whatever is paused"
    )


def test_a_request_that_was_long_without_its_row_comes_to_the_front() -> None:
    crowd = Crowd(num_rows=8, inner=Mlfq())
    row, other = low_and_running(crowd, 2)
    crowd.order.tick(0.0)
    crowd.order.stop(row)
    newcomer = crowd.arrive("t")
    crowd.order.tick(MAX_PAUSE_S / 2)
    assert crowd.line() == [newcomer.arrival_index, row.arrival_index]
    crowd.order.tick(MAX_PAUSE_S)
    assert row.standing.level == AT_THE_FRONT
    assert crowd.line() == [row.arrival_index, newcomer.arrival_index]
    assert crowd.order.row_for(row) is other
