"""Host memory in pages of the arena's size, page-locked if a device copies from it. Thread-safe."""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from manylora.config import GIB
from manylora.errors import ConfigError
from manylora.memory.pool import PageKind, PagePool

logger = logging.getLogger(__name__)


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


class SwapSpace:
    """The share of the host slab that holds KV of preempted requests.

    Args:
        slab: Shared with the adapters' page images.
        make_room: Drops page images until the given number of host pages is free; returns whether it is.
        max_pages: Most pages held at once.
    """

    def __init__(self, slab: HostSlab, make_room: Callable[[int], bool], max_pages: int) -> None:
        self.slab = slab
        self._make_room = make_room
        self._max_pages = max_pages

    @property
    def num_used(self) -> int:
        """Host pages held, and those that wait for the last step that reads or writes them."""
        return self.counts()["kv"]

    def take(self, count: int) -> list[int] | None:
        """Take `count` host pages; if there is no room, return None and take nothing."""
        if self.num_used + count > self._max_pages or not self._make_room(count):
            return None
        return self.slab.allocate(count, "kv")

    def counts(self) -> dict[str, int]:
        """Pages of the whole slab by kind: free, adapter, kv."""
        counts = self.slab.counts()
        num_kv = counts["kv"] + counts["quarantine"]
        return {"free": counts["free"], "adapter": counts["adapter"], "kv": num_kv}
