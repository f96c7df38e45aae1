"""One kind of step on buffers whose addresses never change, so that it can be recorded once and replayed.

`load` puts a step into the image, `run` takes no arguments and launches its computation, `collect` reads the chosen
tokens. The host does not wait for the device in between. A decode step is padded to the next of a few numbers of rows,
its bucket, with CUDA graphs and without: a row's numbers depend on the bucket, and on nothing else of the batch. A step
with rows of prompts has a program with its own sizes, which is never recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from manylora.adapters.lora.step import SIDE_ROWS, PagedLora, fill_tiles
from manylora.engine.execution.packed_step import Int32Array, PackedStep
from manylora.engine.execution.sampler import RowMasks, Sampled, Sampler
from manylora.engine.execution.step_image import ImageLayout, StepImages
from manylora.engine.model.decoder import Decoder, KvViews, StepRows
from manylora.engine.scheduling.plan import SampleSpec
from manylora.errors import EngineError
from manylora.kernels.attention_batch import (
    AttentionBatch,
    AttentionRows,
    item_runs,
    split_starts,
    tile_runs,
)
from manylora.kernels.sampling import NUM_COLUMNS
from manylora.memory.arena import Arena, mark

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Function that calls another once, records its launches, and returns a function that repeats them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a program. Its steps have at most this many rows."""

    rows: int
    items: int
    """Rows that attend on their own, with padding."""
    samples: int
    """Rows of logits."""
    partials: int
    """Splits of all items, as `most_partials` counts them."""
    is_decode: bool = False
    """True if all rows have logits, in the same order."""
    tiles: int = 0
    """Tiles of prompts."""
    lora_tiles: int = 0
    """Tiles of adapters; 0 if no row has an adapter."""
    lora_tile_rows: int = 16

    def layout(self, num_groups: int, windows: Sequence[int]) -> ImageLayout:
        """Layout of the image of a step with these sizes."""
        return ImageLayout(
            {
                "tokens": (self.rows,),
                "positions": (self.rows,),
                "kv_slots": (num_groups, self.rows),
                "item_rows": (self.items,),
                "item_tables": (num_groups, self.items),
                "item_lens": (self.items,),
                "work": (len(windows), self.items + 1),
                "tiles": (num_groups, 4, self.tiles),
                "lora_tiles": (3, self.lora_tiles),
                "sample_rows": (self.samples,),
                "sampling": (NUM_COLUMNS, self.samples),
            }
        )


@dataclass(kw_only=True)
class StepDevice:
    """The state that all programs of an engine share."""

    decoder: Decoder
    arena: Arena
    lora: PagedLora
    sampler: Sampler
    max_samples: int
    """Largest number of rows of logits in a step, padding included."""
    max_rows: int
    """Largest number of rows of a step, padding included."""
    max_model_len: int
    kv: KvViews = field(init=False)
    images: StepImages = field(init=False)
    logits: torch.Tensor = field(init=False)
    """[max_samples, vocab_size], float32: scores of the running step. Without it each CUDA graph would keep its own."""
    sampled: torch.Tensor = field(init=False)
    """[max_samples], int32, on the device: tokens of the last step. The next step may read them here."""
    windows: list[int] = field(init=False)
    """Sliding windows of the layers, each once; 0 is none."""
    head_group: int = field(init=False)
    """Query heads that share a KV head."""

    def __post_init__(self) -> None:
        geometry = self.arena.geometry
        device = self.arena.device
        spec = self.decoder.spec
        self.windows = sorted({window or 0 for window in spec.sliding_windows})
        self.kv = KvViews.of(self.arena, spec.sliding_windows)
        self.head_group = spec.num_heads // spec.num_kv_heads
        largest = StepShape(
            rows=self.max_rows,
            items=self.max_rows,
            samples=self.max_samples,
            partials=0,
            tiles=self.max_rows,
            lora_tiles=2 * self.max_rows,
        ).layout(geometry.num_groups, self.windows)
        num_pages = geometry.pages(self.max_model_len) * self.max_samples + self.arena.num_pages
        self.images = StepImages(largest.num_bytes + 4 * num_pages + 128, device)
        self.logits = torch.empty((self.max_samples, spec.vocab_size), device=device)
        self.sampled = torch.zeros(self.max_samples, dtype=torch.int32, device=device)

    def read(self, numbers: torch.Tensor) -> torch.Tensor:
        """Copy int32 numbers to the host. The copy is complete once the device has done everything launched so far."""
        is_gpu = self.arena.device.type == "cuda"
        target = torch.empty(numbers.shape, dtype=torch.int32, pin_memory=is_gpu)
        return target.copy_(numbers, non_blocking=is_gpu)


@dataclass(slots=True, kw_only=True)
class _Launched:
    """A step that was run and not collected yet. Its tensors are on the host."""

    specs: Sequence[SampleSpec]
    codes: torch.Tensor
    logprob_words: torch.Tensor | None
    done: torch.cuda.Event | None


class StepProgram:
    """Steps of one shape.

    Args:
        device: State that it shares with the other programs.
        shape: Its sizes.
    """

    def __init__(self, device: StepDevice, shape: StepShape) -> None:
        self.shape = shape
        self._device = device
        geometry = device.arena.geometry
        images = device.images
        self._layout = shape.layout(geometry.num_groups, device.windows)
        fields = self._layout.on_device(images.device)
        self._attention = [
            AttentionRows(
                block_table=images.device[self._layout.num_bytes :].view(torch.int32),
                item_rows=fields["item_rows"],
                item_tables=fields["item_tables"][group],
                item_lens=fields["item_lens"],
                work=dict(zip(device.windows, fields["work"], strict=True)),
                tiles=fields["tiles"][group],
                page_tokens=geometry.page_tokens,
                num_partials=shape.partials,
            )
            for group in range(geometry.num_groups)
        ]
        self.rows = StepRows(
            tokens=fields["tokens"],
            positions=fields["positions"],
            slot_mapping=tuple(fields["kv_slots"]),
            attention=tuple(AttentionBatch.of_rows(rows, shape.rows) for rows in self._attention),
            sampled=device.sampled,
        )
        self._lora = None
        if shape.lora_tiles:
            tiles = fields["lora_tiles"]
            is_small = shape.rows <= SIDE_ROWS
            self._lora = device.lora.static_step(tiles, shape.lora_tile_rows, is_small=is_small)
        self._sample_rows = fields["sample_rows"]
        self.columns = fields["sampling"]
        self._replays: tuple[Callable[[], None], Callable[[], None]] | None = None
        self._specs: Sequence[SampleSpec] = ()
        self._masks: Callable[[], RowMasks] | None = None
        self._reported = device.sampled[:0]
        """Places of the samples whose log-probabilities are asked for, int32, on the device."""
        self._zeroed = device.sampled[:0]
        """Pages to be zeroed, int32, on the device."""
        self._launched: deque[_Launched] = deque()
        self.hidden = device.sampled[:0]
        """Rows of the last run after the last norm."""
        self.logits = device.logits[: shape.samples]
        """Scores of the last run, until another program runs."""

    @property
    def is_recorded(self) -> bool:
        """True if `run` replays a record."""
        return self._replays is not None

    def load(
        self,
        step: PackedStep,
        specs: Sequence[SampleSpec] = (),
        masks: Callable[[], RowMasks] | None = None,
        zero_pages: Sequence[int] = (),
    ) -> None:
        """Put a step into the image and copy the image to the device, after the steps before it.

        Args:
            step: The rows, at most as many as the shape has.
            specs: Sampling parameters of `step.samples`.
            masks: Function that waits for the masks of grammars; None if no row has a grammar.
            zero_pages: Pages that `zero_pages` zeroes before the step.

        Raises:
            EngineError: A row sees more tokens than the model takes, for which there is no room in the kernels.
        """
        if step.num_rows and step.positions.max() >= self._device.max_model_len:
            raise EngineError(f"a row sees more than {self._device.max_model_len} tokens")
        images = self._device.images
        sampler = self._device.sampler
        fields = images.begin(self._layout)
        self._fill(fields, step)
        _put(fields["sampling"], sampler.columns(specs), 0)
        images.append(step.tables)
        reported = images.append(sampler.reported_rows(specs).astype(np.int32))
        zeroed = images.append(np.array(zero_pages, dtype=np.int32))
        images.send()
        self._specs = specs
        self._masks = masks
        self._reported = images.device[reported].view(torch.int32)
        self._zeroed = images.device[zeroed].view(torch.int32)

    def zero_pages(self) -> None:
        """Zero the pages that `load` got."""
        if len(self._zeroed):
            self._device.arena.zero_listed(self._zeroed)

    def run(self) -> None:
        """Compute the loaded step, and start to copy the chosen tokens to the host."""
        device = self._device
        forward, sample = self._replays or (self._forward, self._sample)
        forward()
        masks = self._masks() if self._masks is not None else None
        words = device.sampler.choose(
            self.logits, self._specs, masks, self._reported, sample, device.sampled
        )
        self._launched.append(
            _Launched(
                specs=self._specs,
                codes=device.read(device.sampled[: len(self._specs)]),
                logprob_words=None if words is None else device.read(words),
                done=mark(device.arena.device) if device.arena.device.type == "cuda" else None,
            )
        )

    def collect(self) -> list[Sampled]:
        """Wait for the oldest run that was not collected; returns the results of its samples."""
        launched = self._launched.popleft()
        if launched.done is not None:
            launched.done.synchronize()
        return self._device.sampler.results(
            launched.codes.tolist(), launched.specs, launched.logprob_words
        )

    def record(self, capture: Capture) -> None:
        """Record the launches of `run`, which replays them from now on. The image must have a step."""
        self._replays = capture(self._forward), capture(self._sample)

    def _fill(self, fields: dict[str, Int32Array], step: PackedStep) -> None:
        items = item_runs(step.runs)
        num_items = items.shape[1]
        fields["item_rows"][:num_items] = items[0]
        fields["item_rows"][num_items:] = np.arange(step.num_rows, self.shape.rows)  # padding
        _put(fields["item_lens"], items[2] + 1, 0)
        _put(fields["tokens"], step.tokens, 0)
        _put(fields["positions"], step.positions, 0)
        _put(fields["kv_slots"], step.kv_slots, -1)
        _put(fields["tiles"], tile_runs(step.runs, self._device.head_group), 0)
        for group, begin in enumerate(range(0, step.tables.size, step.tables.shape[1])):
            _put(fields["item_tables"][group], items[3] + begin, 0)
            fields["tiles"][group, 3] += begin
        for place, window in enumerate(self._device.windows):
            fields["work"][place] = split_starts(fields["item_lens"], window)
        if self.shape.lora_tiles:
            fill_tiles(fields["lora_tiles"], step.row_slots, self.shape.lora_tile_rows)
        _put(fields["sample_rows"], step.last_rows(), 0)

    def _forward(self) -> None:
        self.hidden = self._device.decoder.forward(self.rows, self._device.kv, self._lora)
        if self.shape.samples:
            is_all = self.shape.is_decode
            rows = self.hidden if is_all else self.hidden.index_select(0, self._sample_rows)
            self._device.decoder.logits(rows, self.logits)

    def _sample(self) -> None:
        if self.shape.samples:
            self._device.sampler.kernels.sample(
                self.logits, self.columns, self._device.sampled[: self.shape.samples]
            )


def _put(field: Int32Array, numbers: Int32Array, rest: int) -> None:
    """Write numbers to the front of a field, along its last axis, and `rest` after them."""
    count = numbers.shape[-1]
    field[..., :count] = numbers
    field[..., count:] = rest
