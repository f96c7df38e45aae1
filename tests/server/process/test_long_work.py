"""Long work is done in few threads, tenants in turns, and its memory goes back."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from api_server import eventually
from manylora.server.process import threads
from manylora.server.process.threads import INLINE_BYTES, MEDIUM_BYTES, LongWork

pytestmark = pytest.mark.anyio
LONG = MEDIUM_BYTES + 1


async def test_short_work_is_done_at_once() -> None:
    assert (
        await LongWork(2).run(threading.current_thread, INLINE_BYTES, "t")
        is threading.main_thread()
    )


@pytest.mark.parametrize("num_bytes", [INLINE_BYTES + 1, LONG])
async def test_longer_work_is_done_in_a_thread(num_bytes: int) -> None:
    assert (
        await LongWork(2).run(threading.current_thread, num_bytes, "t")
        is not threading.main_thread()
    )


@pytest.mark.parametrize("num_bytes", [INLINE_BYTES + 1, LONG])
async def test_work_of_one_tenant_keeps_no_other_waiting(num_bytes: int) -> None:
    work, end = LongWork(2), threading.Event()
    flood = [
        asyncio.create_task(work.run(partial(end.wait, 60), num_bytes, "flood")) for _ in range(6)
    ]
    await asyncio.sleep(0)
    assert await work.run(lambda: "done", num_bytes, "quiet") == "done"
    end.set()
    await asyncio.gather(*flood)


async def test_medium_work_does_not_wait_for_long_work() -> None:
    work, end = LongWork(2), threading.Event()
    task = asyncio.create_task(work.run(end.wait, LONG, "flood"))
    await asyncio.sleep(0)
    assert await work.run(lambda: "done", INLINE_BYTES + 1, "quiet") == "done"
    end.set()
    await task


async def test_work_that_may_not_begin_any_more_is_not_done() -> None:
    work, done = LongWork(2), list[int]()

    def refuse() -> None:
        raise ValueError("used up")

    for num_bytes in (1, INLINE_BYTES + 1, LONG):
        with pytest.raises(ValueError, match="used up"):
            await work.run(lambda: done.append(1), num_bytes, "t", begin=refuse)
    assert not done


async def test_work_has_ended_when_its_owner_is_cancelled() -> None:
    work, begun, end, ended = LongWork(2), threading.Event(), threading.Event(), list[int]()

    def last() -> None:
        begun.set()
        end.wait(10)
        ended.append(1)

    task = asyncio.create_task(work.run(last, LONG, "t"))
    await eventually(begun.is_set)
    task.cancel()
    asyncio.get_running_loop().call_later(0.01, end.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


async def test_freed_memory_goes_back_once_long_work_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(threads, "TRIM_S", 0.01)
    monkeypatch.setattr(threads, "give_memory_back", lambda: loop.call_soon_threadsafe(given.set))
    await LongWork(2).run(lambda: None, LONG, "t")
    async with asyncio.timeout(10):
        await given.wait()
