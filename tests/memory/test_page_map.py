from __future__ import annotations

import random
from collections import Counter

import pytest

from manylora.memory.pool import (
    MAX_CELLS,
    PAGE_KINDS,
    PAGE_STATES,
    PageMap,
    PagePool,
    PageUse,
    page_map,
)


def cells_of(shown: PageMap) -> list[PageUse]:
    return [use for count, index in shown.runs for use in [shown.uses[index]] * count]


def torn_pool(num_pages: int, first_page: int, seed: int) -> tuple[PagePool, dict[int, PageUse]]:
    """A pool after many comings and goings, and what each of its pages is by our own account."""
    pool, rng = PagePool(num_pages, first_page=first_page), random.Random(seed)
    uses = dict.fromkeys(range(first_page, num_pages), PageUse(kind="free"))
    held: list[list[int]] = []
    for step in range(1, 200):
        kind, owner = rng.choice(PAGE_KINDS), rng.randint(-1, 300)
        pages = pool.allocate(rng.randint(1, max(2, num_pages // 20)), kind, owner)
        if pages is not None:
            held.append(pages)
            uses |= dict.fromkeys(pages, PageUse(kind=kind, owner=owner))
        if held and rng.random() < 0.2:
            pages = rng.choice(held)
            pool.change_kind(pages, "prefix")
            uses |= {page: PageUse(kind="prefix", owner=uses[page].owner) for page in pages}
        if held and rng.random() < 0.5:
            pages = held.pop(rng.randrange(len(held)))
            pool.free(pages, last_step=step + rng.randint(-1, 3))
        pool.complete(step)
        uses |= {
            page: PageUse(kind=pool.state(page))
            for page in uses
            if pool.state(page) not in PAGE_KINDS
        }
    return pool, uses


@pytest.mark.parametrize(
    ("num_pages", "first_page", "pages_per_cell"), [(150, 1, 1), (150, 7, 1), (604, 1, 7)]
)
@pytest.mark.parametrize("seed", range(8))
def test_a_cell_shows_the_kind_that_most_of_its_pages_have_and_whose(
    num_pages: int, first_page: int, pages_per_cell: int, seed: int
) -> None:
    pool, uses = torn_pool(num_pages, first_page, seed)
    shown = page_map(pool, max_cells=150 if pages_per_cell == 1 else 100)
    pages = list(uses.values())
    assert shown.pages_per_cell == pages_per_cell
    expected = []
    for start in range(0, len(pages), pages_per_cell):
        cell = pages[start : start + pages_per_cell]
        counts = Counter(page.kind for page in cell)
        most = max(PAGE_STATES, key=lambda state: (counts[state], -PAGE_STATES.index(state)))
        expected.append(next(page for page in cell if page.kind == most))
    assert cells_of(shown) == expected
    assert len(set(shown.uses)) == len(shown.uses)
    assert all(one[1] != other[1] for one, other in zip(shown.runs, shown.runs[1:], strict=False))


@pytest.mark.parametrize(
    ("num_pages", "pages_per_cell"), [(MAX_CELLS, 1), (MAX_CELLS + 1, 2), (100_000, 25)]
)
def test_a_map_is_bounded_however_large_the_pool(num_pages: int, pages_per_cell: int) -> None:
    pool = PagePool(num_pages + 1)
    for kind in PAGE_KINDS:
        assert pool.allocate(num_pages // 5, kind, owner=1)
    shown = page_map(pool)
    assert shown.pages_per_cell == pages_per_cell
    assert len(cells_of(shown)) == -(-num_pages // pages_per_cell) <= MAX_CELLS
