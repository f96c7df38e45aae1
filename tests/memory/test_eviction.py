from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest

from manylora.errors import PageAccountingError
from manylora.memory.eviction import (
    HALF_LIFE_S,
    MIN_COMPACTION,
    Evictable,
    Evictor,
    UseCount,
)
from manylora.memory.pool import PageKind, PagePool


@dataclass(eq=False, kw_only=True)
class Thing(Evictable):
    """Something with pages, and with others that go when it goes."""

    owner: Parts
    cost_s: float = 1.0
    """Cost of a page."""
    kind: PageKind = "adapter"
    dependents: list[Thing] = field(default_factory=list)
    rescores: list[Thing] = field(default_factory=list)
    """Things that are offered again when it goes."""


class Parts:
    """Owner of the things."""

    def __init__(self, num_pages: int = 20) -> None:
        self.now_s = 0.0
        self.pool = PagePool(num_pages + 1)
        self.evictor = Evictor(self.pool, clock=lambda: self.now_s)
        self.gone: list[Thing] = []

    def thing(self, num_pages: int = 1, **fields: object) -> Thing:
        """In use at first."""
        pages = self.pool.allocate(num_pages, "adapter")
        assert pages is not None
        return Thing(owner=self, pages=pages, **fields)  # type: ignore[arg-type]

    def idle(self, num_pages: int = 1, **fields: object) -> Thing:
        """Used once, now, and offered."""
        thing = self.thing(num_pages, **fields)
        self.use(thing)
        return thing

    def reload_cost(self, thing: Thing) -> tuple[float, int]:
        return thing.cost_s * thing.num_pages, thing.num_pages

    def evict(self, thing: Thing) -> None:
        for dependent in thing.dependents:
            self.evictor.take(dependent)
        self.pool.free(thing.pages, thing.last_step)
        self.gone.append(thing)
        for other in thing.rescores:
            self.evictor.offer(other)

    def use(self, thing: Thing) -> None:
        self.evictor.used(thing)
        self.evictor.offer(thing)

    def order(self) -> list[Thing]:
        """Take everything, one page at a time."""
        self.evictor.check()
        while self.evictor.num_evictable:
            before = len(self.gone)
            assert self.evictor.make_room(self.pool.num_free + 1)
            self.evictor.check()
            assert len(self.gone) > before
        return self.gone


def test_of_equals_the_one_that_was_used_longest_ago_goes_first() -> None:
    parts = Parts()
    things = []
    for second in (30, 10, 20):
        parts.now_s = second
        things.append(parts.idle())
    assert parts.order() == things


def test_what_goes_first_costs_the_fewest_seconds_per_page() -> None:
    parts = Parts()
    dear, cheap, large = parts.idle(cost_s=3.0), parts.idle(cost_s=1.0), parts.idle(4, cost_s=2.0)
    assert parts.order() == [cheap, large, dear]


def test_a_use_counts_half_after_its_half_life() -> None:
    uses = UseCount()
    uses.note(100.0)
    assert (uses.value, uses.last_s) == (1.0, 100.0)
    uses.note(100.0 + HALF_LIFE_S)
    assert uses.value == pytest.approx(1.5)
    uses.note(100.0 + 3 * HALF_LIFE_S)
    assert uses.value == pytest.approx(1.0 + 1.5 / 4)
    uses.note(1e12)
    assert uses.value == 1.0


def test_what_was_popular_once_goes_in_the_end() -> None:
    """Ten uses long ago outlive newcomers only until the inflation has passed them."""
    parts = Parts()
    old = parts.thing(cost_s=1.0)
    for _ in range(10):
        parts.evictor.used(old)
    parts.evictor.offer(old)
    newcomers = 0
    while old not in parts.gone:
        parts.idle(cost_s=1.0)
        assert parts.evictor.make_room(parts.pool.capacity - 1)
        newcomers += 1
        assert newcomers < 30
    assert newcomers in (10, 11)


def test_what_is_used_later_starts_above_what_went() -> None:
    parts = Parts()
    early = parts.idle(cost_s=6.5)
    assert parts.evictor.first([parts.idle(cost_s=5.0), early]) is not early
    assert parts.evictor.make_room(19)
    dear, cheap = parts.idle(cost_s=2.0), parts.idle(cost_s=1.0)
    assert parts.order()[1:] == [cheap, early, dear], "scores are 6, 6.5 and 7"


def test_of_equals_the_deepest_goes_first() -> None:
    parts = Parts()
    things = [parts.idle(depth=depth) for depth in (1, 3, 0, 2)]
    assert [thing.depth for thing in parts.order()] == [3, 2, 1, 0]
    assert set(parts.gone) == set(things)


def test_some_things_go_only_when_nothing_else_is_left() -> None:
    parts = Parts()
    pinned = parts.idle(cost_s=0.0, evict_last=True)
    parts.now_s = 50.0
    dear = parts.idle(cost_s=1e6)
    assert parts.order() == [dear, pinned]


def test_offering_again_scores_anew() -> None:
    parts = Parts()
    one, other = parts.idle(cost_s=1.0), parts.idle(cost_s=2.0)
    one.cost_s = 3.0
    parts.evictor.offer(one)
    assert parts.evictor.num_evictable == 2
    assert parts.order() == [other, one]


def test_what_is_withdrawn_stays() -> None:
    parts = Parts()
    kept, other = parts.idle(3), parts.idle(2)
    assert kept in parts.evictor
    parts.evictor.withdraw(kept)
    parts.evictor.withdraw(kept)
    assert kept not in parts.evictor
    assert (parts.evictor.num_evictable, parts.evictor.num_available) == (2, 17)
    assert not parts.evictor.make_room(18)
    assert parts.gone == []
    assert parts.evictor.make_room(17)
    assert parts.gone == [other]


def test_room_is_made_whole_or_not_at_all() -> None:
    parts = Parts(num_pages=10)
    in_use = parts.thing(4)
    things = [parts.idle(2), parts.idle(3)]
    assert parts.evictor.num_available == 6
    assert not parts.evictor.make_room(7)
    assert parts.gone == []
    assert parts.evictor.make_room(1), "free already"
    assert parts.gone == []
    assert parts.evictor.make_room(6)
    assert parts.gone == things
    assert in_use not in parts.gone
    assert parts.evictor.evictions == {"adapter": 2}


def test_what_a_step_still_reads_is_passed_over_and_keeps_its_place() -> None:
    parts = Parts(num_pages=6)
    read, other = parts.idle(2, last_step=5), parts.idle(2)
    assert parts.evictor.make_room(4)
    assert parts.gone == [other]
    assert not parts.evictor.make_room(6), "its pages would not be free at once"
    assert read in parts.evictor
    parts.evictor.check()
    parts.pool.complete(5)
    assert parts.evictor.make_room(6)
    assert parts.gone == [other, read]


def test_what_depends_goes_too_and_is_counted_by_its_kind() -> None:
    parts = Parts()
    block = parts.thing(1, kind="prefix")
    adapter = parts.idle(2, dependents=[block])
    parts.now_s = 1.0
    parts.use(block)
    assert parts.evictor.make_room(19)
    assert parts.gone == [block, adapter]
    assert parts.evictor.evictions == {"adapter": 1, "prefix": 1}
    assert parts.evictor.num_evictable == 0


def test_a_victim_that_was_scored_anew_by_the_one_before_it_goes_all_the_same() -> None:
    """An adapter is offered again whenever one of its cached blocks goes; both may be wanted at once."""
    parts = Parts(num_pages=4)
    adapter = parts.thing(3)
    pages = parts.pool.allocate(1, "prefix")
    assert pages is not None
    block = Thing(owner=parts, pages=pages, kind="prefix", rescores=[adapter])
    parts.use(block)
    parts.now_s = 1.0
    parts.use(adapter)
    assert parts.evictor.make_room(4)
    assert parts.gone == [block, adapter]
    parts.evictor.check()


def test_the_heap_does_not_grow_with_offers() -> None:
    parts = Parts()
    things = [parts.idle() for _ in range(10)]
    for _ in range(200):
        for thing in things:
            parts.evictor.withdraw(thing)
            parts.evictor.offer(thing)
    # Each entry of the heap refers to its thing.
    assert sum(sys.getrefcount(thing) for thing in things) <= 8 * len(things) + MIN_COMPACTION
    assert parts.order() == things


def test_check_notices_pages_that_changed_while_offered() -> None:
    parts = Parts()
    parts.idle(2).pages.pop()
    with pytest.raises(PageAccountingError, match="another number of pages"):
        parts.evictor.check()


def test_check_notices_a_wrong_count() -> None:
    parts = Parts()
    parts.idle(2)
    parts.evictor.num_evictable += 1
    with pytest.raises(PageAccountingError, match="counted as evictable"):
        parts.evictor.check()


def test_the_first_of_some_is_the_one_that_goes_first_and_that_can_go_now() -> None:
    parts = Parts()
    read, early, late = parts.idle(1, last_step=5), parts.idle(1), parts.idle(1)
    kept = parts.thing(1)
    assert parts.evictor.first([kept, late, read]) is late
    assert parts.evictor.first([late, early, read]) is early
    assert parts.evictor.first([kept, read]) is None
    parts.pool.complete(5)
    assert parts.evictor.first([late, early, read]) is read


def test_one_that_must_go_in_any_case_goes_first_and_counts_as_room() -> None:
    parts = Parts(num_pages=10)
    early, must, in_use = parts.idle(2), parts.idle(3), parts.thing(4)
    assert not parts.evictor.make_room(7, must)
    assert parts.gone == []
    assert parts.evictor.make_room(1, must)
    assert parts.gone == [must]
    again = parts.idle(3)
    assert parts.evictor.make_room(6, again)
    assert parts.gone == [must, again, early]
    assert in_use not in parts.gone
    parts.evictor.check()


def test_no_more_goes_than_is_lacking_where_others_went_with_the_first() -> None:
    parts = Parts(num_pages=10)
    blocks = [parts.thing(1, kind="prefix") for _ in range(3)]
    adapter = parts.idle(2, dependents=blocks)
    parts.now_s = 1.0
    others = [parts.idle(2), parts.idle(3)]
    assert parts.evictor.make_room(4)
    assert parts.gone == [*blocks, adapter]
    parts.evictor.check()
    assert parts.evictor.make_room(10)
    assert parts.gone == [*blocks, adapter, *others]
