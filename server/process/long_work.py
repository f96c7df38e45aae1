"""Work on long bodies and texts: off the event loop, in few threads, by tenants in turns of their weight.

Such work is parsing, checking and tokenizing. A call into a library may hold the interpreter's lock for all its time,
and then nobody is answered, whichever thread it is in. So what comes here releases the lock, or holds it for
milliseconds at a time. Medium work has places of its own and never waits for long work.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import Callable
from typing import TypeVar

from manylora.config import usable_cores
from manylora.server.process.fair_semaphore import FairSemaphore
from manylora.server.process.threads import to_its_end

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
