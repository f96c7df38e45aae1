"""A checked checkpoint's tensors into page images: the form in which adapters lie in host memory and in the arena.

Images are position independent, the layout says where in them each row group starts. Knows no arena pages and checks
nothing that `checkpoint` has checked already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from weft.adapters.base_shape import BaseShape
from weft.adapters.checkpoint import Checkpoint, LoraTensor
from weft.adapters.layout import PART_A, PART_B, LoraLayout
from weft.memory.geometry import GROUP_ROWS, PITCH_BYTES, PageGeometry, row_pitch_bytes

_SOURCE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorBytes(Protocol):
    """The bytes of a safetensors file from its first tensor on."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill `buffer` with the bytes that follow."""


def pack(
    checkpoint: Checkpoint,
    weights: TensorBytes,
    layout: LoraLayout,
    base: BaseShape,
    geometry: PageGeometry,
    out_pages: torch.Tensor | Sequence[torch.Tensor],
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Write the page images of an adapter.

    The rank rows of A and B are cast to the pages' dtype and put at the places of `layout`; all else (rank
    padding, row padding, unused space) becomes zero, so that nothing of the pages' earlier content remains.

    Args:
        checkpoint: Which tensors stand where in the file.
        weights: Read tensor by tensor.
        layout: The plan for the checkpoint's ranks.
        base: Shape of the base model.
        geometry: Sizes of a page.
        out_pages: `layout.num_pages` of the page's elements in the arena's dtype; overwritten in full.
        pause: Called after each piece of about a millisecond.
    """
    for index in range(layout.num_pages):
        out_pages[index].zero_()
        pause()
    runs = _runs(layout, base, geometry)
    # One tensor after the other is read into the same room: new memory costs more than what is done with it.
    room = torch.empty(max(tensor.end - tensor.start for tensor in checkpoint.tensors), dtype=torch.uint8)
    for tensor in sorted(checkpoint.tensors, key=lambda tensor: tensor.start):
        raw = room[: tensor.end - tensor.start]
        weights.readinto(raw.numpy().data)
        part, rows = _rank_rows(tensor, raw, out_pages[0].dtype)
        module = base.modules[tensor.module]
        features = module.in_features if part == PART_A else module.out_features
        pitch = row_pitch_bytes(features, geometry.dtype_bytes) // geometry.dtype_bytes
        for run in runs[tensor.layer, tensor.module, part]:
            source = rows[run.first_row : run.first_row + run.num_rows]
            start = run.offset_units * (PITCH_BYTES // geometry.dtype_bytes)
            out_pages[run.page][start:].as_strided((len(source), features), (pitch, 1)).copy_(source)
        pause()


class _Run(NamedTuple):
    """Rank rows of one (layer, module, part) whose groups lie one behind the other in a page."""

    first_row: int
    num_rows: int
    page: int
    offset_units: int


@lru_cache(maxsize=32)
def _runs(layout: LoraLayout, base: BaseShape, geometry: PageGeometry) -> Mapping[tuple[int, int, int], Sequence[_Run]]:
    """All groups of a layout, joined to as few runs as there are.

    Loader threads share the interpreter's lock with the engine's step, so they do few large operations.
    """
    runs: dict[tuple[int, int, int], list[_Run]] = defaultdict(list)
    for layer, module, part, group, page, units in layout.groups:
        features = base.modules[module].in_features if part == PART_A else base.modules[module].out_features
        group_units = GROUP_ROWS * row_pitch_bytes(features, geometry.dtype_bytes) // PITCH_BYTES
        own = runs[layer, module, part]
        last = own[-1] if own else None
        if last and last.page == page and last.offset_units + last.num_rows // GROUP_ROWS * group_units == units:
            own[-1] = last._replace(num_rows=last.num_rows + GROUP_ROWS)
        else:
            own.append(_Run(group * GROUP_ROWS, GROUP_ROWS, page, units))
    return runs


def _rank_rows(tensor: LoraTensor, raw: torch.Tensor, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    """The part a tensor belongs to, and its values as [rank, features] in `dtype`; `raw` are its bytes."""
    stored = raw.view(_SOURCE_DTYPES[tensor.dtype]).view(tuple(tensor.shape))
    values = stored.to(dtype)
    return PART_A if tensor.part == "a" else PART_B, values.t() if tensor.rank_axis else values
