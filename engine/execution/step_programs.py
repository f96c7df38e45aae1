"""The programs of an engine: one for each bucket of decode steps, with and without adapters, and one per other step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from manylora.adapters.lora.step import DECODE_TILE_ROWS, count_tiles, tile_capacity, tile_rows
from manylora.engine.execution.packed_step import PackedStep
from manylora.engine.execution.sampler import RowMasks
from manylora.engine.execution.step_program import Capture, StepDevice, StepProgram, StepShape
from manylora.kernels.attention_batch import item_runs, most_partials, tile_runs

WORD_BITS = 32
"""Number of tokens in a word of a mask."""

logger = logging.getLogger(__name__)


def bucket_rows(num_rows: int) -> int:
    """Rows that a step is padded to: 1, 2, 4, then multiples of 8 up to 64, of 32 up to 256, and of 64."""
    if num_rows <= 4:
        return 1 << max(num_rows - 1, 0).bit_length()
    unit = 8 if num_rows <= 64 else 32 if num_rows <= 256 else 64
    return -(-num_rows // unit) * unit


@dataclass(eq=False)
class StepPrograms:
    """Chooses the program of each step."""

    device: StepDevice
    """State that the programs share."""
    max_running: int
    """Largest number of rows of a decode step."""
    capture: Capture | None
    """Records programs of decode steps; None launches each kernel in every step."""
    decode: dict[StepShape, StepProgram] = field(default_factory=dict, init=False)

    @property
    def num_recorded(self) -> int:
        """Number of recorded programs."""
        return sum(program.is_recorded for program in self.decode.values())

    def program(self, step: PackedStep) -> StepProgram:
        """Choose the program for a step."""
        if not step.is_decode:
            return StepProgram(self.device, self._prompt_shape(step))
        shape = self._decode_shape(bucket_rows(step.num_rows), has_lora=bool(step.adapters))
        if shape not in self.decode:
            self.decode[shape] = StepProgram(self.device, shape)
        return self.decode[shape]

    @torch.inference_mode()
    def prepare(self) -> None:
        """Compile all kernels, and record the programs of decode steps, the largest first."""
        nothing = PackedStep.nothing(self.device.arena.geometry.num_groups)
        for num_rows in (self.device.max_rows, 1):
            for has_lora in (True, False):
                shape = StepShape(
                    rows=num_rows,
                    items=num_rows,
                    samples=1,
                    partials=0,
                    tiles=1,
                    lora_tiles=int(has_lora),
                    lora_tile_rows=tile_rows(num_rows),
                )
                _run(StepProgram(self.device, shape), nothing)
        buckets = sorted(
            {bucket_rows(count) for count in range(1, self.max_running + 1)}, reverse=True
        )
        for rows in buckets:
            for has_lora in (True, False):
                shape = self._decode_shape(rows, has_lora=has_lora)
                program = self.decode[shape] = StepProgram(self.device, shape)
                _run(program, nothing)
                self._record(program)
        masks = RowMasks(
            [0], torch.full((1, -(-program.logits.shape[1] // WORD_BITS)), -1, dtype=torch.int32)
        )
        self.device.sampler.edit(program.logits, (), masks)

    def _record(self, program: StepProgram) -> None:
        if self.capture is None:
            return
        try:
            program.record(self.capture)
        except RuntimeError as error:  # torch cannot record a launch
            logger.warning(
                "decode steps are launched one kernel at a time, not as CUDA graphs: %s", error
            )
            self.capture = None

    def _decode_shape(self, rows: int, *, has_lora: bool) -> StepShape:
        num_slots = self.device.lora.tables.slots
        return StepShape(
            rows=rows,
            items=rows,
            samples=rows,
            partials=most_partials(np.full(rows, self.device.max_model_len)),
            is_decode=True,
            lora_tiles=tile_capacity(rows, num_slots, DECODE_TILE_ROWS) if has_lora else 0,
            lora_tile_rows=DECODE_TILE_ROWS,
        )

    def _prompt_shape(self, step: PackedStep) -> StepShape:
        rows = bucket_rows(step.num_rows)
        lora_tile_rows = tile_rows(rows)
        lens = np.pad(item_runs(step.runs)[2] + 1, (0, rows - step.num_rows))
        return StepShape(
            rows=rows,
            items=len(lens),
            samples=bucket_rows(len(step.samples)) if step.samples else 0,
            partials=most_partials(lens),
            tiles=tile_runs(step.runs, self.device.head_group).shape[1],
            lora_tiles=count_tiles(step.row_slots, lora_tile_rows) if step.adapters else 0,
            lora_tile_rows=lora_tile_rows,
        )


def _run(program: StepProgram, step: PackedStep) -> None:
    program.load(step)
    program.run()
    program.collect()


def cuda_graphs() -> Capture:
    """Make a `Capture` that records CUDA graphs. They share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()

    def capture(launch: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate and copy meanwhile; this capture does not record that.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            launch()
        return graph.replay

    return capture
