from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from adapters_factory import RandomLora, random_lora, tensor_bytes, tiny_base
from manylora.adapters.checkpoint.reader import Checkpoint, check_weights, read_checkpoint
from manylora.adapters.checkpoint.safetensors_header import header_bytes
from manylora.adapters.lora.layout import LoraLayout, plan_layout
from manylora.adapters.lora.packing import READ_BYTES, Packing
from manylora.lora_rows import GROUP_ROWS, PITCH_BYTES, row_pitch_bytes
from residency_parts import tiny_geometry

BASE = tiny_base()


def packing_of(
    lora: RandomLora,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype = torch.float32,
) -> tuple[Packing, Checkpoint, LoraLayout, torch.Tensor, bytes]:
    """What packs a saved adapter, page images that are NaN (uint8 [pages, page_bytes]), and the adapter's file."""
    content = (lora.save(folder, stored) / "adapter_model.safetensors").read_bytes()
    config = (folder / "adapter_config.json").read_bytes()
    checkpoint = read_checkpoint(config, folder / "adapter_model.safetensors", BASE, 256)
    geometry = tiny_geometry(BASE, dtype)
    layout = plan_layout(checkpoint.ranks, BASE, geometry)
    images = torch.full((layout.num_pages, geometry.page_bytes), 0xFF, dtype=torch.uint8)
    return Packing(checkpoint, layout, BASE, geometry), checkpoint, layout, images, content


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [1, 8, 20])
def test_every_row_lies_where_the_layout_says_and_all_else_is_zero(
    tmp_path: Path, rank: int, stored: torch.dtype, dtype: torch.dtype
) -> None:
    lora = random_lora(BASE, rank, seed=rank, rank_pattern={"v_proj": 3})
    packing, checkpoint, layout, image_bytes, content = packing_of(lora, tmp_path, dtype, stored)
    packing.pack(tensor_bytes(content, checkpoint), list(image_bytes), dtype)
    images = image_bytes.view(dtype)
    for layer, module, part, group, page, offset in layout.groups.T.tolist():
        key = (layer, module)
        matrix = lora.lora_a[key] if part == 0 else lora.lora_b[key].t()
        rows = matrix.to(stored).to(dtype)[GROUP_ROWS * group : GROUP_ROWS * (group + 1)]
        pitch = row_pitch_bytes(rows.shape[1], dtype.itemsize) // dtype.itemsize
        start = offset * PITCH_BYTES // dtype.itemsize
        block = images[page, start : start + GROUP_ROWS * pitch].view(GROUP_ROWS, pitch)
        assert torch.equal(block[: len(rows), : rows.shape[1]], rows)
        block[: len(rows), : rows.shape[1]] = 0
    assert not image_bytes.any()


def test_packing_pauses_after_each_page_and_each_read(tmp_path: Path) -> None:
    packing, checkpoint, layout, images, content = packing_of(
        random_lora(BASE, 8, seed=0), tmp_path
    )
    pauses: list[None] = []
    packing.pack(
        tensor_bytes(content, checkpoint), list(images), torch.float32, lambda: pauses.append(None)
    )
    num_bytes = sum(tensor.entry.end - tensor.entry.start for tensor in checkpoint.tensors)
    assert len(pauses) > layout.num_pages
    assert len(pauses) - layout.num_pages >= num_bytes / READ_BYTES


def test_one_packing_serves_all_files_with_the_same_header(tmp_path: Path) -> None:
    first, second = (
        packing_of(random_lora(BASE, 8, seed=seed), tmp_path / str(seed)) for seed in (0, 1)
    )
    for own, checkpoint, _, alone, content in (first, second):
        own.pack(tensor_bytes(content, checkpoint), list(alone), torch.float32)
        images = torch.empty_like(alone)
        first[0].pack(tensor_bytes(content, checkpoint), list(images), torch.float32)
        assert torch.equal(images, alone)
    assert not torch.equal(first[3], second[3])


def test_weights_are_checked_by_their_header_as_by_the_whole_file(tmp_path: Path) -> None:
    path = random_lora(BASE, 8, seed=0).save(tmp_path) / "adapter_model.safetensors"
    from_file = read_checkpoint((tmp_path / "adapter_config.json").read_bytes(), path, BASE, 64)
    content = path.read_bytes()
    header = content[: header_bytes(content[:8], len(content))]
    assert check_weights(from_file.spec, header, len(content), BASE) == from_file


def test_groups_that_lie_one_behind_the_other_are_copied_as_one(tmp_path: Path) -> None:
    lora = random_lora(BASE, 64, seed=0)
    _, _, layout, _, _ = packing_of(lora, tmp_path, torch.bfloat16)
    runs: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for run in layout.runs:
        runs[run[:3]] += range(run.first_group, run.first_group + run.num_groups)
    num_matrices = 2 * len(lora.lora_a)
    assert len(runs) == num_matrices
    assert len(layout.runs) <= num_matrices + layout.num_pages < layout.groups.shape[1] / 2
    assert all(groups == list(range(8)) for groups in runs.values())
