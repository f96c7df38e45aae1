"""Work in a thread that is never left behind: who is cancelled waits for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


async def in_thread(
    function: Callable[ArgumentsT, ResultT], *arguments: ArgumentsT.args, **options: ArgumentsT.kwargs
) -> ResultT:
    """Like `asyncio.to_thread`, but what the function works on is free when this ends, whatever the end."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
