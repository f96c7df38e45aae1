"""Work in threads and tasks: whose it is, how tenants share the threads, and waiting for its end whatever happens.

Authentication says for which tenant the task of a request works, the worker says it for a batch. Work of the server
itself is nobody's, one more tenant.

Parsing, checking and tokenizing long bodies and texts have few threads of their own (`LongWork`). A call into a library
may hold the interpreter's lock for all its time, and then nobody is answered, whichever thread it is in. So what comes
there releases the lock, or holds it for milliseconds at a time. Medium work has places of its own and never waits for
long work.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar

import structlog

from manylora.config import usable_cores
from manylora.errors import CapacityError
from manylora.server.process.fair_semaphore import FairSemaphore

log = structlog.get_logger("manylora.server")
INLINE_BYTES = 16 * 1024
"""Up to this size, work is done on the event loop: a thread would cost more."""
MEDIUM_BYTES = 256 * 1024
"""Above this size, work is long."""
BYTES_PER_CHARACTER = 4
"""Tokenizing a character takes as long as parsing this many bytes."""
TRIM_S = 2.0
"""After long work, and this time without more, freed memory goes back to the system."""
SWITCH_S = 0.001
"""Longest time for which a thread that computes in Python keeps the event loop waiting for the lock."""
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


class LongWork:
    """Runs functions, those that take long in threads. Thread: one event loop.

    Args:
        num_cores: Cores that this process may use.
    """

    def __init__(self, num_cores: int | None = None) -> None:
        cores = num_cores or usable_cores()
        medium = max(2, cores // 4)
        long = max(1, cores // 8)
        # Twice as many while one tenant has more than its share.
        self._medium = FairSemaphore(medium, spare=medium)
        self._long = FairSemaphore(long, spare=long)
        self._trimming: asyncio.TimerHandle | None = None

    async def run(
        self,
        function: Callable[[], ResultT],
        num_bytes: int,
        tenant: str | None,
        weight: float = 1.0,
        begin: Callable[[], None] = lambda: None,
    ) -> ResultT:
        """Return what a function returns, which has always ended when this ends, also by cancellation.

        Args:
            function: Releases the interpreter's lock at least every few milliseconds.
            num_bytes: How much it has to read.
            tenant: Whose work it is; None is the admin's.
            weight: Of the tenant.
            begin: Called on the event loop when its turn has come; what it raises ends the work.
        """
        if num_bytes <= INLINE_BYTES:
            begin()
            return function()
        places = self._medium if num_bytes <= MEDIUM_BYTES else self._long
        async with places.place(tenant or "", weight):
            begin()
            try:
                return await to_its_end(asyncio.to_thread(function))
            finally:
                if places is self._long:
                    self._trim_later()

    def _trim_later(self) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
        loop = asyncio.get_running_loop()
        self._trimming = loop.call_later(
            TRIM_S, lambda: loop.run_in_executor(None, give_memory_back)
        )


def keep_interpreter_moving() -> None:
    """Set up the interpreter, once all is loaded, so that no thread keeps the others from it for long."""
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # a full collection would look at all that the libraries made, for 0.3 s
    gc.set_threshold(
        10_000, 20
    )  # else they are a twelfth of the time under load, and seconds of a body of many lists


def give_memory_back() -> None:
    """Return freed memory to the system: glibc keeps what threads freed, hundreds of MiB after long texts."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
