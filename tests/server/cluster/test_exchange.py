from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from manylora.errors import DrainingError, ReplicaLostError
from manylora.server.process.drain import Exchange

pytestmark = pytest.mark.anyio
DRAINING = DrainingError("The server is shutting down.")


async def _wait(exchange: Exchange) -> None:
    with exchange.running():
        await asyncio.Event().wait()


async def _ends(exchange: Exchange, *acts: Callable[[], None]) -> BaseException:
    """How a running block ends when this happens in one turn of the event loop."""
    task = asyncio.create_task(_wait(exchange))
    await asyncio.sleep(0)
    for act in acts:
        act()
    with pytest.raises((DrainingError, ReplicaLostError, asyncio.CancelledError)) as caught:
        await task
    return caught.value


async def test_a_lost_replica_ends_one_block_and_a_cut_ends_all() -> None:
    exchange = Exchange()
    assert isinstance(await _ends(exchange, exchange.lose), ReplicaLostError)
    exchange.lose()  # between two replicas it means nothing
    assert await _ends(exchange, lambda: exchange.cut(DRAINING)) is DRAINING
    with pytest.raises(DrainingError), exchange.running():
        pass


async def test_the_first_cut_counts_and_goes_before_a_lost_replica() -> None:
    exchange = Exchange()
    later = ConnectionError()
    assert (
        await _ends(
            exchange, exchange.lose, lambda: exchange.cut(DRAINING), lambda: exchange.cut(later)
        )
        is DRAINING
    )


async def test_what_others_cancel_stays_cancelled() -> None:
    exchange = Exchange()
    task = asyncio.create_task(_wait(exchange))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_task_can_wait_again_after_it_was_interrupted() -> None:
    exchange = Exchange()

    async def two_replicas() -> str:
        with pytest.raises(ReplicaLostError):
            await _wait(exchange)
        async with asyncio.timeout(10):
            await asyncio.sleep(0.01)
        with exchange.running():
            return "answered"

    task = asyncio.create_task(two_replicas())
    await asyncio.sleep(0)
    exchange.lose()
    assert await task == "answered"
    assert not task.cancelling()
    exchange.cut(DRAINING)  # too late for anything
