"""Work in threads and tasks: whose it is, how tenants share the threads, and waiting for its end whatever happens.

Authentication says for which tenant the task of a request works, the worker says it for a batch. Work of the server
itself is nobody's, one more tenant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar

import structlog

from manylora.config import usable_cores
from manylora.errors import CapacityError
from manylora.server.process.fair_semaphore import FairSemaphore

log = structlog.get_logger("manylora.server")
ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


class Acting(NamedTuple):
    """A tenant at work."""

    tenant: str = ""
    """Its id; empty for the server itself, and for admins."""
    weight: float = 1.0


acting: ContextVar[Acting] = ContextVar("acting", default=Acting())  # noqa: B039 - it never changes
_threads = FairSemaphore(min(32, usable_cores() + 4) - 2, spare=1)
"""Places in the event loop's threads, of which it keeps one for itself."""


def place_in(places: FairSemaphore) -> AbstractAsyncContextManager[None]:
    """A place in the turn of the tenant that the current task acts for."""
    return places.place(*acting.get())


async def in_thread(
    function: Callable[ArgumentsT, ResultT],
    *arguments: ArgumentsT.args,
    **options: ArgumentsT.kwargs,
) -> ResultT:
    """Like `asyncio.to_thread`, in the tenant's turn. The function has always returned when this ends."""
    async with place_in(_threads):
        return await to_its_end(asyncio.to_thread(function, *arguments, **options))


async def to_its_end(work: Awaitable[ResultT]) -> ResultT:
    """The result of work that has always ended when this ends, also by cancellation."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # nobody takes it any more
        raise


async def repeat(step: Callable[[], Awaitable[None]], pause_s: float, failure: str) -> None:
    """Do a step for ever. Where the database does not answer, log that once as `failure`: the next time makes up."""
    said: str | None = None
    while True:
        try:
            await step()
            said = None
        except CapacityError as error:
            if error.message != said:
                log.warning(failure, error=error.message)
            said = error.message
        await asyncio.sleep(pause_s)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
