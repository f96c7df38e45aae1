from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from weft.server.batches.line_slots import LineSlots

pytestmark = pytest.mark.anyio


async def test_places_go_to_the_tenant_with_the_fewest() -> None:
    slots, held = LineSlots(4), Counter[str]()

    async def take(tenant: str, batch: str) -> None:
        await slots.take(tenant, batch)
        held[tenant] += 1

    for _ in range(4):
        await take("flood", "b1")
    waiting = [asyncio.create_task(take("flood", f"b{n % 3}")) for n in range(9)]
    waiting += [asyncio.create_task(take("quiet", "q")) for _ in range(3)]
    await asyncio.sleep(0)
    for _ in range(2):
        slots.free("flood", "b1")
        held["flood"] -= 1
    await asyncio.sleep(0)
    assert held == {"flood": 2, "quiet": 2}
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for tenant in ("flood", "flood", "quiet", "quiet"):
        slots.free(tenant, {"flood": "b1", "quiet": "q"}[tenant])
    for _ in range(4):
        await asyncio.wait_for(slots.take("late", "l"), 1)


async def test_a_place_that_comes_to_whoever_is_cancelled_goes_on_to_the_next() -> None:
    slots = LineSlots(1)
    await slots.take("a", "1")
    first, second = (asyncio.create_task(slots.take("b", name)) for name in ("1", "2"))
    await asyncio.sleep(0)
    slots.free("a", "1")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.wait_for(second, 1)
