from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from manylora.adapters.residency.load_threads import (
    BURST_S,
    COPY_NICENESS,
    LOAD_NICENESS,
    PIECE_S,
    LoadPace,
    copier_thread,
    loader_threads,
)

PATIENCE_S = 30.0


class _Work(threading.Event):
    """A pace by clocks that a test sets, and work in pieces of 2 ms; its pauses are noted, and made only if asked.

    As the event that ends pauses it sees each of them.
    """

    def __init__(self, share: float, *, sleeps: bool = False) -> None:
        super().__init__()
        self.now_s, self.computed_s = 1000.0, 0.0
        self.pace = LoadPace(
            share, clock=lambda: self.now_s, thread_clock=lambda: self.computed_s, idle=self
        )
        self.pauses: list[float] = []
        self.has_paused = threading.Event()
        self.sleeps = sleeps

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        self.has_paused.set()
        return super().wait(timeout if self.sleeps else 0)

    def run(self, pieces: int, computed_s: float = 0.002, taken_s: float | None = None) -> int:
        """Compute so many pieces, each in `taken_s` seconds; by default nothing else had the core."""
        self.pace.pause()
        for _ in range(pieces):
            self.computed_s += computed_s
            self.now_s += computed_s if taken_s is None else taken_s
            self.pace.pause()
        return pieces


def test_all_threads_have_one_budget() -> None:
    work = _Work(0.1)
    work.pace.set_stepping(1)
    for _ in range(3):
        in_a_new_thread(lambda: work.run(4))
    # 12 pieces of 2 ms at a tenth of a core take 240 ms, of which 24 ms are over and a burst is free.
    assert work.pauses[-1] == pytest.approx(0.216 - BURST_S / 0.1)


@pytest.mark.parametrize(
    ("share", "running"), [(0.01, 0), (1, 1)], ids=["no steps", "all of a core"]
)
def test_nobody_pauses_without_steps_or_with_a_share_of_one(share: float, running: int) -> None:
    work = _Work(share)
    for requests in (1, 0, running):
        work.pace.set_stepping(requests)
    work.run(5)
    assert not work.pauses


def test_a_pause_ends_with_the_last_step() -> None:
    work = _Work(
        0.002 / PATIENCE_S, sleeps=True
    )  # one piece is paid for after more than the patience
    work.pace.set_stepping(1)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work.run, 3)
        assert work.has_paused.wait(PATIENCE_S)
        work.pace.set_stepping(0)
        done.result(PATIENCE_S)


def test_work_much_smaller_than_a_piece_is_added_up() -> None:
    work = _Work(0.1)
    work.pace.set_stepping(1)
    work.run(200, PIECE_S / 20)
    assert len(work.pauses) <= 10
    assert work.pauses[-1] > 0


@pytest.mark.parametrize(
    ("running", "held_up", "share"), [(16, 0, 0.1), (31, 1, 0.1), (12, 4, 0.25), (2, 14, 0.875)]
)
def test_the_share_is_that_of_the_requests_that_wait_for_loads_and_never_below_the_setting(
    running: int, held_up: int, share: float
) -> None:
    work = _Work(0.1)
    work.pace.set_stepping(running, held_up)
    work.run(100, 0.01, 0.01 / share)
    # At just this share what is owed stays as it is.
    assert max(work.pauses, default=0.0) <= 0.01 / share
    work.run(100, 0.01, 0.005 / share)
    assert work.pauses[-1] >= 0.4 / share
    work.pace.set_stepping(0)
    work.pace.set_stepping(64, 0)  # and as soon as they run, the setting holds again
    work.run(10)
    assert work.pauses[-1] > 0.1


def test_time_without_steps_is_not_saved_up_and_not_paid_for() -> None:
    work = _Work(0.1)
    work.pace.pause()
    work.computed_s = 5.0  # without steps
    work.pace.pause()
    work.now_s = 2000.0
    work.pace.set_stepping(1)
    work.run(2)
    # The second is paid for by what was saved up, which is 2 ms and not a tenth of 1,000 s.
    assert work.pauses == [pytest.approx(0.016)]


def test_what_was_not_paid_before_steps_ended_is_not_due_when_others_begin() -> None:
    work = _Work(0.1)
    for _ in range(1000):  # short requests, one after the other
        work.pace.set_stepping(1)
        work.run(1, 0.0015, 0.002)
        work.pace.set_stepping(0)
        work.now_s += 0.002
    assert max(work.pauses, default=0.0) <= 0.015
    work.pace.set_stepping(1)
    work.run(10, 0.0015)
    assert work.pauses


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
    with loader_threads(
        1, has_idle_core=True
    ) as loads:  # nor do they starve beside other processes
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
