"""Adapters on disk, for planning: a folder as PEFT writes it, or a weights file alone, such as a stored blob."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

from weft.adapters.base_shape import BaseShape
from weft.adapters.checkpoint.reader import Checkpoint, read_checkpoint
from weft.adapters.checkpoint.safetensors_header import read_header
from weft.adapters.checkpoint.tensor_names import TensorNames
from weft.adapters.lora.layout import adapter_pages
from weft.adapters.ref import content_digest
from weft.server.adapters.fit import FitItem, Room, waste


def item_of_files(name: str, config: Path | None, weights: Path, base: BaseShape, max_rank: int, room: Room) -> FitItem:
    """What an adapter on disk would take on the device; its values are not looked at.

    Args:
        name: What it is called.
        config: Its `adapter_config.json`; None takes the ranks from the shapes of the weights.
        weights: Its `adapter_model.safetensors`.
        base: Shape of the base model.
        max_rank: Largest rank that is served.
        room: Says how large pages are.

    Raises:
        AdapterError: It cannot be served with this base.
        OSError: A file cannot be read.
    """
    raw = config.read_bytes() if config is not None else _config_by_shapes(weights, base)
    found = read_checkpoint(raw, weights, base, max_rank, scan_values=False)
    pages = adapter_pages(found.ranks, base, room.geometry)
    return FitItem(
        adapter=name,
        digest=_digest(found, weights),
        rank=found.largest_rank,
        target_modules=found.target_modules,
        pages=pages,
        waste=waste(found.parameters, pages, room.geometry),
    )


def _config_by_shapes(weights: Path, base: BaseShape) -> bytes:
    """A config with the ranks that the weights have. Its scaling is made up: it changes no size."""
    names = TensorNames(base)
    with weights.open("rb") as file:
        tensors = read_header(file, weights.stat().st_size)
    ranks = {}
    for tensor in tensors:
        name = names.read(tensor.name)
        place = name.place
        if place.part == "a" and len(tensor.shape) > 1:
            ranks[f"{name.stem}.{place.layer}.{base.modules[place.module].path}"] = tensor.shape[name.rank_axis]
    ((usual, _),) = Counter(ranks.values()).most_common(1) or [(1, 0)]
    pattern = {path: rank for path, rank in ranks.items() if rank != usual}
    return json.dumps({"peft_type": "LORA", "r": usual, "lora_alpha": usual, "rank_pattern": pattern}).encode()


def _digest(found: Checkpoint, weights: Path) -> str:
    with weights.open("rb") as file:
        return content_digest(found.spec, hashlib.file_digest(file, "sha256").hexdigest())
