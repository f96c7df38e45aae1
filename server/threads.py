"""Runs work in a thread, and waits for its end even if the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

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
