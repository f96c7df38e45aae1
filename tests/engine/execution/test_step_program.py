"""Step programs with interpreted kernels: recorded once, they compute any step that their shape has room for.

One test runs this file, those of the runner and that of a whole engine in a process that interprets Triton, where all
steps of a `StepDriver` are step programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from implementations import INTERPRETS
from manylora.engine.execution.packed_step import PackedStep, pack_step
from manylora.engine.execution.step_image import ALIGN_BYTES, ImageLayout, StepImages
from manylora.engine.execution.step_program import StepDevice, StepProgram
from manylora.engine.execution.step_programs import StepPrograms, bucket_rows
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.scheduling.plan import SampleSpec
from manylora.kernels.sampling import NON_FINITE
from step_driver import CPU, DrivenRequest, StepDriver
from tiny_models import ALL_LINEAR, make_adapter, make_model
from triton_processes import run_interpreted

interpreted = pytest.mark.skipif(not INTERPRETS, reason="runs in a process that interprets Triton")
RANKS = (8, 16, 3, 40)
MIXED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=11, max_tokens=1000)


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.skipif(INTERPRETS, reason="starts this file in the other kind of process")
def test_programs_are_right_in_the_interpreter() -> None:
    here = Path(__file__).parent
    run_interpreted(
        [Path(__file__), here / "test_runner.py", here.parent / "test_program_engine.py"]
    )


@pytest.mark.parametrize(
    ("num_rows", "bucket"),
    [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (64, 64), (65, 96), (256, 256), (257, 320)],
)
def test_rows_are_padded_to_few_numbers(num_rows: int, bucket: int) -> None:
    assert bucket_rows(num_rows) == bucket


def test_fields_of_an_image_start_at_multiples_of_64_bytes_on_host_and_device() -> None:
    layout = ImageLayout({"one": (1,), "none": (3, 0), "many": (2, 33)})
    images = StepImages(layout.num_bytes + 64, CPU)
    fields = images.begin(layout)
    fields["one"][:], fields["many"][:] = 7, np.arange(66).reshape(2, 33)
    tail = images.append(np.array([[1, 2], [3, 4]], dtype=np.int32))
    images.send()
    there = layout.on_device(images.device)
    assert there["one"].tolist() == [7]
    assert there["many"].flatten().tolist() == list(range(66))
    assert images.device[tail].view(torch.int32).tolist() == [1, 2, 3, 4]
    starts = [there[name].data_ptr() - images.device.data_ptr() for name in ("one", "many")]
    assert starts == [0, ALIGN_BYTES]
    assert tail.start % ALIGN_BYTES == 0


def test_an_image_that_is_full_says_so() -> None:
    images = StepImages(64, CPU)
    images.begin(ImageLayout({"field": (8,)}))
    with pytest.raises(ValueError, match="has room for 64"):
        images.append(np.zeros(17, dtype=np.int32))


def test_each_step_has_a_host_image_of_its_own() -> None:
    images, layout = StepImages(64, CPU), ImageLayout({"field": (4,)})
    hosts = []
    for number in range(3):
        images.begin(layout)["field"][:] = number
        images.send()
        hosts.append(images.host)
        assert layout.on_device(images.device)["field"].tolist() == [number] * 4
    assert [layout.on_device(host)["field"].tolist() for host in hosts] == [
        [number] * 4 for number in range(3)
    ]


def make_files(folder: Path, num_layers: int) -> tuple[Path, list[Path]]:
    """A model, and an adapter of each rank."""
    model = make_model(folder / "model", "qwen3", num_hidden_layers=num_layers)
    return model, [
        make_adapter(
            model,
            folder / str(rank),
            rank=rank,
            targets=ALL_LINEAR if rank != 3 else ("q_proj", "v_proj"),
        )
        for rank in RANKS
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Of one layer, where more of them show nothing else: the interpreter is slow."""
    return make_files(tmp_path_factory.mktemp("one layer"), 1)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class World:
    """A driver whose requests have something in the cache: what it is does not matter to these tests."""

    def __init__(self, model: Path, adapters: Sequence[Path]) -> None:
        self.driver = StepDriver(model, num_pages=400)
        self.leases = [self.driver.load_adapter(folder) for folder in adapters]
        self.device = self.driver.step_device()

    def requests(
        self, lengths: Sequence[int], slots: Sequence[int | None], params: SamplingParams = MIXED
    ) -> list[DrivenRequest]:
        """Requests whose next step is that of one token."""
        generator = torch.Generator().manual_seed(len(lengths))
        found = []
        for length, slot in zip(lengths, slots, strict=True):
            tokens = torch.randint(0, 256, (length,), generator=generator).tolist()
            request = self.driver.request(
                tokens, None if slot is None else self.leases[slot], params
            )
            self.driver.chunk(request, length - 1)
            pages = self.driver.arena.elements[request.new_pages]
            self.driver.arena.elements[request.new_pages] = torch.randn(
                pages.shape, generator=generator
            )
            request.new_pages = []
            found.append(request)
        return found

    def step(
        self, requests: Sequence[DrivenRequest]
    ) -> tuple[PackedStep, list[SampleSpec], list[int]]:
        """The next token of each, as programs load it."""
        plan = self.driver.plan([self.driver.chunk(request) for request in requests], [])
        zeroed = [page for request in requests for page in request.new_pages]
        for request in requests:
            request.num_computed -= 1  # so that it can be computed again
        step = pack_step(plan, self.driver.geometry, self.driver.arena.num_pages)
        specs = [spec for place in step.order if (spec := plan.chunks[place].sample) is not None]
        return step, specs, zeroed


def run(
    program: StepProgram, step: tuple[PackedStep, list[SampleSpec], list[int]]
) -> tuple[torch.Tensor, list[object]]:
    """Logits and tokens of a step."""
    packed, specs, zeroed = step
    program.load(packed, specs, zero_pages=zeroed)
    program.zero_pages()
    program.run()
    logits = program.logits[: packed.num_rows].clone()
    return logits, [token for token, _ in program.collect()]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, StepProgram]:
    """A program for 8 rows that has seen one step, of which the host has nothing any more."""
    from recorded_graph import capture

    world = World(*make_files(tmp_path_factory.mktemp("two layers"), 2))
    with torch.inference_mode():
        seen = world.step(world.requests((11, 12, 13, 14, 15), (1, 1, None, 1, 1)))
        program = StepPrograms(world.device, max_running=8, capture=None).program(seen[0])
        assert program.shape.rows == 8
        run(program, seen)
        program.load(seen[0], seen[1])
        program.record(capture)
        forget(seen[0], world.device)
    return world, program


@interpreted
@pytest.mark.parametrize(
    ("lengths", "slots"),
    [
        ((5,), (None,)),
        ((5, 9, 3, 31, 32, 33, 40, 7), (0, 1, 2, 3, None, 0, 1, 3)),
        ((255, 256, 257, 300), (3, 3, 0, 2)),
        ((64, 64, 64, 64, 64), (2, 2, 2, 2, 2)),
    ],
    ids=["one row", "more adapters", "across splits", "q and v alone"],
)
def test_a_recorded_program_computes_steps_that_it_did_not_see(
    recorded: tuple[World, StepProgram], lengths: tuple[int, ...], slots: tuple[int | None, ...]
) -> None:
    world, program = recorded
    step = world.step(world.requests(lengths, slots))
    before = world.driver.arena.bytes.clone()
    logits, tokens = run(program, step)
    pages = world.driver.arena.bytes.clone()
    world.driver.arena.bytes.copy_(before)
    expected_logits, expected_tokens = run(StepProgram(world.device, program.shape), step)
    assert torch.equal(logits, expected_logits)
    assert tokens == expected_tokens
    assert torch.equal(world.driver.arena.bytes, pages)
    assert None not in tokens


def forget(step: PackedStep, device: StepDevice) -> None:
    """Overwrite all that the host has of a step."""
    for name in step.__slots__:
        value = getattr(step, name)
        if isinstance(value, np.ndarray):
            value.fill(1 << 20)
    device.images.host.fill_(0x7F)


@interpreted
def test_a_row_that_overflows_is_told_and_the_others_are_not_touched(
    files: tuple[Path, list[Path]],
) -> None:
    from recorded_graph import capture

    world = World(*files)
    step = world.step(world.requests((11, 12, 13), (0, 1, None)))
    program = StepPrograms(world.device, max_running=8, capture=None).program(step[0])
    _, expected = run(program, step)
    program.load(step[0], step[1])
    program.record(capture)
    slot = world.leases[1].slot
    world.driver.tables.scalings[slot].fill_(float("inf"))
    _, tokens = run(program, step)
    wrong = step[0].slots.tolist().index(slot)
    assert tokens[wrong] == NON_FINITE
    assert [token for row, token in enumerate(tokens) if row != wrong] == [
        token for row, token in enumerate(expected) if row != wrong
    ]


@interpreted
def test_an_adapter_that_comes_back_to_other_pages_is_read_there(
    files: tuple[Path, list[Path]],
) -> None:
    from recorded_graph import capture

    world = World(*files)
    step = world.step(world.requests((11, 12, 13), (0, 1, 3)))
    program = StepPrograms(world.device, max_running=8, capture=None).program(step[0])
    logits, tokens = run(program, step)
    program.load(step[0], step[1])
    program.record(capture)
    world.driver.move_adapter(world.leases[1], files[1][1])
    again, same_tokens = run(program, step)
    assert torch.equal(again, logits)
    assert same_tokens == tokens


@interpreted
def test_nothing_moves_while_steps_come_and_go(files: tuple[Path, list[Path]]) -> None:
    world = World(*files)
    programs = StepPrograms(world.device, max_running=4, capture=None)
    steps = [
        world.step(world.requests(lengths, slots))
        for lengths, slots in (((5, 9), (0, None)), ((40,), (2,)))
    ]
    for step in steps:
        run(programs.program(step[0]), step)
    addresses = {shape: tensors_of(program) for shape, program in programs.decode.items()}
    for number in range(50):
        packed, specs, zeroed = steps[number % 2]
        programs.program(packed).load(packed, specs, zero_pages=zeroed)
    assert {shape: tensors_of(program) for shape, program in programs.decode.items()} == addresses


def tensors_of(program: StepProgram) -> list[int]:
    """Addresses of all that its kernels read and write."""
    rows, columns = program.rows, program.columns
    attention = [batch.rows(1, 0) for batch in rows.attention]
    tensors = [rows.tokens, rows.positions, *rows.slot_mapping, rows.sampled, columns]
    tensors += [
        part
        for each in attention
        for part in (each.block_table, each.item_lens, each.work[0], each.tiles)
    ]
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]
