"""Requests that come together are let in a few in each round, tenants in turns."""

from __future__ import annotations

import asyncio

import pytest

from manylora.server.limits.turns import REQUESTS_A_ROUND, Arrivals

pytestmark = pytest.mark.anyio


async def come(arrivals: Arrivals, tenant: str, entered: list[str]) -> None:
    await arrivals.turn(tenant)
    entered.append(tenant)


async def test_who_comes_alone_does_not_wait() -> None:
    turn = Arrivals().turn("t")
    try:
        turn.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")


async def test_a_quiet_tenant_is_not_behind_all_that_a_flood_sent_before() -> None:
    arrivals, entered = Arrivals(), list[str]()
    tasks = [asyncio.create_task(come(arrivals, "flood", entered)) for _ in range(100)]
    tasks += [asyncio.create_task(come(arrivals, name, entered)) for name in ("quiet", "other")]
    await asyncio.gather(*tasks)
    assert len(entered) == 102
    assert entered.index("quiet") <= REQUESTS_A_ROUND + 1
    assert entered.index("other") <= REQUESTS_A_ROUND + 2


async def test_a_few_enter_in_each_round() -> None:
    arrivals, entered = Arrivals(), list[str]()
    tasks = [asyncio.create_task(come(arrivals, "t", entered)) for _ in range(5 * REQUESTS_A_ROUND)]
    counts = []
    while len(entered) < len(tasks):
        before = len(entered)
        await asyncio.sleep(0)
        counts.append(len(entered) - before)
    assert max(counts) == REQUESTS_A_ROUND
    await asyncio.gather(*tasks)


async def test_one_that_leaves_while_it_waits_takes_nobodys_place() -> None:
    arrivals, entered = Arrivals(), list[str]()
    tasks = [asyncio.create_task(come(arrivals, "t", entered)) for _ in range(3 * REQUESTS_A_ROUND)]
    await asyncio.sleep(0)
    for task in tasks[REQUESTS_A_ROUND : 2 * REQUESTS_A_ROUND]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(entered) == 2 * REQUESTS_A_ROUND
    await come(arrivals, "t", entered)
    assert len(entered) == 2 * REQUESTS_A_ROUND + 1
