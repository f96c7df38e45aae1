"""Put an adapter folder, as PEFT saves it, into a blob store, as an upload would."""

from __future__ import annotations

from pathlib import Path

from manylora.adapters.base_shape import BaseShape
from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.checkpoint.folder import adapter_files
from manylora.adapters.checkpoint.reader import Checkpoint, read_checkpoint
from manylora.adapters.lora.layout import plan_layout
from manylora.adapters.ref import AdapterRef, content_digest
from manylora.memory.geometry import PageGeometry


def store_adapter(
    blobs: LocalBlobs, folder: Path, base: BaseShape | None, *, max_rank: int = 64
) -> AdapterRef:
    """Commit the weights; the reference names the folder. Without a base nothing is checked against it."""
    checkpoint = _read(folder, base, max_rank)
    with blobs.create() as writer:
        writer.write((folder / "adapter_model.safetensors").read_bytes())
        weights_sha256 = writer.commit()
    return AdapterRef(
        tenant_id="t",
        adapter_id=folder.name,
        version=1,
        digest=content_digest(checkpoint.spec, weights_sha256),
        weights_sha256=weights_sha256,
        config=checkpoint.spec,
    )


def adapter_pages(
    folder: Path, base: BaseShape, geometry: PageGeometry, *, max_rank: int = 64
) -> int:
    """Device pages that the adapter takes."""
    return plan_layout(_read(folder, base, max_rank).ranks, base, geometry).num_pages


def _read(folder: Path, base: BaseShape | None, max_rank: int) -> Checkpoint:
    config, weights = adapter_files(folder)
    return read_checkpoint(config.read_bytes(), weights, base, max_rank)
