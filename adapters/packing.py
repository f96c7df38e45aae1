"""A checked checkpoint's tensors into page images: the form in which adapters lie in host memory and in the arena.

Images are position independent, the layout says where in them each row group starts. Knows no arena pages and checks
nothing that `checkpoint` has checked already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from weft.adapters.base_shape import BaseShape
from weft.adapters.checkpoint import Checkpoint, LoraTensor
from weft.adapters.layout import PART_A, PART_B, LoraLayout, RowGroup
from weft.memory.geometry import GROUP_ROWS, PITCH_BYTES, PageGeometry, row_pitch_bytes

_SOURCE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def pack(
    checkpoint: Checkpoint,
    weights: bytes | memoryview,
    layout: LoraLayout,
    base: BaseShape,
    geometry: PageGeometry,
    dtype: torch.dtype,
    out_pages: torch.Tensor | Sequence[torch.Tensor],
) -> None:
    """Write the page images of an adapter.

    Rows of A, and rows of B transposed, are cast to `dtype` and put at the places of `layout`; all else (rank padding,
    row padding, unused space) becomes zero, so that nothing of the pages' earlier content remains.

    Args:
        checkpoint: Which tensors stand where in `weights`.
        weights: The whole safetensors file.
        layout: The plan for the checkpoint's ranks.
        base: Shape of the base model.
        geometry: Sizes of a page.
        dtype: Element type of the arena.
        out_pages: uint8 [page_bytes] each, `layout.num_pages` of them; overwritten in full.
    """
    pages = [out_pages[index].zero_().view(dtype) for index in range(layout.num_pages)]
    places: dict[tuple[int, int, int], list[RowGroup]] = defaultdict(list)
    for group in layout.groups:
        places[group.layer, group.module, group.part].append(group)
    for tensor in checkpoint.tensors:
        part, rows = _rank_rows(tensor, weights, dtype)
        module = base.modules[tensor.module]
        features = module.in_features if part == PART_A else module.out_features
        pitch = row_pitch_bytes(features, geometry.dtype_bytes) // geometry.dtype_bytes
        for group in places[tensor.layer, tensor.module, part]:
            source = rows[group.group * GROUP_ROWS : (group.group + 1) * GROUP_ROWS]
            start = group.offset_units * (PITCH_BYTES // geometry.dtype_bytes)
            block = pages[group.page][start : start + GROUP_ROWS * pitch].view(GROUP_ROWS, pitch)
            block[: len(source), :features] = source


def _rank_rows(tensor: LoraTensor, weights: bytes | memoryview, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    """The part a tensor belongs to, and its values as [rank, features] in `dtype`."""
    # A copy of the bytes, because tensors in a file are neither aligned nor writable.
    raw = torch.from_numpy(np.frombuffer(weights, np.uint8, tensor.end - tensor.start, tensor.start).copy())
    stored = raw.view(_SOURCE_DTYPES[tensor.dtype]).view(tuple(tensor.shape))
    values = stored.to(dtype)
    return (PART_A, values) if tensor.part == "a" else (PART_B, values.t())
