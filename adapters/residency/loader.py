"""From a stored blob to a page image: read, hash, check and pack in one pass. Runs in loader threads, owns nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

from weft.adapters.base_shape import BaseShape
from weft.adapters.blobs.local import CORRUPT, BlobReader
from weft.adapters.blobs.memory import MemoryBlobs
from weft.adapters.blobs.store import BlobStore
from weft.adapters.checkpoint.reader import Checkpoint, check_weights
from weft.adapters.checkpoint.safetensors_header import LENGTH_BYTES, header_bytes
from weft.adapters.lora.layout import LoraLayout, plan_layout
from weft.adapters.lora.packing import Packing
from weft.adapters.ref import AdapterRef, LoraSpec
from weft.adapters.residency.images import HostImage, HostImages
from weft.errors import AdapterFormatError, AdapterIncompatibleError, AdapterUnavailableError, NeverFitsError
from weft.memory.geometry import PageGeometry

MAX_PLANS = 32
"""Headers that are remembered with what follows from them, at most 1 MiB each. Adapters of one training pipeline share
header and config, so most loads need not check names and shapes again."""


class _LoadPlan(NamedTuple):
    """What follows from an adapter's config and header; shared by all adapters that have the same."""

    checkpoint: Checkpoint
    layout: LoraLayout
    packing: Packing


class AdapterLoader:
    """Makes page images. Thread-safe.

    Args:
        blobs: Where weights come from.
        images: Where the images' memory comes from.
        base: Shape of the base model.
        geometry: Sizes of a page.
        dtype: Element type of the arena.
        max_rank: Largest rank that the tables hold.
        max_pages: Most pages an adapter may have.
        pause: Called between pieces of a load.
        memory: Weights that are in no store; None: all are in the store.
    """

    def __init__(  # noqa: PLR0913 - two more than usual, each of its own kind
        self,
        blobs: BlobStore,
        images: HostImages,
        base: BaseShape,
        geometry: PageGeometry,
        dtype: torch.dtype,
        max_rank: int,
        max_pages: int,
        pause: Callable[[], None] = lambda: None,
        memory: MemoryBlobs | None = None,
    ) -> None:
        self._blobs = blobs
        self.memory = memory or MemoryBlobs(0)
        self._images = images
        self._base = base
        self._geometry = geometry
        self._dtype = dtype
        self._max_rank = max_rank
        self._max_pages = max_pages
        self._pause = pause
        self._planned = lru_cache(MAX_PLANS)(self._plan)

    def load(self, ref: AdapterRef, *, is_paced: bool = True) -> HostImage:
        """Read and pack one adapter, with pauses if it is paced; the caller adds the image to the host images.

        Raises:
            AdapterUnavailableError: The blob is missing or corrupt.
            CapacityError: The blob cannot be fetched now (codes storage.unavailable and storage.full).
            AdapterFormatError: The blob is not a LoRA checkpoint that fits its config.
            AdapterIncompatibleError: The adapter is not for this base, or its rank exceeds the setting.
            NeverFitsError: It needs more pages than it may have.
        """
        pause = self._pause if is_paced else lambda: None
        try:
            return self._load(ref, pause)
        except AdapterUnavailableError as error:
            if error.code != CORRUPT:
                raise
            return self._load(ref, pause)  # a store that keeps copies has dropped a corrupt one by now

    def _load(self, ref: AdapterRef, pause: Callable[[], None]) -> HostImage:
        slab_pages: Sequence[int] | None = None
        try:
            with self._open(ref.weights_sha256, pause) as blob:
                header = self._header(blob)
                try:
                    plan = self._planned(json.dumps(ref.config.canonical()), header, blob.size)
                except (AdapterFormatError, AdapterIncompatibleError):
                    blob.verify()  # what was accepted once is refused only where it has changed
                    raise
                slab_pages = self._images.reserve(plan.layout.num_pages)
                pages = self._pack(plan, blob, slab_pages, pause)
        except BaseException:
            self._images.cancel(slab_pages or [])
            raise
        return HostImage(
            digest=ref.digest,
            layout=plan.layout,
            ranks=plan.checkpoint.ranks,
            scalings=plan.checkpoint.scalings,
            pages=pages,
            slab_pages=slab_pages or (),
        )

    @contextmanager
    def _open(self, sha256: str, pause: Callable[[], None]) -> Iterator[BlobReader]:
        with self.memory.open(sha256, pause) as blob:
            if blob is not None:
                yield blob
                return
        with self._blobs.open(sha256, pause) as stored:
            yield stored

    def _header(self, blob: BlobReader) -> bytes:
        header = bytearray(min(LENGTH_BYTES, blob.size))
        blob.readinto(memoryview(header))
        rest = bytearray(header_bytes(header, blob.size) - len(header))
        blob.readinto(memoryview(rest))
        return bytes(header + rest)

    def _pack(
        self, plan: _LoadPlan, blob: BlobReader, slab_pages: Sequence[int] | None, pause: Callable[[], None]
    ) -> list[torch.Tensor]:
        if slab_pages is None:
            pages = list(torch.empty((plan.layout.num_pages, self._geometry.page_bytes), dtype=torch.uint8))
        else:
            pages = self._images.slab_views(slab_pages)
        plan.packing.pack(blob, pages, self._dtype, pause)
        blob.verify()
        return pages

    def _plan(self, canonical_config: str, header: bytes, file_size: int) -> _LoadPlan:
        spec = LoraSpec.from_canonical(json.loads(canonical_config))
        checkpoint = check_weights(spec, header, file_size, self._base, self._pause)
        if checkpoint.largest_rank > self._max_rank:
            raise AdapterIncompatibleError(
                f"The adapter has rank {checkpoint.largest_rank}; this server is set to at most {self._max_rank} "
                "(adapter.max_rank).",
                code="config.rank_invalid",
            )
        layout = plan_layout(checkpoint.ranks, self._base, self._geometry)
        if layout.num_pages > self._max_pages:
            raise NeverFitsError(
                f"The adapter needs {layout.num_pages} pages; at most {self._max_pages} are there for one adapter, "
                "because the pool must also hold a block of KV cache. Give the server a larger memory.gib.",
            )
        return _LoadPlan(checkpoint, layout, Packing(checkpoint, layout, self._base, self._geometry))
