"""Tenants share threads and the database's writer in turns by weight, not in order of arrival."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from manylora.errors import CapacityError
from manylora.registry.db.database import Database
from manylora.server.process.database_turns import database_turns
from manylora.server.process.threads import Acting, FairThreads, acting, repeat
from postgres_server import KINDS, database_of

pytestmark = pytest.mark.anyio
TENANTS = ("flood", "quiet", "stopper", "other", "light", "heavy", "a", "b")


class Works:
    """Work of tenants that runs until it may end, and the order in which it began."""

    def __init__(self, count: int) -> None:
        self.threads = FairThreads(count, "test")
        self.began: list[str] = []
        self._may_end = {name: threading.Semaphore(0) for name in TENANTS}
        self._changed = threading.Condition()
        self.futures: list[Future[str]] = []

    def submit(self, tenant: str, count: int = 1, weight: float = 1.0) -> None:
        for _ in range(count):
            before = acting.set(Acting(tenant, weight))
            self.futures.append(self.threads.submit(self._work, tenant))
            acting.reset(before)

    def _work(self, tenant: str) -> str:
        with self._changed:
            self.began.append(tenant)
            self._changed.notify_all()
        self._may_end[tenant].acquire()
        return tenant

    def let_end(self, *tenants: str) -> None:
        for tenant in tenants or TENANTS:
            self._may_end[tenant].release(1000)

    def wait_for(self, count: int) -> list[str]:
        """The first ones that began, once there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.began) >= count, 60)
            return self.began[:count]


@pytest.fixture
def works() -> Iterator[Works]:
    made = Works(4)
    yield made
    made.let_end()
    made.threads.shutdown()


def test_one_tenants_work_leaves_a_thread_to_others(works: Works) -> None:
    works.submit("flood", 50)
    assert works.wait_for(3) == ["flood"] * 3
    works.submit("quiet")
    assert works.wait_for(4)[3] == "quiet"


def test_threads_go_to_tenants_by_weight(works: Works) -> None:
    works.submit("stopper", 3)
    works.submit("other")
    works.wait_for(4)
    works.submit("light", 30)
    works.submit("heavy", 30, weight=3.0)
    works.let_end("stopper", "other")
    assert Counter(works.wait_for(8)[4:]) == {"heavy": 3, "light": 1}


def test_all_work_is_done_and_its_results_and_errors_come_back(works: Works) -> None:
    works.let_end()
    works.submit("a", 40)
    works.submit("b", 40)
    assert [future.result(60) for future in works.futures] == ["a"] * 40 + ["b"] * 40
    with pytest.raises(ZeroDivisionError):
        works.threads.submit(lambda: 1 // 0).result(60)


def test_what_waits_at_a_shutdown_is_done_first_and_what_was_cancelled_never(works: Works) -> None:
    works.submit("a", 5)
    works.wait_for(3)
    assert works.futures[4].cancel()
    works.let_end()
    works.threads.shutdown()
    assert [future.result(0) for future in works.futures[:4]] == ["a"] * 4
    assert len(works.began) == 4
    with pytest.raises(RuntimeError):
        works.submit("a")


async def test_a_loop_runs_its_work_in_turns(works: Works) -> None:
    asyncio.get_running_loop().set_default_executor(works.threads)

    async def work(tenant: str) -> None:
        acting.set(Acting(tenant))
        await asyncio.to_thread(works._work, tenant)

    flood = [asyncio.create_task(work("flood")) for _ in range(20)]
    await asyncio.sleep(0)
    quiet = asyncio.create_task(work("quiet"))
    await asyncio.sleep(0)
    assert "quiet" in works.wait_for(4)
    works.let_end()
    await asyncio.gather(quiet, *flood)


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> str | None:
    return database_of(request.param)


async def test_a_tenants_write_waits_for_a_few_of_anothers(
    tmp_path: Path, database_url: str | None
) -> None:
    database = await Database.open(database_url, tmp_path)
    database.share(database_turns())
    order: list[str] = []

    async def write(tenant: str) -> None:
        acting.set(Acting(tenant))
        async with database.write() as session:
            await session.execute(text("SELECT 1"))
            order.append(tenant)

    async with asyncio.TaskGroup() as group:
        for tenant in ["flood"] * 50 + ["quiet"]:
            group.create_task(write(tenant))
    assert order.index("quiet") <= 4
    assert Counter(order) == {"flood": 50, "quiet": 1}
    await database.close()


async def test_reads_that_last_leave_connections_to_others(
    tmp_path: Path, database_url: str | None
) -> None:
    database = await Database.open(database_url, tmp_path)
    database.share(database_turns())
    reading, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def read(tenant: str, *, lasts: bool) -> None:
        acting.set(Acting(tenant))
        async with database.read() as session:
            await session.execute(text("SELECT 1"))
            reading.release()
            if lasts:
                await may_end.wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(read("flood", lasts=True))
        for _ in range(4):
            await reading.acquire()
        await read("quiet", lasts=False)
        async with database.write() as session:
            await session.execute(text("SELECT 3"))
        assert not may_end.is_set()
        may_end.set()
    await database.close()


async def test_what_stays_wrong_is_logged_once_and_again_when_it_comes_back() -> None:
    said = iter(["away", "away", "lost", "", "lost"])

    async def step() -> None:
        try:
            message = next(said)
        except StopIteration:
            raise asyncio.CancelledError from None
        if message:
            raise CapacityError(message)

    with capture_logs() as lines, pytest.raises(asyncio.CancelledError):
        await repeat(step, 0.0, "not_done")
    assert [line["error"] for line in lines] == ["away", "lost", "lost"]
