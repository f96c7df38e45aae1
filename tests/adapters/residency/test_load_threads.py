from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from weft.adapters.residency.load_threads import COPY_NICENESS, LOAD_NICENESS, copier_thread, loader_threads


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
