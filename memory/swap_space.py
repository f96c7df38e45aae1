"""Host pages for the KV cache of preempted requests, beside the page images of adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.memory.host_slab import HostSlab


class SwapSpace:
    """Takes pages of the host slab, as far as their share goes.

    Args:
        slab: Shared with the adapters' page images.
        make_room: Drops what can be had again until so many host pages are free; returns whether they are.
        max_pages: Most pages held at once.
    """

    def __init__(self, slab: HostSlab, make_room: Callable[[int], bool], max_pages: int) -> None:
        self._slab = slab
        self._make_room = make_room
        self._max_pages = max_pages
        self.num_used = 0
        """Host pages held."""

    def take(self, count: int) -> list[int] | None:
        """Take `count` host pages, or None and nothing taken."""
        if self.num_used + count > self._max_pages or not self._make_room(count):
            return None
        pages = self._slab.allocate(count)
        if pages is not None:
            self.num_used += count
        return pages

    def counts(self) -> dict[str, int]:
        """Pages of the whole slab by kind: free, adapter, kv."""
        num_free = self._slab.num_free
        return {"free": num_free, "adapter": self._slab.num_pages - num_free - self.num_used, "kv": self.num_used}

    def give_back(self, pages: Sequence[int]) -> None:
        """Free host pages that no copy reads or writes any more."""
        self._slab.free(pages)
        self.num_used -= len(pages)
