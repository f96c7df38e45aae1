"""The memory of all pages: the arena, which is the one device allocation, and the slab of host memory.

The arena has views of its pages as bytes, elements or KV cache; the pool knows their owners. The slab has pages of the
same size, page-locked if a device copies from them. It is thread-safe and has a pool of its own.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from manylora.config import GIB
from manylora.errors import ConfigError
from manylora.memory.geometry import SCALE_BYTES, PageGeometry
from manylora.memory.pool import PageKind, PagePool

logger = logging.getLogger(__name__)

POISON_BYTE = 0xFF
"""Byte that fills freed pages. Read as bf16, fp16 or fp32 it is NaN, so a read of freed memory shows."""

DEVICE_LOST = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
"""Texts in errors of a lost device that are not of the class `torch.AcceleratorError`."""
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts in errors of any class after which the device still works."""


def is_device_lost(error: Exception) -> bool:
    """True if an error means that the device is lost: every later call of it in this process fails too."""
    if any(words in str(error) for words in OUT_OF_MEMORY):
        return False
    return isinstance(error, torch.AcceleratorError) or any(
        words in str(error) for words in DEVICE_LOST
    )


class Arena:
    """`num_pages` equal pages in one zero-filled tensor; page 0 is the zero page and stays zero.

    Args:
        geometry: Sizes of a page.
        num_pages: Pages, the zero page included.
        device: Where the memory lies.
        dtype: Element type of LoRA weights, and of KV cache that is not int8; its size is `geometry.dtype_bytes`.

    Raises:
        ValueError: If `dtype` and `geometry` disagree.
    """

    def __init__(
        self, geometry: PageGeometry, num_pages: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        if dtype.itemsize != geometry.dtype_bytes:
            raise ValueError(
                f"{dtype} has {dtype.itemsize} bytes, the geometry says {geometry.dtype_bytes}"
            )
        self.geometry = geometry
        self.num_pages = num_pages
        self.device = device
        self.dtype = dtype
        self.bytes = _zeros((num_pages, geometry.page_bytes), device)
        """uint8 [num_pages, page_bytes]."""
        self.elements = self.bytes.view(dtype)
        """dtype [num_pages, page_elements], the same memory."""

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The K and V cache of one layer.

        Args:
            layer: Index in the model. Its pages are those in the block table of its layer group.

        Returns:
            Two strided views [num_pages, num_kv_heads, page_tokens, head_dim].
        """
        elements = self.bytes.view(torch.int8) if self.geometry.is_kv_int8 else self.elements
        return self._planes(elements, layer, 0, self.geometry.head_dim)

    def kv_scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The scales of one layer's keys and values; None where these are not int8.

        Args:
            layer: As for `kv`.

        Returns:
            Two strided views [num_pages, num_kv_heads, page_tokens], float32.
        """
        geometry = self.geometry
        if not geometry.is_kv_int8:
            return None
        start = geometry.kv_vectors * geometry.head_dim // SCALE_BYTES
        k, v = self._planes(self.bytes.view(torch.float32), layer, start, 1)
        return k[..., 0], v[..., 0]

    def _planes(
        self, elements: torch.Tensor, layer: int, start: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [num_pages, num_kv_heads, page_tokens, width] for keys and values of a layer.

        Args:
            elements: The arena, [num_pages, elements of a page].
            layer: Index in the model.
            start: The first element of the planes of all layers.
            width: Elements per token and head.
        """
        geometry = self.geometry
        head = geometry.page_tokens * width
        plane = geometry.num_kv_heads * head
        shape = (self.num_pages, geometry.num_kv_heads, geometry.page_tokens, width)
        strides = (elements.stride(0), head, width, 1)
        start += (layer % geometry.layers_per_group) * 2 * plane
        return elements.as_strided(shape, strides, start), elements.as_strided(
            shape, strides, start + plane
        )

    def zero(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros."""
        self._fill(pages, 0)

    def zero_listed(self, pages: torch.Tensor) -> None:
        """Fill pages with zeros. Their numbers are on the device, [N], int32, so nothing is copied from the host."""
        self.bytes.index_fill_(0, pages.long(), 0)

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with `POISON_BYTE`.

        Raises:
            ValueError: If the zero page is among them.
        """
        if 0 in pages:
            raise ValueError("page 0 is the zero page and is never poisoned")
        self._fill(pages, POISON_BYTE)

    def _fill(self, pages: Sequence[int], byte: int) -> None:
        if self.device.type == "cpu":
            for page in pages:
                self.bytes[page].fill_(byte)
        elif pages:
            self.bytes.index_fill_(0, torch.tensor(pages, device=self.device), byte)


def _zeros(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Memory full of zeros.

    On the CPU the operating system hands out zero pages at first touch, while torch would write all of them. So a pool
    of 4 GiB takes no time and no memory until it is used.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.uint8))
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def mark(device: torch.device) -> torch.cuda.Event:
    """Record an event that occurs when a GPU has done everything that the calling thread has launched so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


BYTES_AT_ONCE = 1 << 20
"""A CPU copies this much in a tenth of a millisecond, which is less than it costs to let other threads take turns."""


class PageCopier:
    """Blocking page copies; on CUDA they run on a stream of their own beside the steps.

    Args:
        arena: The arena that is written.
        pause: Called after each page on a CPU; elsewhere copies take no core.
    """

    def __init__(self, arena: Arena, pause: Callable[[], None] = lambda: None) -> None:
        self._arena = arena
        self._pause = pause
        self.pages_at_once = (
            BYTES_AT_ONCE // arena.geometry.page_bytes if arena.device.type == "cpu" else 0
        )
        """Pages that the engine's thread may copy between two steps."""
        self._stream = torch.cuda.Stream(arena.device) if arena.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fence(self) -> torch.cuda.Event | None:
        """Mark everything that the calling thread has launched so far; a copy that gets the mark starts after it."""
        return None if self._stream is None else mark(self._arena.device)

    def copy_now(self, sources: Sequence[torch.Tensor], pages: Sequence[int]) -> None:
        """Overwrite a few arena pages of a CPU without a pause, at most `pages_at_once` of them between two steps.

        Args:
            sources: uint8 [page_bytes] each.
            pages: Arena page for each source; no step may be reading it.
        """
        for source, page in zip(sources, pages, strict=True):
            self._arena.bytes[page].copy_(source)

    def copy(
        self, sources: Sequence[torch.Tensor], pages: Sequence[int], fence: torch.cuda.Event | None
    ) -> None:
        """Overwrite arena pages, and return when the copy is complete.

        Args:
            sources: uint8 [page_bytes] each, on the host.
            pages: Arena page for each source; no step may be reading it.
            fence: Result of `fence`, taken after the pages were allocated.
        """
        if self._stream is None:
            for source, page in zip(sources, pages, strict=True):
                self._arena.bytes[page].copy_(source)
                self._pause()
            return
        with torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            for source, page in zip(sources, pages, strict=True):
                self._arena.bytes[page].copy_(source, non_blocking=True)
        self._stream.synchronize()


class HostSlab:
    """One host allocation with a pool of its own; allocations are all or nothing.

    Args:
        num_pages: Pages. With 0, nothing is ever handed out.
        page_bytes: Bytes of a page, as in the arena.
        pinned: Page-lock the memory, which CUDA copies need to run asynchronously.

    Raises:
        ConfigError: The system does not let this much memory be page-locked.
    """

    def __init__(self, num_pages: int, page_bytes: int, pinned: bool) -> None:
        self.num_pages = num_pages
        size = num_pages * page_bytes
        flat = _own_mapping(size) if pinned and size else torch.empty(size, dtype=torch.uint8)
        self.pages = flat.view(num_pages, page_bytes)
        """uint8 [num_pages, page_bytes], not initialised."""
        self._unpin = _pin(self, flat.data_ptr(), size) if pinned and size else None
        self._lock = threading.Lock()
        self._pool = PagePool(num_pages, first_page=0)

    def close(self) -> None:
        """End the page-locking, after the last copy. The pages stay readable; a second call does nothing."""
        if self._unpin is not None:
            self._unpin()

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now."""
        with self._lock:
            return self._pool.num_free

    def counts(self) -> dict[str, int]:
        """Pages by state, as in `PagePool.counts`."""
        with self._lock:
            return self._pool.counts()

    def allocate(self, count: int, kind: PageKind = "adapter") -> list[int] | None:
        """Take `count` pages; if they are not free, return None and take nothing."""
        with self._lock:
            return self._pool.allocate(count, kind)

    def free(self, pages: Sequence[int], last_step: int = 0) -> None:
        """Give pages back; they are free when `last_step` is complete, which is the last one to read or write them.

        Raises:
            PageAccountingError: If a page is not in use or named twice; then nothing was freed.
        """
        with self._lock:
            self._pool.free(pages, last_step)

    def complete(self, step: int) -> None:
        """Note that all steps up to `step` are complete, and free the pages that waited for them."""
        with self._lock:
            self._pool.complete(step)

    def check(self) -> None:
        """Verify that every page is either free or in use.

        Raises:
            PageAccountingError: If pages were lost or doubled.
        """
        with self._lock:
            self._pool.check()


def _own_mapping(size: int) -> torch.Tensor:
    """Allocate exactly `size` bytes, aligned to pages; torch's allocator of pinned memory rounds to powers of two.

    Raises:
        ConfigError: There is not enough memory.
    """
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _refusal(size, str(error)) from error
    with suppress(OSError):  # without huge pages, page-locking takes longer
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _pin(owner: HostSlab, address: int, size: int) -> Callable[[], object]:
    """Page-lock memory until the result is called, or its owner or the process ends.

    Raises:
        ConfigError: The system refuses.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(address, size, 0)
    if int(status) != 0:
        raise _refusal(size, cudart.cudaGetErrorString(status))

    def unregister() -> None:
        status = cudart.cudaHostUnregister(address)
        if (
            int(status) != 0
        ):  # the device is lost; the system frees the memory when the process ends
            logger.warning("host memory stays page-locked: %s", cudart.cudaGetErrorString(status))

    return weakref.finalize(owner, unregister)


def _refusal(size: int, reason: str) -> ConfigError:
    return ConfigError(
        f"memory.host_gib: {size / GIB:.2f} GiB of host memory cannot be page-locked for the GPU: {reason}; "
        "take less, or raise the process's limits on memory and locked memory (ulimit -l, docker --ulimit memlock=-1)",
        param="memory.host_gib",
    )


@dataclass(eq=False)
class SwapSpace:
    """The share of the host slab that holds KV of preempted requests."""

    slab: HostSlab
    """Shared with the adapters' page images."""
    make_room: Callable[[int], bool]
    """Drops page images until the given number of host pages is free; returns True if it is."""
    max_pages: int
    """Most pages held at once."""

    @property
    def num_used(self) -> int:
        """Host pages held, and those that wait for the last step that reads or writes them."""
        return self.counts()["kv"]

    def take(self, count: int) -> list[int] | None:
        """Take `count` host pages; if there is no room, return None and take nothing."""
        if self.num_used + count > self.max_pages or not self.make_room(count):
            return None
        return self.slab.allocate(count, "kv")

    def counts(self) -> dict[str, int]:
        """Pages of the whole slab by kind: free, adapter, kv."""
        counts = self.slab.counts()
        num_kv = counts["kv"] + counts["quarantine"]
        return {"free": counts["free"], "adapter": counts["adapter"], "kv": num_kv}
