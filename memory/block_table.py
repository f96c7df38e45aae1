"""The KV pages of one request, in order. Knows no pool: pages come from the caller and go back through it."""

from __future__ import annotations

from collections.abc import Sequence

from weft.memory.geometry import PageGeometry


class BlockTable:
    """Pages by layer group and block; it only grows.

    Args:
        geometry: Sizes of the pages.
    """

    def __init__(self, geometry: PageGeometry) -> None:
        self._geometry = geometry
        self.pages: list[list[int]] = [[] for _ in range(geometry.num_groups)]
        """[num_groups][num_blocks] page numbers."""

    @property
    def num_blocks(self) -> int:
        """KV blocks held."""
        return len(self.pages[0])

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks to append so that `num_tokens` tokens in all fit; 0 when they already do."""
        return max(0, self._geometry.blocks(num_tokens) - self.num_blocks)

    def append(self, pages: Sequence[int]) -> None:
        """Add whole blocks.

        Args:
            pages: One page per layer group of the first new block, then of the next, and so on.

        Raises:
            ValueError: If the pages are not whole blocks.
        """
        num_groups = self._geometry.num_groups
        if len(pages) % num_groups:
            raise ValueError(f"a block is {num_groups} pages, got {len(pages)} pages")
        for group, table in enumerate(self.pages):
            table.extend(pages[group::num_groups])
