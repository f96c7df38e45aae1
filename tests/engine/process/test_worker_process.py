from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import count, repeat

import pytest

from manylora.engine.process.worker_process import (
    LOOK_S,
    SILENT_S,
    STUCK_S,
    Pulse,
    Signs,
    StallDetector,
)

LIVING = Signs(beats=1, turns=1, cpu_ticks=1, state="S")


def looks_until_problem(signs: Iterable[Signs], most: int = 1000) -> tuple[int, str] | None:
    """How many looks it takes to see that something is wrong, after one that sees an engine alive."""
    detector = StallDetector()
    assert detector.problem(LIVING._replace(beats=0, turns=0, cpu_ticks=0)) is None
    assert detector.problem(LIVING) is None
    for number, each in zip(range(1, most), signs, strict=False):
        if problem := detector.problem(each):
            return number, problem
    return None


@pytest.mark.parametrize("state", ["T", "S"])
def test_a_process_that_does_nothing_at_all_has_stopped(state: str) -> None:
    found = looks_until_problem(repeat(LIVING._replace(state=state)))
    assert found == (SILENT_S / LOOK_S, "gave no sign of life for 6 s")


@pytest.mark.parametrize("state", ["S", "R", "D"])
def test_a_step_that_does_not_end_takes_a_minute_to_notice(state: str) -> None:
    """Whether the interpreter is free meanwhile, as while a GPU computes, or not."""
    beating = (
        LIVING._replace(beats=number, cpu_ticks=40 * number, state=state) for number in count(2)
    )
    busy = (LIVING._replace(cpu_ticks=40 * number, state=state) for number in count(2))
    for signs in (beating, busy):
        assert looks_until_problem(signs) == (STUCK_S / LOOK_S, "did not end a step for 60 s")


def test_a_process_that_waits_for_a_disk_is_only_slow() -> None:
    found = looks_until_problem(repeat(LIVING._replace(state="D")))
    assert found == (STUCK_S / LOOK_S, "did not end a step for 60 s")


def test_a_process_that_others_keep_from_every_core_is_not_to_blame() -> None:
    assert (
        looks_until_problem(LIVING._replace(cpu_ticks=number, state="R") for number in count(2))
        is None
    )


def test_long_steps_between_which_the_loop_turns_are_no_problem() -> None:
    looks = int(STUCK_S / LOOK_S) - 1
    assert (
        looks_until_problem(LIVING._replace(beats=n, turns=2 + n // looks) for n in count(2))
        is None
    )


def test_nothing_is_wrong_with_an_engine_in_a_debugger() -> None:
    assert looks_until_problem(repeat(LIVING._replace(state="t"))) is None


def test_a_step_may_take_longer_where_steps_are_long() -> None:
    detector = StallDetector(stuck_s=300.0)
    problems = [detector.problem(LIVING._replace(beats=number)) for number in range(602)]
    assert problems[:600] == [None] * 600
    assert problems[600] == "did not end a step for 300 s"


def test_what_the_engine_writes_is_what_the_client_sees() -> None:
    fd = Pulse.create()
    engine, client = Pulse(fd), Pulse(fd)
    os.close(fd)
    engine.write(3, 1 << 40)
    signs = client.signs(os.getpid())
    assert (signs.beats, signs.turns, signs.state in "RS") == (3, 1 << 40, True)
    assert signs.cpu_ticks > 0
    assert client.signs(1 << 30) == Signs(3, 1 << 40)  # there is no such process any more
