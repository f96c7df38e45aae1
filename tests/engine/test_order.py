from __future__ import annotations

import pytest

from engine_simulator import GEOMETRY, Simulator, adapter, request
from weft.engine.order import MAX_IDLE_TENANTS, FairOrder, admission_order
from weft.engine.request import FlowKey
from weft.engine.request_pages import RequestPages
from weft.engine.request_state import RequestState
from weft.memory.block_table import BlockTable


def waiting(index: int, tenant: str = "t", *, lane: int = 0, preempted: bool = False, prompt: int = 10) -> RequestState:
    flow = FlowKey(tenant=tenant, lane=lane)
    return RequestState(
        request=request(f"r{index}", prompt=prompt, flow=flow),
        arrival_index=index,
        arrived_s=0.0,
        seed=0,
        adapter_state="base",
        geometry=GEOMETRY,
        pages=RequestPages(table=BlockTable(GEOMETRY)),
        output_token_ids=[],
        num_preemptions=int(preempted),
    )


def indices(states: list[RequestState]) -> list[int]:
    return [state.arrival_index for state in states]


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_lanes_come_first_then_the_preempted_then_arrival(policy: str) -> None:
    states = [
        waiting(1, lane=1),
        waiting(2),
        waiting(3, preempted=True),
        waiting(4),
        waiting(5, lane=1, preempted=True),
    ]
    order = admission_order(policy)  # type: ignore[arg-type]
    order.arrive("t")
    assert indices(order.order(states, 10)) == [3, 2, 4, 5, 1]
    assert indices(order.order(states, 2)) == [3, 2]


def fair(*tenants: str) -> FairOrder:
    order = FairOrder()
    for tenant in tenants:
        order.arrive(tenant)
    return order


def test_the_tenant_served_least_goes_first() -> None:
    order = fair("a", "b")
    order.charge("a", 1.0, 100, 0)
    assert indices(order.order([waiting(1, "a"), waiting(2, "b")], 10)) == [2, 1]


def test_what_is_ahead_in_the_order_counts_as_served() -> None:
    order = fair("a", "b")
    flood = [waiting(i, "a") for i in range(1, 5)]
    assert indices(order.order([*flood, waiting(5, "b"), waiting(6, "b")], 10)) == [1, 5, 2, 6, 3, 4]


def test_output_costs_twice_as_much_as_prompt_and_weight_divides_it() -> None:
    order = fair("a", "b", "c")
    order.charge("a", 1.0, 0, 10)
    order.charge("b", 1.0, 15, 0)
    order.charge("c", 4.0, 0, 10)
    states = [waiting(1, "a"), waiting(2, "b"), waiting(3, "c")]
    assert indices(order.order(states, 3)) == [3, 2, 1]


def test_idle_time_is_no_credit() -> None:
    order = fair("busy")
    order.charge("busy", 1.0, 1000, 0)
    order.arrive("returns")
    order.charge("returns", 1.0, 1, 0)
    assert indices(order.order([waiting(1, "returns"), waiting(2, "busy")], 2)) == [2, 1]


def test_a_tenant_that_returns_to_an_empty_queue_is_lifted_to_the_last_that_left() -> None:
    order = fair("busy")
    order.leave("busy")
    order.charge("busy", 1.0, 1000, 0)
    order.arrive("returns")
    order.arrive("busy")
    order.charge("returns", 1.0, 1, 0)
    assert indices(order.order([waiting(1, "returns"), waiting(2, "busy")], 2)) == [2, 1]


def test_tenants_without_debt_are_forgotten_when_there_are_many() -> None:
    order = fair("first")
    order.charge("first", 1.0, 10, 0)
    for index in range(2 * MAX_IDLE_TENANTS):
        order.arrive(f"t{index}")
        order.leave(f"t{index}")
        order.charge("first", 1.0, 1, 0)
    assert len(order._service) <= MAX_IDLE_TENANTS + 2


def test_a_tenant_that_floods_with_many_adapters_gets_one_share() -> None:
    simulator = Simulator(
        num_pages=40, max_running=4, step_tokens=16, policy="fair", adapter_pages=1, load_ticks=1, checked=False
    )
    for index in range(600):
        flow = FlowKey(tenant="flood")
        simulator.core.submit(request(f"f{index}", prompt=8, max_tokens=4, ref=adapter(f"a{index % 20}"), flow=flow))
    for index in range(300):
        simulator.core.submit(request(f"s{index}", prompt=8, max_tokens=4, flow=FlowKey(tenant="steady")))
    for _ in range(400):
        simulator.pump()
    service = simulator.scheduler._service.tokens(2)
    assert simulator.scheduler.num_waiting > 100
    assert abs(service["flood"] - service["steady"]) <= 2 * max(16, 2 * 4 * 12)
    assert min(service.values()) > 1000


def test_a_tenant_alone_gets_everything() -> None:
    def pumps(policy: str) -> float:
        simulator = Simulator(policy=policy, checked=False)  # type: ignore[arg-type]
        for index in range(50):
            simulator.core.submit(request(f"r{index}", flow=FlowKey(tenant="only")))
        simulator.run()
        return simulator.now_s

    assert pumps("fair") == pumps("fcfs")


def test_a_tenant_that_arrives_while_others_are_forgotten_is_counted() -> None:
    order = FairOrder()
    for index in range(MAX_IDLE_TENANTS):
        order.arrive(f"t{index}")
        order.leave(f"t{index}")
        order.charge(f"t{index}", 1.0, 5, 5)
    order.arrive("new")
    order.arrive("newer")
    order.charge("new", 1.0, 5, 5)
    assert indices(order.order([waiting(1, "new"), waiting(2, "newer")], 9)) == [2, 1]
