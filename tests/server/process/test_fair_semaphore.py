"""Places go to tenants in turns by weight: by the time they hold them, however many requests they send."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest

from manylora.server.process import fair_semaphore
from manylora.server.process.fair_semaphore import FairSemaphore

pytestmark = pytest.mark.anyio


class Holders:
    """Tenants that hold places for as long as they are told, by a clock that only this moves."""

    def __init__(self, places: int, spare: int = 0) -> None:
        self.now_s = 0.0
        self.semaphore = FairSemaphore(places, lambda: self.now_s, spare=spare)
        self.order: list[str] = []
        """Tenants as they were let in."""
        self._ends: list[tuple[float, int, str, asyncio.Event]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def come(
        self, tenant: str, weight: float = 1.0, hold_s: float = 1.0, count: int = 1
    ) -> None:
        for _ in range(count):
            self._tasks.append(asyncio.create_task(self._hold(tenant, weight, hold_s)))
        await settled()

    async def _hold(self, tenant: str, weight: float, hold_s: float) -> None:
        async with self.semaphore.place(tenant, weight):
            self.order.append(tenant)
            event = asyncio.Event()
            self._ends.append((self.now_s + hold_s, len(self.order), tenant, event))
            await event.wait()

    async def end_next(self) -> None:
        """Let time go on until the next hold ends."""
        self._ends.sort(key=lambda end: end[:2])
        self.now_s, _, _, event = self._ends.pop(0)
        event.set()
        await settled()

    async def end_all(self) -> None:
        while self._ends:
            await self.end_next()
        await asyncio.gather(*self._tasks)

    def holding(self) -> Counter[str]:
        return Counter(tenant for _, _, tenant, _ in self._ends)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def first(order: Iterable[str], count: int) -> Counter[str]:
    return Counter(list(order)[:count])


async def test_who_comes_alone_gets_all_places_at_once() -> None:
    holders = Holders(2)
    await holders.come("t", count=3)
    assert holders.holding() == {"t": 2}
    await holders.end_all()
    assert holders.order == ["t"] * 3


@pytest.mark.parametrize("places", [1, 3])
async def test_one_that_comes_behind_a_flood_is_next(places: int) -> None:
    holders = Holders(places)
    await holders.come("flood", count=100)
    await holders.come("quiet")
    await holders.come("other")
    await holders.end_next()
    await holders.end_next()
    assert holders.order[places:] == ["quiet", "other"]
    await holders.end_all()


@pytest.mark.parametrize("places", [1, 4])
async def test_shares_go_by_weight(places: int) -> None:
    holders = Holders(places)
    await holders.come("warm-up")
    await holders.come("light", count=60)
    await holders.come("heavy", weight=3.0, count=60)
    await holders.end_next()
    for _ in range(40):
        await holders.end_next()
    assert first(holders.order[1:], 40)["heavy"] == pytest.approx(30, abs=places)
    await holders.end_all()


async def test_a_burst_into_free_places_is_shared_too() -> None:
    holders = Holders(4)
    await holders.come("stopper", hold_s=1.0, count=4)
    await holders.come("a", count=20)
    await holders.come("b", count=20)
    for _ in range(4):
        await holders.end_next()
    assert holders.holding() == {"a": 2, "b": 2}
    await holders.end_all()


async def test_long_holds_count_for_more_than_short_ones() -> None:
    holders = Holders(1)
    await holders.come("long", hold_s=10.0, count=20)
    await holders.come("short", hold_s=1.0, count=200)
    for _ in range(110):
        await holders.end_next()
    assert 8 <= first(holders.order, 110)["long"] <= 12
    await holders.end_all()


async def test_who_was_idle_is_not_owed_what_it_did_not_ask_for() -> None:
    holders = Holders(1)
    await holders.come("early")
    await holders.end_all()
    await holders.come("busy", count=60)
    for _ in range(20):
        await holders.end_next()
    await holders.come("early", count=20)
    for _ in range(10):
        await holders.end_next()
    assert 4 <= Counter(holders.order[-10:])["early"] <= 6
    await holders.end_all()


async def test_holds_too_short_for_the_clock_take_turns() -> None:
    holders = Holders(1)
    await holders.come("a", hold_s=0.0, count=10)
    await holders.come("b", hold_s=0.0, count=10)
    await holders.end_all()
    assert first(holders.order, 10)["b"] >= 4


async def test_newcomers_get_their_share_out_of_spare_places_and_nobody_more_than_that() -> None:
    holders = Holders(6, spare=4)
    await holders.come("flood", hold_s=100.0, count=50)
    await holders.come("second", hold_s=10.0, count=50)
    assert holders.holding() == {"flood": 6, "second": 3}
    await holders.come("third", weight=2.0, hold_s=10.0, count=50)
    assert holders.holding() == {"flood": 6, "second": 3, "third": 1}
    for _ in range(40):
        await holders.end_next()
        assert holders.holding().total() <= 10
    for name, share in (("flood", 1.5), ("second", 1.5), ("third", 3)):
        assert abs(holders.holding()[name] - share) <= 1
    await holders.end_all()


async def test_one_that_leaves_takes_nobodys_place() -> None:
    semaphore, entered = FairSemaphore(1), list[str]()

    async def hold(tenant: str) -> None:
        async with semaphore.place(tenant):
            entered.append(tenant)

    async with semaphore.place("first"):
        waiting = [asyncio.create_task(hold(name)) for name in ("gone", "gone", "stays")]
        await settled()
        assert semaphore.num_waiting("gone") == 2
        waiting[0].cancel()
        await settled()
        assert semaphore.num_waiting("gone") == 1
        waiting[1].cancel()  # in the same turn of the loop as the place becomes free
    await asyncio.gather(*waiting, return_exceptions=True)
    assert entered == ["stays"]


async def test_one_that_leaves_as_it_is_let_in_gives_its_place_back() -> None:
    semaphore = FairSemaphore(1)

    async def hold() -> None:
        async with semaphore.place("t"):
            raise AssertionError("it was cancelled before")

    async with semaphore.place("first"):
        waiting = asyncio.create_task(hold())
        await settled()
    waiting.cancel()  # the place is its own by now, but it has not run since
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(5), semaphore.place("next"):
        pass


async def test_an_error_in_a_hold_gives_the_place_back() -> None:
    semaphore = FairSemaphore(1)
    with pytest.raises(ValueError, match="broken"):
        async with semaphore.place("t"):
            raise ValueError("broken")
    async with asyncio.timeout(5), semaphore.place("t"):
        pass


async def test_tenants_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_semaphore, "MAX_IDLE", 8)
    semaphore = FairSemaphore(1)
    for number in range(100):
        async with semaphore.place(f"t{number}"):
            pass
    assert len(semaphore._tenants) <= 9


@pytest.mark.parametrize("seed", range(20))
async def test_backlogged_tenants_hold_places_in_proportion_to_their_weights(seed: int) -> None:
    random = Random(seed)
    holders = Holders(random.randint(1, 5))
    weights = {f"t{number}": random.choice([0.5, 1.0, 2.0, 4.0]) for number in range(4)}
    served = dict.fromkeys(weights, 0.0)
    for name, weight in weights.items():
        for _ in range(150):
            await holders.come(name, weight, random.uniform(0.1, 3.0))
    for _ in range(120):
        before, held = holders.now_s, holders.holding()
        await holders.end_next()
        for name, count in held.items():
            served[name] += count * (holders.now_s - before)
    shares = {name: served[name] / weight for name, weight in weights.items()}
    assert max(shares.values()) - min(shares.values()) <= 2 * 3.0 / min(weights.values()) * 2
    await holders.end_all()
