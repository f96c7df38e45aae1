from __future__ import annotations

import asyncio

from manylora.engine.process.inbox import Inbox


def test_all_that_came_is_taken_at_once_and_in_order() -> None:
    async def run() -> None:
        inbox: Inbox[int] = Inbox()
        for item in range(3):
            inbox.put(item)
        assert await inbox.take() == [0, 1, 2]
        taking = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        assert not taking.done()
        inbox.put(3)
        inbox.put(4)
        assert await taking == [3, 4]

    asyncio.run(run())


def test_nothing_is_lost_where_the_reader_gives_up() -> None:
    async def run() -> None:
        inbox: Inbox[int] = Inbox()
        taking = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        inbox.put(1)
        taking.cancel()
        await asyncio.wait([taking])
        inbox.put(2)
        assert taking.cancelled()
        assert await inbox.take() == [1, 2]

    asyncio.run(run())
