"""Work on long bodies and texts: off the event loop, in few threads, by tenants in turns of their weight.

Such work is parsing, checking and tokenizing. A call into a library may hold the interpreter's lock for all its time,
and then nobody is answered, whichever thread it is in. So what comes here releases the lock, or holds it for
milliseconds at a time. Medium work has threads of its own and never waits for long work.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from manylora.config import usable_cores
from manylora.server.process.fair_semaphore import FairSemaphore

INLINE_BYTES = 16 * 1024
"""Up to this size, work is done on the event loop: a thread would cost more."""
MEDIUM_BYTES = 256 * 1024
"""Above this size, work is long."""
BYTES_PER_CHARACTER = 4
"""Tokenizing a character takes as long as parsing this many bytes."""
MAX_WAITING = 4
"""Tenants whose work waits for a child process at the same time, each with one function."""
TRIM_S = 2.0
"""After long work, and this time without more, freed memory goes back to the system."""
SWITCH_S = 0.001
"""Longest time for which a thread that computes in Python keeps the event loop waiting for the lock."""
ResultT = TypeVar("ResultT")


class LongWork:
    """Runs functions, those that take long in threads. Thread: one event loop.

    Args:
        num_cores: Cores that this process may use.
    """

    def __init__(self, num_cores: int | None = None) -> None:
        cores = num_cores or usable_cores()
        medium = max(2, cores // 4)
        long = max(1, cores // 8)
        self._medium = _Lane(medium, "medium-work", spare=medium)
        self._long = _Lane(long, "long-work", spare=long)
        self._waiting = _Lane(1, "waiting-work", spare=MAX_WAITING - 1)
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
        lane = self._medium if num_bytes <= MEDIUM_BYTES else self._long
        async with lane.places.place(tenant or "", weight):
            begin()
            try:
                return await _run_to_its_end(lane.threads, function)
            finally:
                if lane is self._long:
                    self._trim_later()

    async def wait(
        self, function: Callable[[], ResultT], tenant: str | None, weight: float = 1.0
    ) -> ResultT:
        """Return what a function returns that waits for a child process; it has always ended when this ends."""
        async with self._waiting.places.place(tenant or "", weight):
            return await _run_to_its_end(self._waiting.threads, function)

    def close(self) -> None:
        """Start no more threads; those that run end with their work."""
        if self._trimming is not None:
            self._trimming.cancel()
        for lane in (self._medium, self._long, self._waiting):
            lane.threads.shutdown(wait=False)

    def _trim_later(self) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
        loop = asyncio.get_running_loop()
        self._trimming = loop.call_later(
            TRIM_S, lambda: loop.run_in_executor(self._long.threads, give_memory_back)
        )


class _Lane:
    """Threads for work of about one length; the spare ones run while one tenant has more than its share."""

    def __init__(self, places: int, name: str, spare: int) -> None:
        self.threads = ThreadPoolExecutor(places + spare, name)
        self.places = FairSemaphore(places, spare=spare)


async def _run_to_its_end(threads: ThreadPoolExecutor, function: Callable[[], ResultT]) -> ResultT:
    running = asyncio.get_running_loop().run_in_executor(threads, copy_context().run, function)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


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
