"""Budget of a step: the line fitted to past steps, the target, and the part of the batch lane."""

from __future__ import annotations

import math
import random

import pytest

from manylora.config import SchedulerConfig
from manylora.engine.request import FlowKey
from manylora.engine.scheduling.chunks import TARGET_AIM, StepBudget, StepTime
from simulation.driven import Simulator, request

UNIT_S = 0.001


def test_overhead_and_slope_are_found_from_steps_of_different_lengths() -> None:
    time, draw = StepTime(UNIT_S), random.Random(1)
    for _ in range(300):
        units = draw.uniform(10, 200)
        time.note(units, 0.05 + 0.002 * units)
    assert time.unit_s == pytest.approx(0.002, rel=0.02)
    assert time.seconds(0.0) == pytest.approx(0.05, rel=0.1)
    assert time.units(0.25) == pytest.approx(100, rel=0.02)


def test_steps_that_are_all_alike_say_nothing_of_the_slope() -> None:
    time = StepTime(UNIT_S)
    for _ in range(300):
        time.note(40.0, 0.06)
    assert time.unit_s == pytest.approx(UNIT_S)
    assert time.seconds(0.0) == pytest.approx(0.02)


def test_one_slow_step_bends_the_slope_within_bounds_and_is_forgotten() -> None:
    time, draw = StepTime(UNIT_S), random.Random(1)
    time.note(200.0, 30.0)
    time.note(10.0, 0.06)
    assert UNIT_S / 4 <= time.unit_s <= UNIT_S * 4
    for _ in range(600):
        units = draw.uniform(10, 200)
        time.note(units, 0.05 + UNIT_S * units)
    assert time.unit_s == pytest.approx(UNIT_S, rel=0.02)
    assert time.seconds(0.0) == pytest.approx(0.05, rel=0.1)


def test_a_pause_of_the_machine_counts_as_a_slow_step_and_no_more() -> None:
    time, draw = StepTime(UNIT_S), random.Random(1)
    for _ in range(300):
        units = draw.uniform(10, 200)
        time.note(units, 0.05 + UNIT_S * units)
    time.note(20.0, 5.0)
    assert time.seconds(20.0) < 0.1


def test_short_steps_are_learnt_where_long_ones_predict_less_than_nothing_for_them() -> None:
    time = StepTime(UNIT_S)
    for units in (300.0, 500.0) * 200:
        time.note(units, 0.002 * (units - 100))
    assert time.seconds(10.0) < 0
    for _ in range(400):
        time.note(10.0, 0.03)
    assert time.seconds(10.0) == pytest.approx(0.03, rel=0.1)


def learned(config: SchedulerConfig, *, has_interactive: bool = True) -> StepBudget:
    """A budget that knows steps of 50 ms and 1 ms a unit."""
    budget = StepBudget(config, 512, UNIT_S)
    for units in (10.0, 200.0) * 300:
        budget.note_step(units, 0.0, 0.05 + UNIT_S * units, has_interactive)
    return budget


def test_a_target_leaves_prompts_what_overhead_and_decoding_leave() -> None:
    budget = learned(SchedulerConfig(itl_target_ms=200 / TARGET_AIM))
    assert budget.units(20.0) == pytest.approx(130, abs=2)
    assert budget.units(500.0) < 0
    assert budget.batch_units(20.0) == math.inf, "a batch shares what the target leaves"


def test_without_a_target_prompts_fill_the_step_and_a_batch_stretches_it() -> None:
    budget = learned(SchedulerConfig(batch_stretch=1.5))
    assert budget.units(20.0) == math.inf
    assert budget.batch_units(20.0) == pytest.approx(35, abs=1), "half of 50 ms and 20 units"
    assert budget.batch_units(0.0) == pytest.approx(25, abs=1), (
        "beside prompts alone, half of the overhead"
    )


def test_steps_of_a_batch_alone_are_as_long_as_those_beside_interactive_requests_for_a_while() -> (
    None
):
    budget = learned(SchedulerConfig(batch_stretch=1.5))
    for _ in range(200):
        budget.note_step(60.0, 40.0, 0.11, True)  # 20 units of its own, and 40 of a batch
    assert budget.batch_units(None) == pytest.approx(0.5 * 70 + 20, rel=0.05)
    keeps_short = []
    for has_interactive in (*[False] * 60, True):
        keeps_short.append(budget.keeps_short)
        budget.note_step(0.0, 0.0, 1.0, has_interactive)
    assert keeps_short == [True] * 60 + [False]
    assert budget.keeps_short


def test_a_batch_that_is_alone_from_the_start_fills_whole_steps() -> None:
    assert not learned(SchedulerConfig(), has_interactive=False).keeps_short


@pytest.mark.parametrize("num_pages", [8, 10, 14, 20])
@pytest.mark.parametrize("num_lines", [3, 6])
def test_lines_that_wait_for_pages_leave_the_little_that_a_batch_may_compute_to_others(
    num_pages: int, num_lines: int
) -> None:
    simulator = Simulator(num_pages=num_pages, max_running=16, step_tokens=64)
    simulator.submit(request("chat", max_tokens=8))
    for index in range(num_lines):
        flow = FlowKey(tenant="batch", lane=1)
        simulator.submit(request(f"line{index}", prompt=8, max_tokens=20, flow=flow))
    simulator.run()
    assert {simulator.last(f"line{index}").finish_reason for index in range(num_lines)} == {
        "length"
    }


def test_a_long_prompt_of_a_batch_does_not_keep_an_interactive_request_from_starting() -> None:
    simulator = Simulator(num_pages=400, max_running=16, step_tokens=64)
    simulator.submit(request("chat", max_tokens=200))
    simulator.submit(
        request("line", prompt=300, max_tokens=2, flow=FlowKey(tenant="batch", lane=1))
    )
    simulator.pump(20)
    simulator.submit(request("next", prompt=60, max_tokens=2))
    simulator.pump(4)
    assert simulator.last("next").finish_reason == "length"
    simulator.run()


def test_a_batch_goes_on_beside_interactive_requests_and_ends() -> None:
    """A quarter of two decoding requests is less than the price of a token, and one token is always allowed."""
    simulator = Simulator(num_pages=400, max_running=16, step_tokens=64)
    for index in range(2):
        simulator.submit(request(f"chat{index}", max_tokens=60))
    lines = [
        request(f"line{i}", prompt=8, max_tokens=20, flow=FlowKey(tenant="batch", lane=1))
        for i in range(10)
    ]
    simulator.submit(*lines)
    counts = []
    for _ in range(50):
        outputs = simulator.pump()
        counts.append(sum(output.request_id.startswith("line") for output in outputs))
        assert len(simulator.scheduler.table.running) >= 2
    assert max(counts) <= 1, counts
    assert sum(counts) >= 20
    simulator.run()
    assert {simulator.last(line.request_id).finish_reason for line in lines} == {"length"}
