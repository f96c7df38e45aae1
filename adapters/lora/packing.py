"""Packing of a checked checkpoint's tensors into page images, the form of adapters in host memory and in the arena.

Images do not depend on their place in memory; the layout says where each row group starts in them. Knows no arena pages
and does not repeat the checks of `checkpoint`.

Loader threads share the interpreter's lock with the engine's steps. So everything that follows from the header is
computed once for all files with the same header. A load then needs a few large reads and one copy per matrix and page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from manylora.adapters.base_shape import BaseShape
from manylora.adapters.checkpoint.reader import Checkpoint, LoraTensor
from manylora.adapters.lora.layout import PART_A, PART_B, LoraLayout, RowRun
from manylora.lora_rows import GROUP_ROWS, PITCH_BYTES, row_pitch_bytes
from manylora.memory.geometry import PageGeometry

READ_BYTES = 1 << 18
"""Small tensors are read together up to this many bytes; that takes some tenths of a millisecond."""
_SOURCE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BITS: Mapping[int, npt.DTypeLike] = {2: np.uint16, 4: np.uint32}
"""Integer dtype by bytes of an element: numpy has no bfloat16, and copies need no arithmetic."""


class TensorBytes(Protocol):
    """The bytes of a safetensors file from its first tensor on."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill `buffer` with the bytes that follow."""


class Packing:
    """Plan of the copies from the tensors of a file to page images, for every file with the same header. Thread-safe.

    Args:
        checkpoint: Tensors of the file and their places.
        layout: The plan for the checkpoint's ranks.
        base: Shape of the base model.
        geometry: Sizes of a page.
    """

    def __init__(
        self, checkpoint: Checkpoint, layout: LoraLayout, base: BaseShape, geometry: PageGeometry
    ) -> None:
        self.checkpoint = checkpoint
        self.layout = layout
        self._item_bytes = geometry.dtype_bytes
        runs: dict[tuple[int, int, int], list[RowRun]] = defaultdict(list)
        for run in layout.runs:
            runs[run.layer, run.module, run.part].append(run)
        tensors = sorted(checkpoint.tensors, key=lambda tensor: tensor.entry.start)
        self._reads = [self._read(group, runs, base) for group in _together(tensors)]

    def pack(
        self,
        weights: TensorBytes,
        pages: Sequence[torch.Tensor],
        dtype: torch.dtype,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the page images of one adapter.

        The rank rows of A and B are cast to `dtype` and put at the places of the layout. All else (rank padding, row
        padding, unused space) becomes zero, so nothing of the pages' earlier content remains.

        Args:
            weights: File, which is read from the first tensor to the last.
            pages: uint8 [page_bytes] each, as many as the layout has; overwritten in full.
            dtype: Element type of the arena.
            pause: Called after each piece of about a millisecond.
        """
        memory = [page.numpy() for page in pages]
        for page in memory:
            page.fill(0)
            pause()
        # All reads use the same buffer: new memory costs more than the reading.
        room = torch.empty(max(read.num_bytes for read in self._reads), dtype=torch.uint8)
        bits = np.dtype(_BITS[self._item_bytes])
        for read in self._reads:
            raw = room[: read.num_bytes]
            weights.readinto(raw.numpy().data)
            values = raw.view(read.dtype).to(dtype).view(torch.uint8).numpy()
            for move in read.moves:
                target = np.ndarray(
                    move.shape, bits, memory[move.page], move.start, (move.pitch, self._item_bytes)
                )
                target[...] = np.ndarray(
                    move.shape, bits, values, move.source_start, move.source_strides
                )
            pause()

    def _read(
        self,
        tensors: Sequence[LoraTensor],
        runs: Mapping[tuple[int, int, int], Sequence[RowRun]],
        base: BaseShape,
    ) -> _Read:
        start = tensors[0].entry.start
        dtype = _SOURCE_DTYPES[tensors[0].entry.dtype]
        moves: list[_Move] = []
        for entry, name in tensors:
            part = PART_A if name.place.part == "a" else PART_B
            module = base.modules[name.place.module]
            features = module.in_features if part == PART_A else module.out_features
            rank = entry.shape[name.rank_axis]
            first = (entry.start - start) // dtype.itemsize * self._item_bytes
            strides = (entry.shape[1] * self._item_bytes, self._item_bytes)
            rank_stride, feature_stride = strides[:: -1 if name.rank_axis else 1]
            moves += [
                _Move(
                    page=run.page,
                    start=run.offset_units * PITCH_BYTES,
                    pitch=row_pitch_bytes(features, self._item_bytes),
                    shape=(
                        min(run.num_groups * GROUP_ROWS, rank - run.first_group * GROUP_ROWS),
                        features,
                    ),
                    source_start=first + run.first_group * GROUP_ROWS * rank_stride,
                    source_strides=(rank_stride, feature_stride),
                )
                for run in runs[name.place.layer, name.place.module, part]
            ]
        return _Read(tensors[-1].entry.end - start, dtype, tuple(moves))


class _Move(NamedTuple):
    """Copy of some rank rows of one matrix into one page. Sizes are in bytes of the page's element type."""

    page: int
    start: int
    pitch: int
    """Bytes from one row to the next in the page."""
    shape: tuple[int, int]
    """Rank rows and features."""
    source_start: int
    """Start in the buffer that was read, after the cast."""
    source_strides: tuple[int, int]


class _Read(NamedTuple):
    """Neighbouring tensors of one dtype in the file, which are read together."""

    num_bytes: int
    dtype: torch.dtype
    """Dtype in the file."""
    moves: tuple[_Move, ...]


def _together(tensors: Sequence[LoraTensor]) -> Iterator[Sequence[LoraTensor]]:
    """Group tensors in the file's order: one dtype and at most `READ_BYTES` per group, or one larger tensor alone."""
    for _, same in groupby(tensors, lambda tensor: tensor.entry.dtype):
        group: list[LoraTensor] = []
        for tensor in same:
            if group and tensor.entry.end - group[0].entry.start > READ_BYTES:
                yield group
                group = []
            group.append(tensor)
        yield group
