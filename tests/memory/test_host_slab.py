from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from weft.errors import PageAccountingError
from weft.memory.host_slab import HostSlab, SwapSpace


def test_a_double_free_raises_and_changes_nothing() -> None:
    slab = HostSlab(4, 256, pinned=False)
    pages = slab.allocate(2)
    assert pages is not None
    slab.free(pages[:1])
    with pytest.raises(PageAccountingError):
        slab.free(pages)
    assert slab.num_free == 3
    slab.check()


def test_threads_never_get_the_same_page() -> None:
    slab = HostSlab(8, 256, pinned=False)
    collisions: list[int] = []
    holders: dict[int, int] = {}

    def work(thread: int) -> None:
        for _ in range(300):
            pages = slab.allocate(3)
            if pages is None:
                continue
            collisions.extend(page for page in pages if holders.setdefault(page, thread) != thread)
            for page in pages:
                holders.pop(page, None)
            slab.free(pages)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    slab.check()
    assert collisions == []
    assert slab.num_free == 8


def test_more_than_its_share_is_refused_before_room_is_made_for_it() -> None:
    asked: list[int] = []

    def make_room(count: int) -> bool:
        asked.append(count)
        return True

    swap = SwapSpace(HostSlab(6, 64, pinned=False), make_room, max_pages=4)
    assert swap.take(5) is None
    assert len(swap.take(3) or []) == 3
    assert swap.take(2) is None
    assert (asked, swap.num_used) == ([3], 3)


def test_a_loader_that_takes_the_room_first_is_no_fault() -> None:
    slab = HostSlab(4, 64, pinned=False)

    def make_room(count: int) -> bool:
        assert slab.allocate(2) is not None  # as a loader's thread may, just after
        return True

    swap = SwapSpace(slab, make_room, 4)
    assert swap.take(3) is None
    assert (swap.num_used, slab.num_free) == (0, 2)
