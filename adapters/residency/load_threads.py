"""Threads that load and copy adapters beside the engine's steps, and give way to them.

A step uses every core, so a loader that is on one of them stops the whole step. Such a thread is therefore less
important to the operating system than those that compute: it gets what they leave, and at least a share that its
niceness fixes. And each of its operations keeps to one core. Knows nothing of the work.

Niceness bounds a loader's share over a long time only: within one step a loader may run for some milliseconds, and a
copier beside it. `LoadPace` bounds it piece by piece, on one budget, and not at all while no step runs. Both are
needed: with either alone the slowest steps in a hundred took more than a quarter longer beside loads, with both a
ninth (`benchmarks/results/step-stall-cpu.json`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import torch

from manylora.adapters.residency.images import HostImage
from manylora.errors import AdapterUnavailableError, ManyloraError
from manylora.memory.arena import is_device_lost

BURST_S = 0.002
"""What may be taken at once after a time without work: a short copy that a request waits for is done at once."""
PIECE_S = 0.001
"""Work of a thread between two pauses, at least."""


@dataclass(eq=False)
class LoadPace:
    """One budget for all threads that load or copy. Thread-safe."""

    share: float
    """What they may take of one core at least while steps run, all together; 1 does not hold them up."""
    _: KW_ONLY
    clock: Callable[[], float] = time.perf_counter
    """Monotonic seconds."""
    thread_clock: Callable[[], float] = time.thread_time
    """Seconds that the calling thread has computed."""
    idle: threading.Event = field(default_factory=threading.Event)
    """Is set while no step runs, which ends all pauses."""

    def __post_init__(self) -> None:
        self._share_now = self.share
        self._lock = threading.Lock()
        self.idle.set()
        self._free_s = 0.0
        """When the work done so far is paid for."""
        self._thread = threading.local()

    def set_stepping(self, running: int, held_up: int = 0) -> None:
        """Say which steps run from now on.

        Args:
            running: Requests in a step; 0 when none runs.
            held_up: Requests that wait for loads and would run otherwise.
        """
        if running:
            self._share_now = max(self.share, held_up / (running + held_up))
            self.idle.clear()
            return
        self.idle.set()
        with self._lock:
            self._free_s = 0.0  # threads in a pause continue, and owe nothing to later steps

    def pause(self) -> None:
        """Called by a loading thread after each small piece of work; sleeps as long as the budget is spent."""
        share = self._share_now
        if share >= 1 or self.idle.is_set():
            self._thread.paid_s = None
            return
        computed_s = self.thread_clock()
        paid_s: float | None = getattr(self._thread, "paid_s", None)
        piece_s = 0.0 if paid_s is None else computed_s - paid_s
        if piece_s < PIECE_S:
            self._thread.paid_s = computed_s - piece_s
            return
        self._thread.paid_s = computed_s
        with self._lock:
            now = self.clock()
            saved_up_s = now - piece_s - BURST_S / share
            self._free_s = max(self._free_s, saved_up_s) + piece_s / share
            pause_s = self._free_s - now
        if pause_s > 0:
            self.idle.wait(pause_s)


logger = logging.getLogger(__name__)

LAST_TURN = 1 << 62
"""Turn of a job for which no turn was given; such jobs start in the order in which they came."""


class TaskExecutor(Protocol):
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
    error: ManyloraError | None = field(default=None, init=False)
    """Set when there is no image."""
    device_error: Exception | None = field(default=None, init=False)
    """Set when the device is lost: then not this adapter alone failed, and the engine must be started again."""
    turn: int = LAST_TURN
    """Of the jobs that wait, the one with the least turn is started first. May change while it waits."""


class LoadQueue:
    """Jobs that wait, and jobs that are done.

    Args:
        executor: Runs them.
        notify: Called by the executor's thread whenever a job is done.
    """

    def __init__(self, executor: TaskExecutor, notify: Callable[[], None] | None = None) -> None:
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
        self._executor.submit(self._run_next)

    def run_now(self, job: LoadJob) -> None:
        """Run a job in the calling thread. It is not among those of `take_done`; a fault is logged and is its error."""
        job.error = AdapterUnavailableError(
            "Loading the adapter failed inside the server; its log says why."
        )
        try:
            job.image = job.task()
            job.error = None
        except ManyloraError as error:
            job.error = error
        except (OSError, MemoryError) as error:
            logger.warning("loading adapter %s failed: %s", job.digest, error)
            job.error = AdapterUnavailableError(
                f"The adapter's weights could not be read: {type(error).__name__}."
            )
        except Exception as fault:
            logger.exception("loading an adapter raised", exc_info=fault)
            job.device_error = fault if is_device_lost(fault) else None

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
        self.run_now(job)
        self._done.append(job)
        if self._notify is not None:
            self._notify()


LOAD_NICENESS = 10
"""What loads add to the niceness of the engine: where both compete for a core, one tenth of it."""
COPY_NICENESS = 5
"""What copies add: a quarter of it, because a copy is short, and a request may wait for nothing else."""
MAX_NICENESS = 19


def loader_threads(count: int, *, has_idle_core: bool = False) -> ThreadPoolExecutor:
    """Threads that read, check and pack adapters.

    Args:
        count: How many.
        has_idle_core: Whether steps leave a core to others. Then loads compete with other processes rather than with
            steps, and are not to starve beside them.
    """
    niceness = COPY_NICENESS if has_idle_core else LOAD_NICENESS
    return ThreadPoolExecutor(
        count, "adapter-loader", _give_way, (niceness, torch.get_num_threads())
    )


def copier_thread() -> ThreadPoolExecutor:
    """One thread that copies images to the device, so that no copy waits behind a load."""
    return ThreadPoolExecutor(
        1, "adapter-copier", _give_way, (COPY_NICENESS, torch.get_num_threads())
    )


def _give_way(niceness: int, default_threads: int) -> None:
    """Prepare the calling thread: lower its priority, and let its operations use one core."""
    if sys.platform == "linux":  # elsewhere niceness is of the process
        thread = threading.get_native_id()
        try:
            os.setpriority(
                os.PRIO_PROCESS,
                thread,
                min(os.getpriority(os.PRIO_PROCESS, thread) + niceness, MAX_NICENESS),
            )
        except OSError as error:
            logger.warning(
                "loading adapters may slow down steps: its priority cannot be lowered: %s", error
            )
    # torch counts a thread's cores from its first operation on; setting them also sets what threads that torch has not
    # seen yet start with, which another thread puts right.
    torch.get_num_threads()
    torch.set_num_threads(1)
    repair = threading.Thread(target=torch.set_num_threads, args=(default_threads,))
    repair.start()
    repair.join()
