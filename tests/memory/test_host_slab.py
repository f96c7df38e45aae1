from __future__ import annotations

import threading

import pytest

from weft.errors import PageAccountingError
from weft.memory.host_slab import HostSlab


def test_pages_are_handed_out_once_and_come_back() -> None:
    slab = HostSlab(4, 256, pinned=False)
    first = slab.allocate(3)
    assert first is not None
    assert slab.allocate(2) is None
    assert slab.num_free == 1
    slab.free(first)
    assert slab.num_free == 4
    slab.check()


def test_a_double_free_raises_and_changes_nothing() -> None:
    slab = HostSlab(4, 256, pinned=False)
    pages = slab.allocate(2)
    assert pages is not None
    slab.free(pages[:1])
    with pytest.raises(PageAccountingError):
        slab.free(pages)
    assert slab.num_free == 3
    slab.check()


def test_an_empty_slab_hands_out_nothing() -> None:
    slab = HostSlab(0, 256, pinned=False)
    assert slab.allocate(1) is None
    slab.check()


def test_check_finds_a_lost_page() -> None:
    slab = HostSlab(4, 256, pinned=False)
    slab._free.pop()
    with pytest.raises(PageAccountingError):
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

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slab.check()
    assert collisions == []
    assert slab.num_free == 8
