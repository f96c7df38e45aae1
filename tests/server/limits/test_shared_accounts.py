"""Limits across servers, in virtual time: several processes over one real database, with demand at twice the limit."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from manylora.errors import CapacityError, QuotaExceededError, RateLimitError
from manylora.registry.access.limit_allocations import AllocationAnswer
from manylora.registry.limits import Limits
from manylora.registry.usage.ledger import UsageLedger
from manylora.server.limits.limit_allocation import DueAllocations, LimitAllocation
from postgres_server import KINDS, database_of
from shared_limits import World

pytestmark = pytest.mark.anyio
IN_SQLITE = pytest.mark.parametrize("kind", ["sqlite"], indirect=True)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def seconds(kind: str) -> float:
    """Of the load; shorter where each transaction takes longer."""
    return 45.0 if kind == "sqlite" else 20.0


@pytest.fixture
async def world(kind: str, tmp_path: Path) -> AsyncIterator[World]:
    async with World.open(database_of(kind), tmp_path, 4) as opened:
        yield opened
        for server in opened.servers:
            assert server.allocations.num_exchanges <= 10 * opened.now_s + 3


@pytest.mark.slow
async def test_requests_per_minute_at_twice_the_demand(world: World, seconds: float) -> None:
    limit = 600
    await world.load(
        Limits(requests_per_minute=limit),
        seconds,
        2 * (limit / seconds + limit / 60),
        random.Random(1),
    )
    admitted = [(each.at_s, 1.0) for each in world.requests]
    assert world.excess(admitted, limit, limit / 60) <= 1e-6
    assert len(admitted) >= 0.99 * (limit + limit / 60 * seconds)
    assert all(
        isinstance(each, RateLimitError) for server in world.servers for each in server.refusals
    )


@pytest.mark.slow
async def test_tokens_per_minute_with_what_settled_requests_give_back(
    world: World, kind: str, seconds: float
) -> None:
    """Used tokens count when they were reserved; of what was reserved, a third is given back."""
    seconds = (
        200.0 if kind == "sqlite" else seconds
    )  # what the first requests give back has drained meanwhile
    limit, limits = 60_000, Limits(tokens_per_minute=60_000)
    per_s = 2 * (limit / seconds + limit / 60) / 340
    await world.load(
        limits,
        seconds,
        per_s,
        random.Random(2),
        tokens=(200, 800),
        used_share=0.36,
        run_s=(0.2, 3.0),
    )
    used = [
        (each.at_s, float(each.used if each.end_s < world.now_s else each.reserved))
        for each in world.requests
    ]
    assert world.excess(used, limit, limit / 60) <= 1e-6
    share = sum(amount for _, amount in used) / (limit + limit / 60 * seconds)
    assert share >= (0.99 if kind == "sqlite" else 0.93)


@pytest.mark.slow
async def test_requests_at_the_same_time(world: World, kind: str) -> None:
    limit, seconds = 200, 45.0 if kind == "sqlite" else 30.0
    await world.load(
        Limits(concurrent_requests=limit), seconds, 50, random.Random(3), run_s=(6.0, 12.0)
    )
    busy = sum(
        min(each.end_s, world.now_s) - max(each.at_s, 15)
        for each in world.requests
        if each.end_s > 15
    )
    assert world.most_at_once() == limit
    assert busy >= 0.985 * limit * (
        world.now_s - 15
    )  # one counter would reach 99.5%: requests come at random


@pytest.mark.slow
async def test_tokens_per_month_are_used_to_the_last_and_never_exceeded(world: World) -> None:
    limit = 100_000
    await world.load(
        Limits(tokens_per_month=limit), 25, 20, random.Random(4), tokens=(200, 800), used_share=0.2
    )
    await world.step(5)
    used = sum(each.used for each in world.requests)
    assert 0.99 * limit <= used <= limit
    over = world.start(
        world.request(world.servers[0], Limits(tokens_per_month=limit), limit - used + 1)
    )
    await world.step(0.2)
    assert over.result() is None
    assert isinstance(world.servers[0].refusals[-1], QuotaExceededError)
    await world.step(1.5)
    fits = world.start(
        world.request(world.servers[3], Limits(tokens_per_month=limit), limit - used, limit - used)
    )
    await world.step(0.2)
    assert fits.result() is not None, "the last token can be used"


@pytest.mark.slow
@IN_SQLITE
@pytest.mark.parametrize("seed", range(2))
async def test_a_process_dies(world: World, seed: int) -> None:
    """Its part of the minute is lost until the refill, its requests count for five seconds, its month for good."""
    rng = random.Random(seed)
    limits = Limits(requests_per_minute=900, concurrent_requests=20, tokens_per_month=10**7)
    await world.load(limits, 20, 25, rng, tokens=(200, 800), used_share=0.5, run_s=(0.5, 2.0))
    world.kill(world.servers[0])
    killed_s = world.now_s
    await world.load(
        limits,
        30,
        40,
        rng,
        tokens=(200, 800),
        used_share=0.5,
        run_s=(0.5, 2.0),
        skew=(0, 0.5, 0.3, 0.2),
    )
    admitted = [(each.at_s, 1.0) for each in world.requests]
    assert world.excess(admitted, 900, 15) <= 1e-6
    assert world.most_at_once() == 20
    late = [each for each in world.requests if each.end_s > killed_s + 6]
    changes = [(max(each.at_s, killed_s + 6), each.end_s) for each in late]
    assert max(sum(begin <= at < end for begin, end in changes) for at, _ in changes) == 20, (
        "its slots are free again"
    )


@IN_SQLITE
async def test_an_idle_process_gives_back_what_it_does_not_need_and_then_says_nothing(
    world: World,
) -> None:
    limits = Limits(
        requests_per_minute=60, tokens_per_minute=1000, concurrent_requests=8, tokens_per_month=9000
    )
    first, second = world.servers[:2]
    made = world.start(world.request(first, limits, 100, 60))
    await world.step(10)
    assert made.result() is not None
    said = first.allocations.num_exchanges
    await world.step(30)
    assert first.allocations.num_exchanges == said
    account = first.accounts.of("ten_acme", world.now_s)
    assert account["requests_per_minute"].total(world.now_s) == 0
    for amount in (1000, 8000 - 60):
        whole = world.start(world.request(second, Limits(tokens_per_month=9000), amount, amount))
        await world.step(3)
        assert whole.result() is not None, "nothing is held elsewhere"


@IN_SQLITE
async def test_only_the_first_request_of_an_idle_tenant_waits(world: World) -> None:
    limits, server = Limits(requests_per_minute=6000, concurrent_requests=100), world.servers[0]
    shares = world.shares(server, limits)
    first = asyncio.create_task(server.accounts.secure(shares, requests=1))
    await asyncio.sleep(0)
    assert not first.done()
    await world.settle_down()
    await first
    waits = 0
    for _ in range(300):
        task = world.start(world.request(server, limits, run_s=0.5))
        await asyncio.sleep(0)
        waits += not task.done()
        await world.settle_down()
        await world.step(0.05)
    assert waits <= 3  # until the demand is known


@IN_SQLITE
async def test_what_a_request_waits_for_is_not_given_back_before_it_runs(world: World) -> None:
    limits, server = Limits(concurrent_requests=100), world.servers[0]
    shares = world.shares(server, limits)
    slots = shares[0].account["concurrent_requests"]
    assert isinstance(slots, LimitAllocation)
    for _ in range(4):
        waiting = asyncio.create_task(server.accounts.secure(shares, requests=1))
        await asyncio.sleep(0)
        await server.accounts.tick()
        await server.accounts.tick()  # at once, as when requests of others wait
        assert slots.has(1, world.now_s)
        await waiting
        await world.step(30)
    assert slots.amount == 0


@IN_SQLITE
async def test_what_a_refusal_says_is_as_of_one_server(world: World) -> None:
    limits = Limits(requests_per_minute=2)
    one, other = world.servers[:2]
    for server in (one, other):
        made = world.start(world.request(server, limits))
        await world.step(0.01)
        assert made.result() is not None
        headers = made.result().reservation.headers()  # type: ignore[union-attr]
        assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    world.start(world.request(one, limits))
    await world.step(0.3)
    (error,) = one.refusals
    assert str(error).startswith(
        "The tenant's limit requests_per_minute is 2. 2 were used in the last minute"
    )
    assert isinstance(error, RateLimitError)
    assert 29 <= (error.retry_after_s or 0) <= 30
    await world.step(29.8)
    again = world.start(world.request(one, limits))
    await world.step(0.3)
    assert again.result() is not None


@IN_SQLITE
async def test_a_changed_limit_counts_at_once(world: World) -> None:
    one, other = world.servers[:2]
    for _ in range(20):
        world.start(world.request(one, Limits(requests_per_minute=100), run_s=0.1))
        await world.step(0.05)
    lowered = world.start(world.request(one, Limits(requests_per_minute=5)))
    await world.step(0.1)
    assert lowered.result() is None
    raised = world.start(world.request(other, Limits(requests_per_minute=6)))
    await world.step(0.1)
    assert raised.result() is not None
    free = world.start(world.request(one, Limits()))
    await asyncio.sleep(0)
    assert free.done()
    assert free.result() is not None


@IN_SQLITE
async def test_the_database_is_away(world: World) -> None:
    """What is held is spent; nobody waits long, and after a minute nothing is spent any more."""
    limits, server = Limits(requests_per_minute=6000), world.servers[0]
    for _ in range(100):
        world.start(world.request(server, limits, run_s=0.1))
        await world.step(0.05)
    for each in world.servers:
        each.allocations.is_away = True
    requests = server.accounts.of("ten_acme", world.now_s)["requests_per_minute"]
    assert requests.has_room(world.now_s, 3, 6000)
    for wait_s, is_let_in in ((3, True), (30, True), (32, False)):
        await world.step(wait_s)
        task = world.start(world.request(server, limits))
        await world.step(0.2)
        assert (task.result() is not None) == is_let_in
    assert len({str(each) for each in server.refusals}) == 1
    assert isinstance(server.refusals[-1], CapacityError)
    assert server.refusals[-1].code == "db.unavailable"
    for each in world.servers:
        each.allocations.is_away = False
    await world.step(1.5)
    back = world.start(world.request(server, limits))
    await world.step(0.2)
    assert back.result() is not None


@IN_SQLITE
async def test_the_database_is_away_when_a_server_asks_for_the_first_time(world: World) -> None:
    limits, server = Limits(requests_per_minute=60, concurrent_requests=4), world.servers[0]
    server.allocations.is_away = True
    refused = world.start(world.request(server, limits))
    await world.step(0.2)
    assert refused.result() is None
    assert isinstance(server.refusals[-1], CapacityError)
    server.allocations.is_away = False
    await world.step(1.5)
    back = world.start(world.request(server, limits))
    await world.step(0.2)
    assert back.result() is not None


@IN_SQLITE
async def test_the_clock_of_the_database_is_put_back(world: World) -> None:
    """The bucket refills as before, and what running requests give back is lost: how long they ran is not known."""
    limit, rng = 6000, random.Random(7)
    limits = Limits(tokens_per_minute=limit)
    await world.load(limits, 10, 40, rng, tokens=(100, 300), used_share=0.5, run_s=(0.2, 3.0))
    world.put_back_s = 3600.0
    await world.load(limits, 30, 5, rng, tokens=(100, 300), used_share=0.5, run_s=(0.2, 3.0))
    used = [
        (each.at_s, float(each.used if each.end_s < world.now_s else each.reserved))
        for each in world.requests
    ]
    assert world.excess(used, limit, limit / 60) <= 1e-6
    assert sum(amount for at_s, amount in used if at_s > 10) >= 0.9 * limit / 60 * 30


@IN_SQLITE
async def test_after_an_outage_slots_stay_with_those_whose_requests_run(world: World) -> None:
    limits = Limits(concurrent_requests=4)
    one, other = world.servers[:2]
    for _ in range(3):
        world.start(world.request(one, limits, run_s=60))
    world.start(world.request(other, limits, run_s=8))
    await world.step(1)
    for each in world.servers:
        each.allocations.is_away = True
    await world.step(10)
    one.allocations.is_away = other.allocations.is_away = False
    await world.step(1.1)
    for _ in range(4):
        world.start(world.request(other, limits, run_s=60))
    await world.step(4)
    assert world.most_at_once() == 4
    assert sum(each.end_s > world.now_s for each in world.requests) == 4


@IN_SQLITE
async def test_a_cancelled_request_and_a_second_end_give_back_once(world: World) -> None:
    limits, server = (
        Limits(requests_per_minute=9, concurrent_requests=1, tokens_per_minute=500),
        world.servers[0],
    )
    waiting = world.start(world.request(server, limits, 400))
    await asyncio.sleep(0)
    waiting.cancel()
    await world.step(2.5)
    made = world.start(world.request(server, limits, 500, 100))
    await world.step(0.1)
    request = made.result()
    assert request is not None
    world.end(request)
    request.reservation.settle("use_again", 0, datetime.now(UTC))
    request.reservation.end()
    await world.step(2)
    other = world.start(world.request(world.servers[1], limits, 450))
    await world.step(0.1)
    assert other.result() is None
    other = world.start(world.request(world.servers[1], limits, 390))
    await world.step(0.1)
    assert other.result() is not None, "a slot and the tokens are free"


@IN_SQLITE
async def test_an_answer_without_a_bound_grows_over_fetched_tokens_to_the_limit(
    world: World,
) -> None:
    limits, server = Limits(tokens_per_minute=6000, tokens_per_month=5000), world.servers[0]
    made = world.start(world.request(server, limits, 100, 100, run_s=1000))
    await world.step(0.1)
    request = made.result()
    assert request is not None
    request.reservation._is_open = True
    total = 100
    while request.reservation.grow(total + 1):
        total += 1
        await world.step(0.01)  # 100 tokens a second
    assert total == 5000
    world.end(request)


def test_running_requests_are_never_more_than_the_limit_whatever_is_held() -> None:
    """A server may hold more than a limit that was lowered, until the rest goes back."""
    ledger = cast(UsageLedger, SimpleNamespace(unmoved_since=math.inf))
    slots = LimitAllocation(DueAllocations(ledger, lambda: 0.0), "acme", "concurrent_requests")
    slots.follow(Limits(concurrent_requests=5))
    slots.needs.append(10)
    request = slots.request(0.0)
    assert request is not None
    slots.take_answer(0.0, request, AllocationAnswer(10, 10.0, 0, 0, 0))
    for _ in range(5):
        assert slots.has_room(0.0, 1, 5)
        slots.take(0.0, 1)
    assert slots.spare == 5
    assert not slots.has_room(0.0, 1, 5)
