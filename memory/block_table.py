"""KV pages of one request, in order. Knows no pool: the caller brings pages and takes them back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from manylora.memory.geometry import PageGeometry

FIRST_BLOCKS = 8
"""Blocks that a new table has room for; a full table doubles its room."""


class BlockTable:
    """Pages by layer group and block; it only grows.

    Args:
        geometry: Sizes of the pages.
    """

    def __init__(self, geometry: PageGeometry) -> None:
        self._geometry = geometry
        self._room = np.zeros((geometry.num_groups, FIRST_BLOCKS), dtype=np.int32)
        self.pages: list[npt.NDArray[np.int32]] = [row[:0] for row in self._room]
        """Page numbers: a list of num_groups arrays [num_blocks], int32. The list stays, its arrays are replaced."""

    @property
    def num_blocks(self) -> int:
        """KV blocks in the table."""
        return len(self.pages[0])

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks to append until `num_tokens` tokens in all fit; 0 if they fit already."""
        return max(0, self._geometry.blocks(num_tokens) - self.num_blocks)

    def append(self, pages: Sequence[int]) -> None:
        """Add whole blocks.

        Args:
            pages: Pages of each new block in turn, one per layer group.

        Raises:
            ValueError: If the pages are not whole blocks.
        """
        num_groups = self._geometry.num_groups
        if len(pages) % num_groups:
            raise ValueError(f"a block is {num_groups} pages, got {len(pages)} pages")
        first = self.num_blocks
        end = self.num_blocks + len(pages) // num_groups
        if end > self._room.shape[1]:
            room = np.zeros((num_groups, max(end, 2 * self._room.shape[1])), dtype=np.int32)
            room[:, :first] = self._room[:, :first]
            self._room = room
        self._room[:, first:end] = np.asarray(pages, dtype=np.int32).reshape(-1, num_groups).T
        self.pages[:] = [row[:end] for row in self._room]

    def by_block(self, first: int = 0, end: int | None = None) -> list[int]:
        """Pages of each block from `first` up to `end` in turn, one per layer group."""
        pages: list[int] = (
            self._room[:, first : self.num_blocks if end is None else end].T.reshape(-1).tolist()
        )
        return pages
