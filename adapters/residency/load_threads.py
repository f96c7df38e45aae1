"""Threads that load and copy adapters beside the engine's steps, and give way to them.

A step uses every core, so a loader on one core delays the whole step. The threads here therefore have a lower priority
than those that compute: they get the time that others leave, and at least the share of their niceness. Each of their
operations uses one core. Knows nothing of the work.

Niceness bounds a loader's share only over a long time: within one step, a loader and a copier may run for some
milliseconds. `LoadPace` bounds them after each piece of work, on one budget, while steps run. Both are needed: with
either alone, the slowest 1 % of steps took more than a quarter longer beside loads, with both a ninth longer
(`benchmarks/results/step-stall-cpu.json`).
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
"""Largest burst of work after a time without work, so that a short copy that a request waits for needs no pause."""
PIECE_S = 0.001
"""Least work of a thread between two pauses."""


@dataclass(eq=False)
class LoadPace:
    """One budget for all threads that load or copy. Thread-safe."""

    share: float
    """Share of one core that all these threads together may take while steps run; 1 means no pauses."""
    _: KW_ONLY
    clock: Callable[[], float] = time.perf_counter
    """Monotonic seconds."""
    thread_clock: Callable[[], float] = time.thread_time
    """CPU time of the calling thread in seconds."""
    idle: threading.Event = field(default_factory=threading.Event)
    """Set while no step runs; it ends all pauses."""

    def __post_init__(self) -> None:
        self._share_now = self.share
        self._lock = threading.Lock()
        self.idle.set()
        self._free_s = 0.0
        """Time at which the work done so far is within the budget."""
        self._thread = threading.local()

    def set_stepping(self, running: int, held_up: int = 0) -> None:
        """Tell about the steps that run from now on.

        Args:
            running: Requests in a step; 0 if no step runs.
            held_up: Requests that wait for loads and could run without that.
        """
        if running:
            self._share_now = max(self.share, held_up / (running + held_up))
            self.idle.clear()
            return
        self.idle.set()
        with self._lock:
            self._free_s = 0.0  # paused threads go on, and the work until the next step is free

    def pause(self) -> None:
        """Sleep while the budget is spent. A loading thread calls this after each small piece of work."""
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
"""Turn of a job without a given turn. Such jobs start in the order in which they came."""


class TaskExecutor(Protocol):
    """Runs work later: a ThreadPoolExecutor, or the executor of a simulation."""

    def submit(self, fn: Callable[[], None], /) -> Future[None]:
        """Run `fn` on some thread, now or later."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work."""


@dataclass(eq=False)
class LoadJob:
    """One piece of work for one adapter, and its result."""

    digest: str
    task: Callable[[], HostImage]
    image: HostImage | None = field(default=None, init=False)
    error: ManyloraError | None = field(default=None, init=False)
    """Error of the adapter; set if there is no image."""
    device_error: Exception | None = field(default=None, init=False)
    """Error of a lost device. It concerns more than this adapter: the engine must be started again."""
    turn: int = LAST_TURN
    """Waiting jobs start in the order of their turns. The turn may change while the job waits."""


class LoadQueue:
    """Jobs that wait, and jobs that are done.

    Args:
        executor: Runs the jobs.
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
        # A thread chooses its job when it starts, not now, so a waiting job can be cancelled.
        self._executor.submit(self._run_next)

    def run_now(self, job: LoadJob) -> None:
        """Run a job in the calling thread. `take_done` does not return it; a fault is logged and becomes its error."""
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
        """Take a waiting job back; False if it has started."""
        with self._lock:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            return True

    def take_done(self) -> list[LoadJob]:
        """Take the jobs that ended since the last call, in the order of their ends."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Drop waiting jobs, and return when running ones are done."""
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
"""Niceness of loads above that of the engine. If both compete for a core, loads get a tenth of it."""
COPY_NICENESS = 5
"""Niceness of copies above that of the engine. They get a quarter: a copy is short, and a request waits only for it."""
MAX_NICENESS = 19


def loader_threads(count: int, *, has_idle_core: bool = False) -> ThreadPoolExecutor:
    """Threads that read, check and pack adapters.

    Args:
        count: Number of threads.
        has_idle_core: True if steps leave a core to others. Then loads compete with other processes, not with steps,
            and get the priority of copies.
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
    if sys.platform == "linux":  # elsewhere a whole process has one niceness
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
    # torch fixes a thread's number of cores at its first operation. Setting it also changes the default of threads that
    # torch has not seen yet, so another thread sets the default again.
    torch.get_num_threads()
    torch.set_num_threads(1)
    repair = threading.Thread(target=torch.set_num_threads, args=(default_threads,))
    repair.start()
    repair.join()
