"""Tenants share threads and the database's writer in turns by weight, not in order of arrival."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from manylora.errors import CapacityError
from manylora.registry.db.database import Database
from manylora.server.process import threads
from manylora.server.process.fair_semaphore import FairSemaphore
from manylora.server.process.threads import Acting, acting, in_thread, repeat
from manylora.server.run import share_database
from postgres_server import KINDS, database_of

pytestmark = pytest.mark.anyio
TENANTS = ("flood", "quiet", "stopper", "other", "light", "heavy", "a", "b")


class Works:
    """Work of tenants that runs until it may end, and the order in which it began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._may_end = {name: threading.Semaphore(0) for name in TENANTS}
        self._changed = threading.Condition()
        self.tasks: list[asyncio.Task[str]] = []

    async def submit(self, tenant: str, count: int = 1, weight: float = 1.0) -> None:
        async def act() -> str:
            acting.set(Acting(tenant, weight))
            return await in_thread(self._work, tenant)

        self.tasks += [asyncio.create_task(act()) for _ in range(count)]
        await asyncio.sleep(0)

    def _work(self, tenant: str) -> str:
        with self._changed:
            self.began.append(tenant)
            self._changed.notify_all()
        self._may_end[tenant].acquire()
        return tenant

    def let_end(self, *tenants: str) -> None:
        for tenant in tenants or TENANTS:
            self._may_end[tenant].release(1000)

    async def wait_for(self, count: int) -> list[str]:
        """The first ones that began, once there are so many."""

        def wait() -> list[str]:
            with self._changed:
                assert self._changed.wait_for(lambda: len(self.began) >= count, 60)
                return self.began[:count]

        return await asyncio.to_thread(wait)


@pytest.fixture
async def works(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Works]:
    monkeypatch.setattr(threads, "_threads", FairSemaphore(3, spare=1))
    made = Works()
    yield made
    made.let_end()
    await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_one_tenants_work_leaves_a_thread_to_others(works: Works) -> None:
    await works.submit("flood", 50)
    assert await works.wait_for(3) == ["flood"] * 3
    await works.submit("quiet")
    assert (await works.wait_for(4))[3] == "quiet"


async def test_threads_go_to_tenants_by_weight(works: Works) -> None:
    await works.submit("stopper", 3)
    await works.submit("other")
    await works.wait_for(4)
    await works.submit("light", 30)
    await works.submit("heavy", 30, weight=3.0)
    works.let_end("stopper", "other")
    assert Counter((await works.wait_for(8))[4:]) == {"heavy": 3, "light": 1}


async def test_all_work_is_done_and_its_results_and_errors_come_back(works: Works) -> None:
    works.let_end()
    await works.submit("a", 40)
    await works.submit("b", 40)
    assert await asyncio.gather(*works.tasks) == ["a"] * 40 + ["b"] * 40
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_what_was_cancelled_while_it_waits_never_begins_and_what_runs_keeps_its_thread(
    works: Works,
) -> None:
    await works.submit("flood", 5)
    await works.wait_for(3)
    works.tasks[4].cancel()
    works.tasks[0].cancel()
    await asyncio.sleep(0.1)
    assert works.tasks[4].cancelled()
    assert not works.tasks[0].done()
    assert len(works.began) == 3
    works.let_end()
    await asyncio.wait(works.tasks)
    assert works.tasks[0].cancelled()
    assert len(works.began) == 4


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> str | None:
    return database_of(request.param)


async def test_a_tenants_write_waits_for_a_few_of_anothers(
    tmp_path: Path, database_url: str | None
) -> None:
    database = await Database.open(database_url, tmp_path)
    share_database(database)
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
    share_database(database)
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
