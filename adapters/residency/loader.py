"""Loading of a stored blob to a page image: read, hash, check and pack in one pass. Runs in loader threads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from manylora.adapters.base_shape import BaseShape
from manylora.adapters.blobs.local import CORRUPT, BlobReader
from manylora.adapters.blobs.memory import MemoryBlobs
from manylora.adapters.blobs.store import BlobStore
from manylora.adapters.checkpoint.reader import check_weights
from manylora.adapters.checkpoint.safetensors_header import LENGTH_BYTES, header_bytes
from manylora.adapters.lora.layout import plan_layout
from manylora.adapters.lora.packing import Packing
from manylora.adapters.ref import AdapterRef, LoraSpec
from manylora.adapters.residency.images import HostImage, HostImages
from manylora.errors import (
    AdapterFormatError,
    AdapterIncompatibleError,
    AdapterUnavailableError,
    NeverFitsError,
)
from manylora.memory.geometry import PageGeometry

MAX_PLANS = 32
"""Number of headers that are remembered with their plans, at most 1 MiB each. Adapters of one training pipeline share
header and config, so most loads need not check names and shapes again."""


@dataclass(eq=False)
class AdapterLoader:
    """Makes page images. Thread-safe."""

    blobs: BlobStore
    """Store of weights that are not in `memory`."""
    images: HostImages
    """Host images, which give the memory."""
    base: BaseShape
    geometry: PageGeometry
    dtype: torch.dtype
    """Element type of the arena."""
    max_rank: int
    """Largest rank that the tables hold."""
    max_pages: int
    """Largest number of pages that an adapter may have."""
    pause: Callable[[], None] = lambda: None
    """Called between pieces of a load."""
    memory: MemoryBlobs = field(default_factory=lambda: MemoryBlobs(0), init=False)
    """Weights that are in no store."""

    def __post_init__(self) -> None:
        self._planned = lru_cache(MAX_PLANS)(self._packing)

    def load(self, ref: AdapterRef, *, is_paced: bool = True) -> HostImage:
        """Read and pack one adapter, with pauses if it is paced. The caller adds the image to the host images.

        Raises:
            AdapterUnavailableError: The blob is missing or corrupt.
            CapacityError: The blob cannot be fetched now (codes storage.unavailable and storage.full).
            AdapterFormatError: The blob is not a LoRA checkpoint that fits its config.
            AdapterIncompatibleError: The adapter is not for this base, or its rank exceeds the setting.
            NeverFitsError: It needs more pages than it may have.
        """
        pause = self.pause if is_paced else lambda: None
        try:
            return self._load(ref, pause)
        except AdapterUnavailableError as error:
            if error.code != CORRUPT:
                raise
            return self._load(
                ref, pause
            )  # a store that keeps copies has dropped a corrupt copy by now

    def _load(self, ref: AdapterRef, pause: Callable[[], None]) -> HostImage:
        blobs = self.memory if ref.weights_sha256 in self.memory else self.blobs
        slab_pages: Sequence[int] | None = None
        try:
            with blobs.open(ref.weights_sha256, pause) as blob:
                header = self._header(blob)
                try:
                    packing = self._planned(json.dumps(ref.config.canonical()), header, blob.size)
                except (AdapterFormatError, AdapterIncompatibleError):
                    blob.verify()  # a blob that was accepted before is refused only if it has changed
                    raise
                slab_pages = self.images.reserve(packing.layout.num_pages)
                pages = self._pack(packing, blob, slab_pages, pause)
        except BaseException:
            self.images.cancel(slab_pages or [])
            raise
        return HostImage(
            digest=ref.digest,
            layout=packing.layout,
            ranks=packing.checkpoint.ranks,
            scalings=packing.checkpoint.scalings,
            pages=pages,
            slab_pages=slab_pages or (),
        )

    def _header(self, blob: BlobReader) -> bytes:
        header = bytearray(min(LENGTH_BYTES, blob.size))
        blob.readinto(memoryview(header))
        rest = bytearray(header_bytes(header, blob.size) - len(header))
        blob.readinto(memoryview(rest))
        return bytes(header + rest)

    def _pack(
        self,
        packing: Packing,
        blob: BlobReader,
        slab_pages: Sequence[int] | None,
        pause: Callable[[], None],
    ) -> list[torch.Tensor]:
        if slab_pages is None:
            pages = list(
                torch.empty((packing.layout.num_pages, self.geometry.page_bytes), dtype=torch.uint8)
            )
        else:
            pages = self.images.slab_views(slab_pages)
        packing.pack(blob, pages, self.dtype, pause)
        blob.verify()
        return pages

    def _packing(self, canonical_config: str, header: bytes, file_size: int) -> Packing:
        """Plan that follows from an adapter's config and header. Adapters with equal ones share it."""
        spec = LoraSpec.from_canonical(json.loads(canonical_config))
        checkpoint = check_weights(spec, header, file_size, self.base, self.pause)
        if checkpoint.largest_rank > self.max_rank:
            raise AdapterIncompatibleError(
                f"The adapter has rank {checkpoint.largest_rank}; this server is set to at most {self.max_rank} "
                "(adapter.max_rank).",
                code="config.rank_invalid",
            )
        layout = plan_layout(checkpoint.ranks, self.base, self.geometry)
        if layout.num_pages > self.max_pages:
            raise NeverFitsError(
                f"The adapter needs {layout.num_pages} pages; at most {self.max_pages} are there for one adapter, "
                "because the pool must also hold a block of KV cache. Set memory.gib to more.",
            )
        return Packing(checkpoint, layout, self.base, self.geometry)
