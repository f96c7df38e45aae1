"""Thousands of adapters that are good but for a few changes: each is refused in our own words, or can be served."""

from __future__ import annotations

import io
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from bad_upload import Upload
from counted_calls import MOST_CALLS, counted_calls
from lora_files import base_shape
from manylora.adapters.checkpoint.reader import Checkpoint, read_checkpoint
from manylora.adapters.lora.layout import plan_layout
from manylora.adapters.lora.packing import Packing
from manylora.errors import (
    AdapterError,
    AdapterFormatError,
    AdapterIncompatibleError,
    PayloadTooLargeError,
)
from manylora.memory.geometry import page_geometry
from mutated_adapters import mutant
from refusals import is_presentable, outcome

BASE = base_shape()
GEOMETRY = page_geometry(
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    dtype_bytes=2,
    largest_row_features=BASE.largest_row_features,
)
MAX_RANK = 64
MUTANTS = 2_400
BATCHES = 2


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_is_changed_is_refused_or_can_be_served(tmp_path: Path, batch: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(batch, MUTANTS, BATCHES):
        upload = mutant(BASE, seed)
        with counted_calls() as calls:
            ends[end_of(tmp_path / "weights", upload)] += 1
        assert calls() < MOST_CALLS, seed
    assert ends.total() == MUTANTS // BATCHES
    assert (
        ends["served"] > 0.05 * ends.total()
    )  # else the changes are too coarse to reach what lies behind
    assert len(ends) > 25, ends


def end_of(path: Path, upload: Upload) -> str:
    """`served`, or the code of the refusal; anything else is raised."""
    path.write_bytes(upload.weights)
    try:
        found = outcome(lambda: read_checkpoint(upload.config, path, BASE, MAX_RANK))
    except PayloadTooLargeError as error:
        return error.code
    if isinstance(found, AdapterError):
        assert type(found) in (AdapterFormatError, AdapterIncompatibleError)
        assert is_presentable(found, "config.") or is_presentable(found, "weights.")
        return found.code
    assert_servable(found, upload.weights)
    return "served"


def assert_servable(checkpoint: Checkpoint, weights: bytes) -> None:
    """It packs into pages, of the narrowest number format even, and all its numbers are finite."""
    layout = plan_layout(checkpoint.ranks, BASE, GEOMETRY)
    images = torch.full((layout.num_pages, GEOMETRY.page_bytes), 0xFF, dtype=torch.uint8)
    data = io.BytesIO(weights)
    data.seek(min(tensor.entry.start for tensor in checkpoint.tensors))
    Packing(checkpoint, layout, BASE, GEOMETRY).pack(data, list(images), torch.float16)
    assert bool(images.view(torch.float16).isfinite().all())
    assert all(
        0 < abs(scaling) <= MAX_RANK and math.isfinite(scaling)
        for scaling in checkpoint.scalings.values()
    )
    assert 1 <= checkpoint.largest_rank <= MAX_RANK
    assert checkpoint.parameters == sum(
        math.prod(tensor.entry.shape) for tensor in checkpoint.tensors
    )
