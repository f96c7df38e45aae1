"""Work for other threads, and what came of it. Knows not what the work does."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from weft.adapters.residency.images import HostImage
from weft.errors import AdapterUnavailableError, WeftError

logger = logging.getLogger(__name__)

LAST_TURN = 1 << 62
"""Of what nobody said when it is needed; such jobs start in the order in which they came."""


class LoadExecutor(Protocol):
    """Runs work some time; a ThreadPoolExecutor, or what a simulator makes of it."""

    def submit(self, fn: Callable[[], None], /) -> Future[None]:
        """Run `fn` on some thread, now or later."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work."""


@dataclass(eq=False)
class LoadJob:
    """One piece of work for one adapter, and what came of it."""

    digest: str
    task: Callable[[], HostImage]
    image: HostImage | None = field(default=None, init=False)
    error: WeftError | None = field(default=None, init=False)
    """Set when there is no image."""
    turn: int = LAST_TURN
    """Of the jobs that wait, the one with the least turn is started first. May change while it waits."""


class LoadQueue:
    """Jobs that wait, and jobs that are done.

    Args:
        executor: Runs them.
        notify: Called by the executor's thread whenever a job is done.
    """

    def __init__(self, executor: LoadExecutor, notify: Callable[[], None] | None = None) -> None:
        self._executor = executor
        self._notify = notify
        self._lock = threading.Lock()
        self._waiting: list[LoadJob] = []
        self._done: deque[LoadJob] = deque()

    def submit(self, job: LoadJob) -> None:
        """Queue a job."""
        with self._lock:
            self._waiting.append(job)
        # Which job a thread takes is decided when it starts, not now, so that one that waits can be taken back.
        self._executor.submit(self._run_next).add_done_callback(_log_fault)

    def run_now(self, job: LoadJob) -> None:
        """Run a job in the calling thread. It is not among those of `take_done`; a fault is logged and is its error."""
        try:
            self._run(job)
        except Exception as fault:
            logger.exception("loading an adapter raised", exc_info=fault)

    def cancel(self, job: LoadJob) -> bool:
        """Take a job back; False when it has started."""
        with self._lock:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            return True

    def take_done(self) -> list[LoadJob]:
        """Jobs that ended since the last call, in the order in which they did."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Drop what waits, and return when what runs is done."""
        with self._lock:
            self._waiting.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            job = min(self._waiting, key=lambda job: job.turn)
            self._waiting.remove(job)
        try:
            self._run(job)
        finally:
            self._done.append(job)
            if self._notify is not None:
                self._notify()

    def _run(self, job: LoadJob) -> None:
        job.error = AdapterUnavailableError("Loading the adapter failed inside the server; its log says why.")
        try:
            job.image = job.task()
            job.error = None
        except WeftError as error:
            job.error = error
        except (OSError, MemoryError) as error:
            logger.warning("loading adapter %s failed: %s", job.digest, error)
            job.error = AdapterUnavailableError(f"The adapter's weights could not be read: {type(error).__name__}.")


def _log_fault(future: Future[None]) -> None:
    if not future.cancelled() and (fault := future.exception()) is not None:
        logger.error("loading an adapter raised", exc_info=fault)
