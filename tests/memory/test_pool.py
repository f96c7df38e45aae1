"""Any order of allocations, frees, changes of kind and completed steps keeps each page in exactly one place."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manylora.errors import PageAccountingError
from manylora.memory.pool import PAGE_KINDS, PageKind, PagePool, PageState

NUM_PAGES = 12


class PoolMachine(RuleBasedStateMachine):
    """The model: a state per page, the step that a page in quarantine waits for, and the step that is complete."""

    @initialize(first_page=st.integers(1, 4))
    def start(self, first_page: int) -> None:
        self.released: list[int] = []
        self.first_page = first_page
        self.pool = PagePool(NUM_PAGES, on_release=self.released.extend, first_page=first_page)
        self.states: dict[int, PageState] = dict.fromkeys(range(first_page, NUM_PAGES), "free")
        self.waits_for: dict[int, int] = {}
        self.step = 0

    def owned(self) -> list[int]:
        return [page for page, state in self.states.items() if state in PAGE_KINDS]

    @rule(count=st.integers(0, NUM_PAGES), kind=st.sampled_from(PAGE_KINDS))
    def allocate(self, count: int, kind: PageKind) -> None:
        free = {page for page, state in self.states.items() if state == "free"}
        pages = self.pool.allocate(count, kind)
        assert (pages is None) == (count > len(free))
        if pages is not None:
            assert len(pages) == len(set(pages)) == count
            assert set(pages) <= free
            self.states.update(dict.fromkeys(pages, kind))

    @precondition(lambda self: self.owned())
    @rule(data=st.data(), kind=st.sampled_from(PAGE_KINDS))
    def change_kind(self, data: st.DataObject, kind: PageKind) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.owned()), unique=True))
        self.pool.change_kind(pages, kind)
        self.states.update(dict.fromkeys(pages, kind))

    @precondition(lambda self: self.owned())
    @rule(data=st.data(), ahead=st.integers(-1, 3))
    def free(self, data: st.DataObject, ahead: int) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.owned()), unique=True))
        last_step = max(0, self.step + ahead)
        before = len(self.released)
        self.pool.free(pages, last_step)
        waits = last_step > self.step
        assert sorted(self.released[before:]) == ([] if waits else sorted(pages))
        for page in pages:
            self.states[page] = "quarantine" if waits else "free"
            if waits:
                self.waits_for[page] = last_step

    @rule(step=st.integers(-2, 3))
    def complete(self, step: int) -> None:
        """A step that is behind the last one changes nothing."""
        before = len(self.released)
        self.pool.complete(self.step + step)
        self.step = max(self.step, self.step + step)
        due = [page for page, last in self.waits_for.items() if last <= self.step]
        assert sorted(self.released[before:]) == sorted(due)
        for page in due:
            del self.waits_for[page]
            self.states[page] = "free"

    @rule(data=st.data())
    def what_is_not_owned_is_refused_whole(self, data: st.DataObject) -> None:
        owned = self.owned()
        wrong = data.draw(st.sampled_from(sorted(set(range(-1, NUM_PAGES + 1)) - set(owned))))
        named = [*owned[:2], wrong]
        with pytest.raises(PageAccountingError):
            self.pool.free(named, 0)
        with pytest.raises(PageAccountingError):
            self.pool.change_kind(named, "prefix")
        if owned:
            with pytest.raises(PageAccountingError, match="twice"):
                self.pool.change_kind([owned[0], owned[0]], "prefix")

    @invariant()
    def pool_and_model_agree(self) -> None:
        self.pool.check()
        states = list(self.states.values())
        names: tuple[PageState, ...] = ("free", *PAGE_KINDS, "quarantine")
        assert self.pool.counts() == {state: states.count(state) for state in names}
        assert self.pool.num_free == states.count("free")
        assert self.pool.num_quarantined == len(self.waits_for)
        assert self.pool.capacity == NUM_PAGES - self.first_page
        assert self.pool.completed_step == self.step

    def teardown(self) -> None:
        self.pool.free(self.owned(), 0)
        self.pool.complete(self.step + 3)
        pages = self.pool.allocate(self.pool.capacity, "kv")
        assert pages is not None
        assert sorted(pages) == sorted(self.states)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)


@pytest.mark.parametrize("first_page", [-1, 8, 9])
def test_a_pool_without_a_page_to_hand_out_is_refused(first_page: int) -> None:
    with pytest.raises(ValueError, match="first_page"):
        PagePool(8, first_page=first_page)


@pytest.mark.parametrize("count", [0, 3])
def test_a_pool_of_other_things_than_pages_of_the_arena_begins_at_0(count: int) -> None:
    pool = PagePool(count, first_page=0)
    assert pool.capacity == count
    assert pool.allocate(count, "adapter") == list(range(count))
    assert pool.allocate(1, "adapter") is None
    pool.check()
