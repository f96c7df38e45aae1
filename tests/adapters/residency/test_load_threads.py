from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from weft.adapters.residency.load_threads import (
    BURST_S,
    COPY_NICENESS,
    LOAD_NICENESS,
    PIECE_S,
    LoadPace,
    copier_thread,
    loader_threads,
)

PATIENCE_S = 30.0


def compute(seconds: float) -> None:
    """Keep a core busy, by the time that this thread has computed."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def work(pace: LoadPace, pieces: int) -> float:
    """Work in pieces, and return the seconds that were computed."""
    pace.pause()
    started_s = time.thread_time()
    for _ in range(pieces):
        compute(PIECE_S)
        pace.pause()
    return time.thread_time() - started_s


def test_all_threads_together_keep_to_their_share_while_steps_run() -> None:
    pace = LoadPace(0.1)
    pace.set_stepping(1)
    started_s = time.perf_counter()
    with ThreadPoolExecutor(3) as pool:
        computed_s = sum(pool.map(lambda _: work(pace, 4), range(3)))
    assert computed_s >= 12 * PIECE_S
    assert computed_s - BURST_S <= 0.11 * (time.perf_counter() - started_s)


def test_work_much_smaller_than_a_piece_is_added_up() -> None:
    now = computed = 0.0
    pace = LoadPace(0.1, clock=lambda: now, thread_clock=lambda: computed)
    waited = _CountingEvent(pace, sleeps=False)
    pace.set_stepping(1)
    pace.pause()
    for _ in range(200):
        computed += PIECE_S / 20
        now += PIECE_S / 20
        pace.pause()
    assert waited.count <= 10
    assert (waited.timeouts[-1] or 0.0) > 0


@pytest.mark.parametrize(("share", "running"), [(0.01, 0), (1, 1)], ids=["no steps", "all of a core"])
def test_nobody_pauses_without_steps_or_with_a_share_of_one(share: float, running: int) -> None:
    pace = LoadPace(share)
    waited = _CountingEvent(pace)
    for requests in (1, 0, running):
        pace.set_stepping(requests)
    work(pace, 5)
    assert waited.count == 0


@pytest.mark.parametrize(("running", "held_up", "share"), [(16, 0, 0.1), (31, 1, 0.1), (12, 4, 0.25), (2, 14, 0.875)])
def test_the_share_is_that_of_the_requests_that_wait_for_loads_and_never_below_the_setting(
    running: int, held_up: int, share: float
) -> None:
    now = computed = 0.0
    pace = LoadPace(0.1, clock=lambda: now, thread_clock=lambda: computed)
    waited = _CountingEvent(pace, sleeps=False)
    pace.set_stepping(running, held_up)
    pace.pause()
    for _ in range(100):
        computed += 0.01
        now += 0.01 / share
        pace.pause()
    # At just this share what is owed stays as it is.
    assert max((timeout or 0.0 for timeout in waited.timeouts), default=0.0) <= 0.01 / share
    for _ in range(100):
        computed += 0.01
        now += 0.005 / share
        pace.pause()
    assert (waited.timeouts[-1] or 0.0) >= 0.4 / share
    pace.set_stepping(0)
    pace.set_stepping(64, 0)  # and as soon as they run, the setting holds again
    for _ in range(10):
        computed += 0.002
        now += 0.002
        pace.pause()
    assert (waited.timeouts[-1] or 0.0) > 0.1


def test_a_pause_ends_with_the_last_step() -> None:
    pace = LoadPace(0.01)
    waited = _CountingEvent(pace)
    pace.set_stepping(1)
    with ThreadPoolExecutor(1) as pool:
        # By its share this would take more than the patience.
        done = pool.submit(work, pace, int(0.02 * PATIENCE_S / PIECE_S))
        assert waited.entered.wait(PATIENCE_S)
        pace.set_stepping(0)
        done.result(PATIENCE_S)


def test_time_without_steps_is_not_saved_up_and_not_paid_for() -> None:
    now = 0.0
    computed = 0.0
    pace = LoadPace(0.1, clock=lambda: now, thread_clock=lambda: computed)
    waited = _CountingEvent(pace)
    pace.pause()
    computed = 5.0  # without steps
    pace.pause()
    now = 1000.0
    pace.set_stepping(1)
    for _ in range(3):  # what was computed before the first is not known
        computed += 0.002
        now += 0.002
        pace.pause()
    # The second is paid for by what was saved up, which is 2 ms and not a tenth of 1,000 s.
    assert waited.timeouts == [pytest.approx(0.016)]


def test_what_was_not_paid_before_steps_ended_is_not_due_when_others_begin() -> None:
    now = 0.0
    computed = 0.0
    pace = LoadPace(0.1, clock=lambda: now, thread_clock=lambda: computed)
    waited = _CountingEvent(pace, sleeps=False)
    pace.pause()
    for _ in range(1000):  # short requests, one after the other
        pace.set_stepping(1)
        computed += 0.0015
        now += 0.002
        pace.pause()
        pace.set_stepping(0)
        now += 0.002
    assert max((timeout or 0.0 for timeout in waited.timeouts), default=0.0) <= 0.015
    pace.set_stepping(1)
    for _ in range(10):
        computed += 0.0015
        now += 0.0015
        pace.pause()
    assert waited.count > 0


class _CountingEvent:
    """Notes the pauses of a pace."""

    def __init__(self, pace: LoadPace, *, sleeps: bool = True) -> None:
        self._sleeps = sleeps
        self.timeouts: list[float | None] = []
        self.entered = threading.Event()
        self._wait = pace.idle.wait
        pace.idle.wait = self._note  # type: ignore[method-assign]

    @property
    def count(self) -> int:
        return len(self.timeouts)

    def _note(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        self.entered.set()
        return self._wait(timeout if self._sleeps else 0)


@pytest.fixture
def two_cores() -> Iterator[None]:
    """An engine whose steps use two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_a_new_thread(function: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


@pytest.mark.skipif(sys.platform != "linux", reason="niceness of a thread")
def test_loads_and_copies_are_less_important_than_steps_and_copies_more_than_loads() -> None:
    before = niceness()
    with loader_threads(2) as loads, copier_thread() as copies:
        assert loads.submit(niceness).result() == min(before + LOAD_NICENESS, 19)
        assert copies.submit(niceness).result() == min(before + COPY_NICENESS, 19)
    with loader_threads(1, has_idle_core=True) as loads:  # nor do they starve beside other processes
        assert loads.submit(niceness).result() == min(before + COPY_NICENESS, 19)
    assert niceness() == before
    assert LOAD_NICENESS > COPY_NICENESS > 0


@pytest.mark.usefixtures("two_cores")
def test_operations_of_loads_and_copies_keep_to_one_core_and_steps_keep_theirs() -> None:
    with loader_threads(1) as loads, copier_thread() as copies:
        assert loads.submit(torch.get_num_threads).result() == 1
        assert copies.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
        assert in_a_new_thread(torch.get_num_threads) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="niceness of a thread")
def test_a_priority_that_cannot_be_lowered_is_logged_and_loads_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_arguments: int) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    with loader_threads(1) as loads:
        assert loads.submit(lambda: 7).result() == 7
    assert "priority cannot be lowered" in caplog.text
