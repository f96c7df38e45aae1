"""Work in threads and tasks, and waiting for its end whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import structlog

from manylora.errors import CapacityError

log = structlog.get_logger("manylora.server")
ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


async def in_thread(
    function: Callable[ArgumentsT, ResultT], *arguments: ArgumentsT.args, **options: ArgumentsT.kwargs
) -> ResultT:
    """Like `asyncio.to_thread`, but the function has always returned when this ends, also by cancellation."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def repeat(step: Callable[[], Awaitable[None]], pause_s: float, failure: str) -> None:
    """Do a step for ever. Where the database does not answer, log it as `failure`: the next time makes up for it."""
    while True:
        try:
            await step()
        except CapacityError as error:
            log.warning(failure, error=error.message)
        await asyncio.sleep(pause_s)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
