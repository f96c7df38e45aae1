"""The gate in front of a model of a fair engine, in virtual time."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from random import Random

import pytest

from manylora.server.limits.return_times import ReturnTimes
from overload_model import CAPACITY, MAX_WAIT_S, Client, Overload, Traffic

pytestmark = pytest.mark.no_cover

MEAN_UNITS = 333
"""Of a request of 100 prompt tokens and, on average, 100 output tokens."""
FULL = CAPACITY / MEAN_UNITS
"""Requests per second that the engine can compute."""
SPAN_S = 60.0


def honest(_: Random) -> str:
    return "honest"


def once(_: Random) -> str:
    return "once"


def some_honest(draw: Random) -> str:
    return "honest" if draw.random() < 0.1 else "once"


def anything(draw: Random) -> str:
    return draw.choice(["honest", "impatient", "half", "once"])


def overload(times: float, manner: Callable[[Random], str], *, same_body: bool = False) -> Overload:
    """One tenant with so many times the capacity for a minute, and one that asks for little."""
    flood = Traffic(
        tenant="flood", per_s=times * FULL, end_s=SPAN_S, manner=manner, same_body=same_body
    )
    quiet = Traffic(tenant="quiet", per_s=0.5, end_s=SPAN_S)
    return Overload([flood, quiet])


@cache
def after_a_minute(times: float, manner: Callable[[Random], str]) -> Overload:
    """The model after this overload, for tests that only look at it."""
    model = overload(times, manner)
    model.run(SPAN_S)
    return model


def of(model: Overload, tenant: str, manner: str | None = None) -> list[Client]:
    return [one for one in model.clients if one.tenant == tenant and manner in (None, one.manner)]


def good_units(model: Overload) -> float:
    """Share of what was computed that went to requests which began in time."""
    begun = [client for client in model.clients if client.ttft_s is not None]
    return sum(client.output for client in begun if (client.ttft_s or 0) <= MAX_WAIT_S) / sum(
        client.output for client in begun
    )


@pytest.mark.parametrize("times", [1.2, 1.6, 3.6, 20])
@pytest.mark.parametrize("manner", [honest, once])
def test_the_engine_computes_at_full_rate_and_begins_in_time(
    times: float, manner: Callable[[Random], str]
) -> None:
    model = after_a_minute(times, manner)
    assert sum(model.engine.units.values()) >= 0.94 * CAPACITY * SPAN_S
    assert good_units(model) >= 0.97


@pytest.mark.parametrize(
    ("manner", "same_body"),
    [(honest, False), (honest, True), (some_honest, False), (anything, False)],
)
def test_who_comes_back_when_told_is_served_within_three_tries(
    manner: Callable[[Random], str], same_body: bool
) -> None:
    model = overload(20, manner, same_body=same_body)
    model.run(2 * SPAN_S)
    tried = [
        client
        for client in of(model, "flood", "honest")
        if client.admitted_s is not None or client.tries >= 3
    ]
    assert len(tried) > 300
    served = [client for client in tried if client.admitted_s is not None and client.tries <= 3]
    assert len(served) >= 0.99 * len(tried)
    # and what the first refusal told them was the truth, within a factor of two
    back = [client for client in tried if client.told_s]
    assert len(back) > 200
    true = [
        client
        for client in back
        if sum(client.told_s[1:]) <= client.told_s[0] or len(client.told_s) == 1
    ]
    assert len(true) >= 0.95 * len(back)


def test_who_comes_at_half_the_time_is_mostly_too_early() -> None:
    model = overload(20, lambda draw: draw.choice(["honest", "half"]))
    model.run(SPAN_S)
    early = [
        client
        for client in of(model, "flood", "half")
        if client.tries == 2 and client.told_s[0] >= 4
    ]
    assert len(early) > 200
    assert sum(client.admitted_s is not None for client in early) <= 0.1 * len(early)


def test_every_refusal_tells_a_time_of_a_second_to_an_hour() -> None:
    model = after_a_minute(20, honest)
    told = [seconds for client in model.clients for seconds in client.told_s]
    assert len(told) > 5000
    assert min(told) >= 1 - 1e-6
    assert max(told) <= 3600
    assert max(told) > 300  # the truth is long, and it is told


def test_times_are_short_where_nobody_comes_back() -> None:
    model = after_a_minute(20, once)
    late = [
        client.told_s[0]
        for client in of(model, "flood")
        if client.told_s and client.arrived_s > model.now_s - 10
    ]
    assert max(late) < 120  # it would be 1,100 s if all came back


@pytest.mark.parametrize("manner", [honest, once, anything])
def test_a_tenant_below_its_share_is_always_served_at_once(manner: Callable[[Random], str]) -> None:
    model = after_a_minute(20, manner)
    quiet = of(model, "quiet")
    assert len(quiet) > 20
    assert all(
        client.tries == 1 and (client.ttft_s or 0) < 0.5
        for client in quiet
        if client.arrived_s < model.now_s - 1
    )


def test_small_tenants_beside_a_large_one() -> None:
    for times in (1.6, 3.6):
        shares = {"large": 0.7, "middle": 0.2, "small": 0.1}
        model = Overload(
            [Traffic(tenant=name, per_s=times * share * FULL) for name, share in shares.items()]
        )
        model.run(SPAN_S)
        assert good_units(model) >= 0.95
        for name, share in shares.items():
            if times * share < 1 / 3:
                assert all(client.tries == 1 for client in of(model, name))
        assert {code for client in of(model, "large") for code in client.codes} >= {"limit.queue"}


def test_weights_decide_who_is_over_the_share() -> None:
    model = Overload(
        [Traffic(tenant=name, per_s=2 * FULL, manner=once) for name in ("one", "three")]
    )
    model.engine.weights["three"] = 3.0
    model.run(SPAN_S)
    assert model.engine.units["three"] / model.engine.units["one"] == pytest.approx(3, rel=0.1)


def test_all_is_as_before_five_seconds_after_the_overload() -> None:
    model = overload(20, once)
    model.run(SPAN_S)
    model.traffic = [Traffic(tenant="flood", per_s=0.5 * FULL, start_s=5, end_s=30)]
    before = len(model.clients)
    model.run(40)
    after = model.clients[before:]
    assert len(after) > 50
    assert all(client.tries == 1 and (client.ttft_s or 99) < 1 for client in after)


def test_memory_is_bounded_and_given_back() -> None:
    model = overload(20, anything)
    model.run(SPAN_S)
    model.traffic = []
    model.events.clear()
    model.now_s += 3700
    state = model.gate.tenants["flood"]
    model.gate.snapshot()
    assert len(state.slots) == 0
    assert len(pickle.dumps(state.slots)) < len(pickle.dumps(ReturnTimes())) + 100
    model.engine.requests.clear()
    for client in model.clients:
        if client.admission is not None:
            client.admission.end()
    assert (state.waiting, state.live, state.live_units, model.gate.num_waiting) == (0, 0, 0.0, 0)
    model.now_s += 700
    model.gate.snapshot()
    assert model.gate.tenants == {}
