from __future__ import annotations

import pytest

from weft.errors import PageAccountingError
from weft.memory.pool import PagePool


def test_the_zero_page_is_never_handed_out() -> None:
    pool = PagePool(8)
    pages = pool.allocate(7, "kv")
    assert pages is not None
    assert sorted(pages) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.allocate(1, "kv") is None


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = PagePool(4)
    assert pool.allocate(4, "adapter") is None
    assert pool.num_free == 3
    assert pool.allocate(0, "kv") == []


def test_pages_wait_for_the_last_step_that_may_read_them() -> None:
    released: list[int] = []
    pool = PagePool(4, on_release=released.extend)
    pages = pool.allocate(2, "kv")
    assert pages is not None
    pool.free(pages, last_step=3)
    assert (pool.num_free, pool.num_quarantined, released) == (1, 2, [])
    pool.complete(2)
    assert pool.num_free == 1
    pool.complete(3)
    assert (pool.num_free, pool.num_quarantined, sorted(released)) == (3, 0, sorted(pages))


def test_a_page_is_handed_out_for_the_first_time_once() -> None:
    first: list[int] = []
    pool = PagePool(10, on_first_use=first.extend, first_page=3)
    assert first == []
    early = pool.allocate(2, "kv")
    assert early is not None
    assert sorted(first) == sorted(early)
    pool.free(early[:1], last_step=0)
    pool.free(early[1:], last_step=1)
    assert pool.allocate(9, "kv") is None
    late = pool.allocate(5, "adapter")
    assert late is not None
    assert sorted(first) == sorted({*early, *late})
    pool.complete(1)
    pool.free(late, last_step=0)
    assert pool.allocate(7, "kv") is not None
    assert sorted(first) == list(range(3, 10))


def test_pages_of_a_completed_step_are_free_at_once() -> None:
    pool = PagePool(4)
    pool.complete(5)
    pages = pool.allocate(3, "prefix")
    assert pages is not None
    pool.free(pages, last_step=5)
    assert pool.num_free == 3


@pytest.mark.parametrize("wrong", [[0], [4], [-1], [2], [1, 1]])
def test_freeing_what_is_not_owned_raises_and_changes_nothing(wrong: list[int]) -> None:
    pool = PagePool(4)
    assert pool.allocate(1, "kv") == [1]
    with pytest.raises(PageAccountingError):
        pool.free([1, *wrong] if wrong != [1, 1] else wrong, last_step=0)
    assert pool.counts() == {"free": 2, "kv": 1, "prefix": 0, "adapter": 0, "quarantine": 0}
    pool.check()


def test_a_double_free_raises_in_quarantine_too() -> None:
    pool = PagePool(4)
    pages = pool.allocate(1, "kv")
    assert pages is not None
    pool.free(pages, last_step=9)
    with pytest.raises(PageAccountingError, match="quarantine"):
        pool.free(pages, last_step=9)


def test_check_finds_a_page_that_is_in_two_places() -> None:
    pool = PagePool(4)
    pool._free.append(pool._free[0])
    with pytest.raises(PageAccountingError):
        pool.check()


def test_check_finds_a_wrong_counter() -> None:
    pool = PagePool(4)
    pool._counts["kv"] += 1
    with pytest.raises(PageAccountingError):
        pool.check()


def test_pages_change_kind_and_keep_their_owner() -> None:
    pool = PagePool(6)
    pages = pool.allocate(3, "kv")
    assert pages is not None
    pool.change_kind(pages[:2], "prefix")
    assert pool.counts() == {"free": 2, "kv": 1, "prefix": 2, "adapter": 0, "quarantine": 0}
    pool.check()


@pytest.mark.parametrize("wrong", [[0], [5], [1, 1], [6]])
def test_a_change_of_kind_of_what_is_not_owned_raises_and_changes_nothing(wrong: list[int]) -> None:
    pool = PagePool(6)
    assert pool.allocate(2, "kv") == [1, 2]
    with pytest.raises(PageAccountingError):
        pool.change_kind([2, *wrong], "prefix")
    assert pool.counts() == {"free": 3, "kv": 2, "prefix": 0, "adapter": 0, "quarantine": 0}
    pool.check()


def test_pages_before_the_first_belong_to_somebody_else() -> None:
    pool = PagePool(8, first_page=5)
    assert pool.capacity == 3
    assert pool.allocate(3, "kv") == [5, 6, 7]
    assert pool.allocate(1, "kv") is None
    with pytest.raises(PageAccountingError, match="not a page that is handed out"):
        pool.free([4], 0)
    pool.check()


@pytest.mark.parametrize("first_page", [0, 8, 9])
def test_a_pool_without_a_page_to_hand_out_is_refused(first_page: int) -> None:
    with pytest.raises(ValueError, match="first_page"):
        PagePool(8, first_page=first_page)
