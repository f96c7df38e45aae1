"""The pages of the pool by kind and owner, as a picture to draw: cells in arena order, run-length encoded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manylora.memory.pool import NO_OWNER, PAGE_KINDS, PAGE_STATES, PagePool, PageState

MAX_CELLS = 4096
_NUM_STATES = len(PAGE_STATES)
_IS_OWNED = np.array([state in PAGE_KINDS for state in PAGE_STATES])
_PADDING = _NUM_STATES
"""State of padding in the last cell. It is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageUse:
    """Kind and owner of a page."""

    kind: PageState
    owner: int = NO_OWNER
    """Owner as given to `PagePool.allocate`; -1 for a page without an owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMap:
    """All pages that can be handed out, in the order of the arena, as at most `MAX_CELLS` cells."""

    pages_per_cell: int
    """Pages that a cell stands for; the last cell may stand for fewer."""
    uses: list[PageUse]
    """Kinds and owners that occur in the map, each once."""
    runs: list[tuple[int, int]]
    """(number of equal consecutive cells, index in `uses`), in order. A cell of several pages shows the kind that most
    of them have, and the owner of the first page of that kind."""


def page_map(pool: PagePool, max_cells: int = MAX_CELLS) -> PageMap:
    """Draw the pool as it is now. Each page takes some 10 ns."""
    states, owners = (np.asarray(marks) for marks in pool.marks())
    pages_per_cell = -(-len(states) // max_cells)
    if pages_per_cell > 1:
        states, owners = _cells(states, owners, pages_per_cell)
    uses = (np.where(_IS_OWNED[states], owners, NO_OWNER) - NO_OWNER) * _NUM_STATES + states
    starts = np.flatnonzero(np.diff(uses, prepend=-1))
    kinds, indices = np.unique(uses[starts], return_inverse=True)
    lengths = np.diff(starts, append=len(uses))
    return PageMap(
        pages_per_cell=pages_per_cell,
        uses=[
            PageUse(kind=PAGE_STATES[use % _NUM_STATES], owner=use // _NUM_STATES + NO_OWNER)
            for use in kinds.tolist()
        ],
        runs=list(zip(lengths.tolist(), indices.tolist(), strict=True)),
    )


def _cells(
    states: npt.NDArray[np.uint8], owners: npt.NDArray[np.int32], pages_per_cell: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Most frequent kind of the pages of each cell, and the owner of the first such page."""
    num_cells = -(-len(states) // pages_per_cell)
    padded = np.full(num_cells * pages_per_cell, _PADDING, np.uint8)
    padded[: len(states)] = states
    cells = np.ascontiguousarray(
        padded.reshape(num_cells, pages_per_cell).T
    )  # sums over rows are fast
    counts = np.stack([(cells == code).sum(axis=0, dtype=np.int32) for code in range(_NUM_STATES)])
    most = counts.argmax(axis=0).astype(np.uint8)
    first = (cells == most).argmax(axis=0) + np.arange(num_cells) * pages_per_cell
    return most, owners[first]
