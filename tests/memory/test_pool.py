from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.errors import PageAccountingError
from weft.memory.pool import PAGE_KINDS, PageKind, PagePool


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


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.released: list[int] = []
        self.pool = PagePool(12, on_release=self.released.extend)
        self.owned: list[tuple[PageKind, list[int]]] = []
        self.waiting: list[tuple[int, list[int]]] = []
        self.step = 0

    @rule(count=st.integers(0, 14), kind=st.sampled_from(PAGE_KINDS))
    def allocate(self, count: int, kind: PageKind) -> None:
        free = self.pool.num_free
        pages = self.pool.allocate(count, kind)
        assert (pages is None) == (count > free)
        if pages is not None:
            others = {page for _, held in self.owned for page in held} | {p for _, held in self.waiting for p in held}
            assert len(set(pages)) == count
            assert not others & set(pages)
            assert 0 not in pages
            self.owned.append((kind, pages))

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), ahead=st.integers(-1, 3))
    def free(self, data: st.DataObject, ahead: int) -> None:
        _, pages = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        last_step = max(0, self.step + ahead)
        before = len(self.released)
        self.pool.free(pages, last_step)
        if last_step <= self.step:
            assert sorted(self.released[before:]) == sorted(pages)
        else:
            assert len(self.released) == before
            self.waiting.append((last_step, pages))

    @rule(steps=st.integers(0, 3))
    def complete(self, steps: int) -> None:
        self.step += steps
        self.pool.complete(self.step)
        self.waiting = [(last, pages) for last, pages in self.waiting if last > self.step]

    @precondition(lambda self: self.waiting or self.pool.num_free)
    @rule(data=st.data())
    def free_of_an_unowned_page_is_refused(self, data: st.DataObject) -> None:
        owned = {page for _, held in self.owned for page in held}
        page = data.draw(st.sampled_from(sorted(set(range(12)) - owned)))
        with pytest.raises(PageAccountingError):
            self.pool.free([page], 0)

    @invariant()
    def pages_are_accounted_for(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert sum(counts.values()) == self.pool.capacity
        for kind in PAGE_KINDS:
            assert counts[kind] == sum(len(pages) for owned_kind, pages in self.owned if owned_kind == kind)
        assert counts["quarantine"] == sum(len(pages) for _, pages in self.waiting)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)
