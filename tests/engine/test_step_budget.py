"""How much a step may compute: the line fitted to past steps, the target, and the part of the batch lane."""

from __future__ import annotations

import math
import random

import pytest

from engine_simulator import Simulator, request
from weft.config import SchedulerConfig
from weft.engine.request import FlowKey
from weft.engine.step_budget import MIN_TOKENS, StepBudget, StepTime

UNIT_S = 0.001


def test_overhead_and_slope_are_found_from_steps_of_different_lengths() -> None:
    time, draw = StepTime(UNIT_S), random.Random(1)
    for _ in range(300):
        units = draw.uniform(10, 200)
        time.note(units, 0.05 + 0.002 * units)
    assert time.unit_s == pytest.approx(0.002, rel=0.02)
    assert time.overhead_units == pytest.approx(25, rel=0.1)


def test_steps_that_are_all_alike_say_nothing_of_the_slope() -> None:
    time = StepTime(UNIT_S)
    for _ in range(300):
        time.note(40.0, 0.06)
    assert time.unit_s == pytest.approx(UNIT_S)
    assert time.overhead_units == pytest.approx(20)


def test_one_slow_step_bends_the_slope_within_bounds_and_is_forgotten() -> None:
    time, draw = StepTime(UNIT_S), random.Random(1)
    time.note(200.0, 30.0)
    time.note(10.0, 0.06)
    assert UNIT_S / 4 <= time.unit_s <= UNIT_S * 4
    for _ in range(600):
        units = draw.uniform(10, 200)
        time.note(units, 0.05 + UNIT_S * units)
    assert time.unit_s == pytest.approx(UNIT_S, rel=0.02)
    assert time.overhead_units == pytest.approx(50, rel=0.1)


def learned(config: SchedulerConfig) -> StepBudget:
    """A budget that knows steps of 50 ms and 1 ms a unit."""
    budget = StepBudget(config, UNIT_S)
    for units in (10.0, 200.0) * 300:
        budget.note_step(units, 0.05 + UNIT_S * units, True)
    return budget


def test_a_target_leaves_prompts_what_overhead_and_decoding_leave() -> None:
    budget = learned(SchedulerConfig(itl_target_ms=200))
    assert budget.tokens(10, 20.0) == pytest.approx(130, abs=2)
    assert budget.batch_units(20.0) == math.inf, "a batch shares the tokens"
    assert budget.tokens(500, 20.0) == 12, "a step is never larger than step_tokens"


def test_a_target_that_cannot_be_kept_lets_prompts_go_on_slowly() -> None:
    assert learned(SchedulerConfig(itl_target_ms=20)).tokens(10, 20.0) == MIN_TOKENS


def test_without_a_target_prompts_fill_the_step_and_a_batch_stretches_it() -> None:
    budget = learned(SchedulerConfig(batch_stretch=1.5))
    assert budget.tokens(10, 20.0) == 502
    assert budget.batch_units(20.0) == pytest.approx(35, abs=1), "half of 50 ms and 20 units"
    assert StepBudget(SchedulerConfig(), UNIT_S).batch_units(0.0) == 1.0, "a batch is never shut out"
    assert budget.batch_units(0.0) == pytest.approx(25, abs=1), "beside prompts alone, half of the overhead"


def test_steps_of_a_batch_alone_are_as_long_as_those_beside_interactive_requests_for_a_while() -> None:
    budget = learned(SchedulerConfig(batch_stretch=1.5))
    for _ in range(500):
        beside = 20 + budget.batch_units(20.0)
    assert budget.batch_units(None) == pytest.approx(beside, rel=0.01)
    were_calm = []
    for has_interactive in (*[False] * 60, True):
        were_calm.append(budget.is_calm)
        budget.note_step(0.0, 1.0, has_interactive)
    assert were_calm == [True] * 60 + [False]
    assert budget.is_calm


def test_a_batch_that_is_alone_from_the_start_fills_whole_steps() -> None:
    assert not StepBudget(SchedulerConfig(), UNIT_S).is_calm


def run_beside(num_batch: int) -> list[int]:
    """Tokens of the batch lane in each step of two interactive requests that decode, in steps of a second."""
    simulator = Simulator(num_pages=400, max_running=16, step_tokens=64)
    for index in range(2):
        simulator.core.submit(request(f"chat{index}", max_tokens=60))
    for index in range(num_batch):
        flow = FlowKey(tenant="batch", lane=1)
        simulator.core.submit(request(f"line{index}", prompt=8, max_tokens=20, flow=flow))
    counts = []
    for _ in range(50):
        before = sum(len(simulator.outputs.get(f"line{index}", ())) for index in range(num_batch))
        simulator.pump()
        counts.append(sum(len(simulator.outputs.get(f"line{index}", ())) for index in range(num_batch)) - before)
        assert simulator.scheduler.num_running >= 2
    simulator.run()
    assert all(simulator.last(f"line{index}").finish_reason == "length" for index in range(num_batch))
    return counts


def test_a_batch_goes_on_beside_interactive_requests_and_ends() -> None:
    """A quarter of two decoding requests is less than the price of a token, and one token is always allowed."""
    counts = run_beside(num_batch=10)
    assert max(counts) <= 1, counts
    assert sum(counts) >= 20
