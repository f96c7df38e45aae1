"""Time that passes only when told to, and threads that run in it: one at a time, in an order that the seed fixes."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]  # SQLAlchemy brings it


class VirtualTime:
    """The hub that runs what is due. Background work calls `sleep` where a real thread would take its time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        """Number of times that background work went on."""
        self._tickets = 0
        self._sleeping: list[tuple[float, int, greenlet]] = []
        self._hub = getcurrent()

    @property
    def next_event_s(self) -> float | None:
        """Second of the next event; None when nothing is under way."""
        return self._sleeping[0][0] if self._sleeping else None

    def spawn(self, work: Callable[[], None]) -> None:
        """Start a thread as soon as time passes."""
        self._wake_at(self.now_s, greenlet(work, self._hub))

    def sleep(self, seconds: float) -> None:
        """Called in background work: let `seconds` pass."""
        self._wake_at(self.now_s + seconds, getcurrent())
        self._hub.switch()

    def advance(self, seconds: float) -> None:
        """Let background work run for `seconds`; called by the engine's thread."""
        self.run_until(self.now_s + seconds)

    def run_until(self, end_s: float) -> None:
        """Run background work up to a moment."""
        while self._sleeping and self._sleeping[0][0] <= end_s:
            when_s, _, sleeper = heapq.heappop(self._sleeping)
            self.now_s = max(self.now_s, when_s)
            self.num_events += 1
            sleeper.switch()
        self.now_s = max(self.now_s, end_s)

    def kill_all(self) -> None:
        """End what still sleeps."""
        while self._sleeping:
            heapq.heappop(self._sleeping)[2].throw()

    def _wake_at(self, when_s: float, sleeper: greenlet) -> None:
        self._tickets += 1
        heapq.heappush(self._sleeping, (when_s, self._tickets, sleeper))


class VirtualExecutor:
    """A thread pool in virtual time."""

    def __init__(self, time: VirtualTime, num_threads: int) -> None:
        self._time = time
        self._num_idle = num_threads
        self._queue: deque[tuple[Callable[[], None], Future[None]]] = deque()

    def submit(self, fn: Callable[[], None], /) -> Future[None]:
        """Run `fn` when a thread is free."""
        future: Future[None] = Future()
        self._queue.append((fn, future))
        if self._num_idle:
            self._num_idle -= 1
            self._time.spawn(self._work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - a pool's signature
        """Take no more work."""
        self._queue.clear()

    def _work(self) -> None:
        while self._queue:
            fn, future = self._queue.popleft()
            try:
                future.set_result(fn())
            except Exception as error:  # noqa: BLE001 - as a thread pool does
                future.set_exception(error)
        self._num_idle += 1


class EngineClock:
    """Clock of the engine: it may stand still for a while, and jump."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._ahead_s = 0.0
        self._frozen_s: float | None = None

    def __call__(self) -> float:
        return self._time.now_s + self._ahead_s if self._frozen_s is None else self._frozen_s

    def jump(self, seconds: float) -> None:
        """Skip ahead."""
        self._ahead_s += seconds

    def freeze(self, frozen: bool) -> None:
        """Stand still, or go on from where it stands."""
        if frozen:
            self._frozen_s = self()
        elif self._frozen_s is not None:
            self._ahead_s = max(self._frozen_s - self._time.now_s, self._ahead_s)
            self._frozen_s = None
