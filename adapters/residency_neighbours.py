"""What residency needs of its neighbours, as protocols: the real parts fit, and a simulator's do too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from weft.adapters.host_images import HostImage
from weft.adapters.layout import LoraLayout
from weft.adapters.ref import AdapterRef


class ImageLoader(Protocol):
    """Makes page images; `weft.adapters.loading.AdapterLoader` is the real one. Called from loader threads."""

    def load(self, ref: AdapterRef, /) -> HostImage:
        """Read and pack one adapter, its slab pages reserved; raises a WeftError that says why it cannot be served."""


class PageWriter(Protocol):
    """Overwrites device pages; `weft.memory.copies.PageCopier` is the real one."""

    pages_at_once: int
    """Pages that `copy_now` may copy in one tick, because that takes less than to hand them over; 0 for none."""

    def fence(self) -> Any:  # noqa: ANN401 - what stands in for "all that was launched so far" is the writer's own
        """Mark what the engine's thread has launched so far; a copy given the mark starts after it."""

    def copy(self, sources: Sequence[torch.Tensor], pages: Sequence[int], fence: Any, /) -> None:  # noqa: ANN401
        """Copy host pages to device pages, and return when the bytes are there. Called from the copy thread."""

    def copy_now(self, sources: Sequence[torch.Tensor], pages: Sequence[int], /) -> None:
        """The same by the engine's thread, for a few pages."""


class SlotTables(Protocol):
    """Where kernels find the weights; `weft.adapters.tables.AdapterTables` is the real one."""

    @property
    def slots(self) -> int:
        """Rows."""

    def write(
        self,
        slot: int,
        layout: LoraLayout,
        pages: Sequence[int],
        ranks: Mapping[tuple[int, int], int],
        scalings: Mapping[tuple[int, int], float],
        /,
    ) -> None:
        """Describe an adapter whose pages are in the arena."""
