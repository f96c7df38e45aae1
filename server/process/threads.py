"""Work in threads and tasks: whose it is, how tenants share the threads, and waiting for its end whatever happens.

Authentication says for which tenant the task of a request works, the worker says it for a batch. Work of the server
itself is nobody's, one more tenant.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import structlog

from manylora.errors import CapacityError

log = structlog.get_logger("manylora.server")
ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


async def in_thread(
    function: Callable[ArgumentsT, ResultT],
    *arguments: ArgumentsT.args,
    **options: ArgumentsT.kwargs,
) -> ResultT:
    """Like `asyncio.to_thread`, but the function has always returned when this ends, also by cancellation."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
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


class Acting(NamedTuple):
    """A tenant at work."""

    tenant: str = ""
    """Its id; empty for the server itself, and for admins."""
    weight: float = 1.0


acting: ContextVar[Acting] = ContextVar("acting", default=Acting())  # noqa: B039 - it never changes


class FairThreads(ThreadPoolExecutor):
    """Threads that tenants share by weight, instead of in order of arrival. Thread-safe.

    The tenant whose work has the fewest threads for its weight is next. One tenant leaves a thread to others, so that
    its work, however long, is not in the way of all.

    Args:
        count: How many threads.
        name: Of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, name)
        self._count = count
        self._lock = threading.Lock()
        self._waiting: dict[Acting, deque[tuple[Future[object], Callable[[], object]]]] = {}
        """By tenant; the one that was served longest ago comes first."""
        self._running: Counter[str] = Counter()

    def submit(
        self,
        fn: Callable[ArgumentsT, ResultT],
        /,
        *args: ArgumentsT.args,
        **kwargs: ArgumentsT.kwargs,
    ) -> Future[ResultT]:
        """Run a function in the turn of the tenant that the caller acts for."""
        future: Future[ResultT] = Future()
        with self._lock:
            waiting = self._waiting.setdefault(acting.get(), deque())
            waiting.append((future, partial(fn, *args, **kwargs)))  # type: ignore[arg-type]
            self._start_next()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work; what waits is done first, or cancelled."""
        with self._lock:
            for tenant, works in self._waiting.items():
                for future, work in works:
                    if not (cancel_futures and future.cancel()):
                        self._running[tenant.tenant] += 1
                        super().submit(self._run, tenant.tenant, future, work)
            self._waiting.clear()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _start_next(self) -> None:
        """Give free threads to those who wait."""
        while self._running.total() < self._count:
            most = max(1, self._count - 1)
            free = [each for each in self._waiting if self._running[each.tenant] < most]
            if not free:
                return
            chosen = min(free, key=lambda each: (self._running[each.tenant] + 1) / each.weight)
            works = self._waiting.pop(chosen)
            future, work = works.popleft()
            if works:
                self._waiting[chosen] = works
            self._running[chosen.tenant] += 1
            super().submit(self._run, chosen.tenant, future, work)

    def _run(self, tenant: str, future: Future[object], work: Callable[[], object]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - the future passes it on
                    future.set_exception(error)
        finally:
            with self._lock:
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                self._start_next()
