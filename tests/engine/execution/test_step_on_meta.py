"""A step of an 8B model as a GPU gets it: how much is launched and copied, and for how many variants of a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fake_triton import fake_triton
from implementations import INTERPRETS
from manylora.engine.execution.packed_step import pack_step
from manylora.engine.execution.step_program import StepDevice, StepProgram
from manylora.engine.execution.step_programs import StepPrograms
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.scheduling.plan import SampleSpec, StepPlan
from manylora.errors import EngineError
from meta_step import LLAMA, NUM_PAGES, Watch, a_plan, step_device

pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
pytestmark = [
    pytest.mark.no_cover,
    pytest.mark.skipif(INTERPRETS, reason="binds kernels that are to be compiled"),
]

TOP_P = SamplingParams(temperature=0.7, top_p=0.9)
GREEDY = SamplingParams(temperature=0.0)
LAUNCHES = {0: 310, 32: 440}
"""The most kernels of a decode step of 32 rows, by its adapters."""
PER_LAYER = {0: {"heads": 1, "item": 1, "silu_and_mul": 1, "rms_norm": 2}}
PER_LAYER[32] = {"heads": 1, "item": 1, "silu_and_mul": 1, "expand_add_norm": 2, "shrink": 4}
"""Kernels of a layer beside its four matrix products."""


@pytest.fixture(scope="module", params=[False, True], ids=["llama", "head norms"])
def device(request: pytest.FixtureRequest) -> StepDevice:
    return step_device(has_head_norms=request.param)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode(), Watch():  # there is nothing that could be read
        yield


def load(program_of: StepPrograms, plan: StepPlan) -> StepProgram:
    step = pack_step(plan, LLAMA.geometry(), NUM_PAGES)
    program = program_of.program(step)
    program.load(step, specs_of(plan, step.order), zero_pages=plan.zero_pages)
    return program


def specs_of(plan: StepPlan, order: list[int]) -> list[SampleSpec]:
    return [spec for place in order if (spec := plan.chunks[place].sample) is not None]


@pytest.mark.parametrize("num_adapters", [0, 32])
@pytest.mark.parametrize("params", [GREEDY, TOP_P], ids=["greedy", "top-p"])
def test_a_decode_step_asks_nothing_and_is_one_copy_and_one_read(
    device: StepDevice, num_adapters: int, params: SamplingParams
) -> None:
    programs = StepPrograms(device, max_running=64, capture=None)
    plan = a_plan([1024] * 32, num_adapters, params)
    with fake_triton() as triton:
        load(programs, plan).run()  # makes what stays
        triton.launches.clear()
        with Watch() as loading:
            program = load(programs, plan)
        assert (loading.copies, loading.reads, loading.allocations) == (1, 0, 0)
        assert not loading.operations
        assert not triton.launches
        with Watch() as running:
            program.run()
    assert running.copies == 0
    assert running.reads == 1  # which `collect` waits for
    num_launches = len(triton.launches) + running.operations.total()
    assert num_launches <= LAUNCHES[num_adapters], (triton.counts, running.operations)
    per_layer = {
        f"{name}_kernel": count * LLAMA.num_layers
        for name, count in PER_LAYER[num_adapters].items()
    }
    per_layer["rms_norm_kernel"] = per_layer.get("rms_norm_kernel", 0) + 1  # before the first layer
    assert {name: triton.counts[name] for name in per_layer} == per_layer
    assert running.operations["linear"] == 4 * LLAMA.num_layers + 1


def test_one_replay_is_all_that_a_recorded_step_launches(device: StepDevice) -> None:
    replays = []

    def capture(launch: object) -> object:
        launch()  # type: ignore[operator]
        return lambda: replays.append(1)

    programs = StepPrograms(device, max_running=32, capture=capture)  # type: ignore[arg-type]
    with fake_triton() as triton:
        programs.prepare()
        triton.launches.clear()
        program = load(programs, a_plan([1024] * 32, 8, TOP_P))
        with Watch() as running:
            program.run()
    assert len(replays) == 2  # to the logits, and from there
    assert not triton.launches
    assert not running.operations
    assert (running.copies, running.reads) == (0, 1)


def test_the_start_takes_no_more_memory_than_is_reserved(device: StepDevice) -> None:
    """What graphs keep, and the largest tensor of the largest step: the device has little more than its pages."""
    largest = 0
    empty = torch.empty

    def measured(*shape: Any, **options: Any) -> torch.Tensor:
        nonlocal largest
        made = empty(*shape, **options)
        largest = max(largest, made.nbytes)
        return made

    programs = StepPrograms(device, max_running=64, capture=None)
    with fake_triton(), patch.object(torch, "empty", measured):
        programs.prepare()
    partials = 64 * 64 * 32 * (128 + 4) * 4  # of the 64 splits of 64 requests
    assert partials <= largest <= device.max_rows * 2 * LLAMA.intermediate * 2, (
        "gate and up of the largest step"
    )
    assert {program.logits.untyped_storage()._cdata for program in programs.decode.values()} == {
        device.logits.untyped_storage()._cdata
    }


def test_no_kernel_is_compiled_after_the_start(device: StepDevice) -> None:
    programs = StepPrograms(device, max_running=64, capture=None)
    with fake_triton() as triton:
        programs.prepare()
        before = triton.variants.copy()
        for num_rows in range(1, 65):
            context = (40, 300, 1500, 8000, 131_072)[num_rows % 5]
            contexts = [max(1, context - row % 30) for row in range(num_rows)]
            load(programs, a_plan(contexts, num_rows % 3 * 5, TOP_P, seed=num_rows)).run()
        for rows in (9, 65, 100, 129, 511, 512, 1024, 2048):
            load(programs, a_plan([rows + 300], rows % 2, TOP_P, rows=rows)).run()
    assert triton.variants == before
    # Tiles of decode and of prompts at the four sites; with and without adapters elsewhere.
    assert max(before.values()) == before["shrink_kernel"] == 8
    assert before["item_kernel"] == before["chunk_kernel"] == 1


def test_a_row_that_sees_more_than_the_model_takes_is_refused(device: StepDevice) -> None:
    programs = StepPrograms(device, max_running=64, capture=None)
    with fake_triton(), pytest.raises(EngineError, match="sees more than 131072 tokens"):
        load(programs, a_plan([131_073], 0, GREEDY))
