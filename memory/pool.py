"""The owner of each page of the arena: a free list, a kind per page, and a quarantine for pages just freed.

Knows page numbers only, not the bytes of pages. Page 0 of the arena, the zero page, is never handed out. Not
thread-safe: the arena's pool belongs to the engine's thread. `page_map` draws all pages by kind and owner.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from manylora.errors import PageAccountingError

PageKind = Literal["kv", "prefix", "adapter"]
PAGE_KINDS: tuple[PageKind, ...] = get_args(PageKind)
PageState = Literal["free", "kv", "prefix", "adapter", "quarantine"]
PAGE_STATES: tuple[PageState, ...] = get_args(PageState)
NO_OWNER = -1
MAX_CELLS = 4096
_NUM_STATES = len(PAGE_STATES)
_IS_OWNED = np.array([state in PAGE_KINDS for state in PAGE_STATES])
_PADDING = _NUM_STATES
"""State of padding in the last cell. It is not counted."""
_CODES: dict[str, int] = {state: code for code, state in enumerate(PAGE_STATES)}
_OWNED = frozenset(_CODES[kind] for kind in PAGE_KINDS)


class PagePool:
    """Hands out pages and takes them back.

    A page is free, owned (as one of `PAGE_KINDS`), or in quarantine. A page goes to quarantine if it is freed while a
    running step may still read it, and becomes free once that step is complete.

    Args:
        num_pages: Pages of the arena, the zero page included; at least 2.
        on_release: Called with pages when they become free (debugging fills them with poison).
        first_page: The first page to hand out; the pages before it belong to another pool. 0 is for pools without a
            zero page, such as adapter slots; they may have no page at all.

    Raises:
        ValueError: If the arena has no page to hand out.
    """

    def __init__(
        self,
        num_pages: int,
        on_release: Callable[[Sequence[int]], None] | None = None,
        *,
        first_page: int = 1,
    ) -> None:
        if first_page and not 1 <= first_page < num_pages:
            raise ValueError(
                f"first_page must be 0, or at least 1 and below num_pages, got {first_page} of {num_pages}"
            )
        self.num_pages = num_pages
        self.first_page = first_page
        self._on_release = on_release
        self._free = list(range(num_pages - 1, first_page - 1, -1))
        self._states = bytearray(num_pages)
        """State of each page, as an index of `PAGE_STATES`."""
        self._owners = array("i", [NO_OWNER]) * num_pages
        self.num_quarantined = 0
        """Pages that become free when a step completes."""
        self._quarantine: list[tuple[int, int, list[int]]] = []
        self._quarantine_entries = 0
        self.completed_step = 0
        """The latest step known to be complete."""

    @property
    def capacity(self) -> int:
        """Pages that can be owned at once; in the arena, all but the zero page."""
        return self.num_pages - self.first_page

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free)

    def counts(self) -> dict[str, int]:
        """Pages by state: free, kv, prefix, adapter, quarantine. They sum to `capacity`."""
        states = self._states[self.first_page :]
        return {state: states.count(code) for state, code in _CODES.items()}

    def state(self, page: int) -> PageState:
        """State of a page."""
        return PAGE_STATES[self._states[page]]

    def marks(self) -> tuple[memoryview, memoryview]:
        """State of each page that can be handed out, as an index of `PAGE_STATES`, and its last owner; read only."""
        return (
            memoryview(self._states)[self.first_page :].toreadonly(),
            memoryview(self._owners)[self.first_page :].toreadonly(),
        )

    def allocate(self, count: int, kind: PageKind, owner: int = NO_OWNER) -> list[int] | None:
        """Take `count` pages for `kind`, all or nothing.

        The pages hold the bytes that their last owner left.

        Args:
            count: Number of pages.
            kind: Kind that the pages get.
            owner: A number that `marks` returns. Pages keep it when they change their kind.

        Returns:
            The page numbers. If fewer than `count` pages are free, None, and nothing was taken.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        if count > len(self._free):
            return None
        split = len(self._free) - count
        pages = self._free[split:][::-1]
        del self._free[split:]
        code = _CODES[kind]
        for page in pages:
            self._states[page] = code
            self._owners[page] = owner
        return pages

    def change_kind(self, pages: Sequence[int], kind: PageKind) -> None:
        """Turn owned pages into pages of another kind. Their bytes stay.

        Raises:
            PageAccountingError: If a page is not owned or named twice; then nothing was changed.
        """
        self._require_owned(pages)
        self._turn(pages, kind)

    def free(self, pages: Sequence[int], last_step: int) -> None:
        """Give pages back.

        Args:
            pages: Owned pages, each once.
            last_step: The last step that may read them. If it is complete, or 0, they are free at once; otherwise when
                `complete` is called with this step or a later one.

        Raises:
            PageAccountingError: If a page is not owned or named twice; then nothing was freed.
        """
        self._require_owned(pages)
        released = last_step <= self.completed_step
        state: PageState = "free" if released else "quarantine"
        self._turn(pages, state)
        if released:
            self._release(pages)
        elif pages:
            self.num_quarantined += len(pages)
            self._quarantine_entries += 1
            heapq.heappush(self._quarantine, (last_step, self._quarantine_entries, list(pages)))

    def complete(self, step: int) -> None:
        """Note that all steps up to `step` are complete, and free the pages that waited for them."""
        self.completed_step = max(self.completed_step, step)
        while self._quarantine and self._quarantine[0][0] <= self.completed_step:
            _, _, pages = heapq.heappop(self._quarantine)
            self.num_quarantined -= len(pages)
            self._turn(pages, "free")
            self._release(pages)

    def check(self) -> None:
        """Verify that every page is in exactly one place.

        Raises:
            PageAccountingError: If pages were lost or doubled, or the count of quarantined ones is wrong.
        """
        quarantined = [page for _, _, pages in self._quarantine for page in pages]
        states = self._states[self.first_page :]
        for name, pages in (("free", self._free), ("quarantine", quarantined)):
            listed = set(pages)
            marked = {
                page for page, code in enumerate(states, self.first_page) if code == _CODES[name]
            }
            if len(listed) != len(pages) or listed != marked:
                raise PageAccountingError(
                    f"the {name} list has {len(pages)} entries for {len(marked)} pages"
                )
        if self.num_quarantined != len(quarantined):
            raise PageAccountingError(
                f"{self.num_quarantined} pages count as quarantined, {len(quarantined)} are"
            )

    def _turn(self, pages: Sequence[int], state: PageState) -> None:
        code = _CODES[state]
        for page in pages:
            self._states[page] = code

    def _release(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))
        if self._on_release is not None and pages:
            self._on_release(pages)

    def _require_owned(self, pages: Sequence[int]) -> None:
        if len(set(pages)) != len(pages):
            raise PageAccountingError(f"pages are named twice: {sorted(pages)}")
        for page in pages:
            is_ours = self.first_page <= page < self.num_pages
            if not is_ours or self._states[page] not in _OWNED:
                where = self.state(page) if is_ours else "not a page that is handed out"
                raise PageAccountingError(f"page {page} is not owned: it is {where}")


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
