"""Lets loads run beside steps without stalling them: in short pieces, with pauses between them.

A step of a CPU uses every core and waits for the slowest of them, so what a loader takes of one core is what the step
takes longer. Niceness (`load_threads`) bounds that share over a long time only: in one step a loader may run for some
milliseconds, and a copier beside it. Here they keep to it piece by piece, on one budget, and work on in full as soon as
no step runs. Both are needed: with either alone the slowest steps in a hundred took more than a quarter longer beside
loads; `weft bench stall` tells how much they take now. Knows nothing of the work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 0.002
"""What may be taken at once after a time without work: a short copy that a request waits for is done at once."""
PIECE_S = 0.001
"""Work of a thread between two pauses, at least."""


class LoadPace:
    """One budget for all threads that load or copy. Thread-safe.

    The share is that of the requests that wait for loads among these and those that run: what a step of the few takes
    longer is worth it where many wait. With nobody waiting it is the setting.

    Args:
        share: What they may take of one core at least while steps run, all together; 1 does not hold them up.
        clock: Monotonic seconds.
        thread_clock: Seconds that the calling thread has computed.
    """

    def __init__(
        self,
        share: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._share = share
        self._share_now = share
        self._clock = clock
        self._thread_clock = thread_clock
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
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
            self._share_now = max(self._share, held_up / (running + held_up))
            self._idle.clear()
            return
        self._idle.set()
        with self._lock:
            self._free_s = 0.0  # who was in a pause goes on, and owes nothing to steps to come

    def pause(self) -> None:
        """Called by a loading thread after each small piece of work; sleeps as long as the budget is spent."""
        share = self._share_now
        if share >= 1 or self._idle.is_set():
            self._thread.paid_s = None
            return
        computed_s = self._thread_clock()
        paid_s: float | None = getattr(self._thread, "paid_s", None)
        piece_s = 0.0 if paid_s is None else computed_s - paid_s
        if piece_s < PIECE_S:
            self._thread.paid_s = computed_s - piece_s
            return
        self._thread.paid_s = computed_s
        with self._lock:
            now = self._clock()
            saved_up_s = now - piece_s - BURST_S / share
            self._free_s = max(self._free_s, saved_up_s) + piece_s / share
            pause_s = self._free_s - now
        if pause_s > 0:
            self._idle.wait(pause_s)
