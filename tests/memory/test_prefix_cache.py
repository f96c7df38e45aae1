from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manylora.errors import PageAccountingError
from manylora.memory.eviction import Evictor
from manylora.memory.pool import PagePool
from manylora.memory.prefix_cache import PrefixBlock, PrefixCache, TokenChain, chain_seed

BLOCK_TOKENS = 2
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


class Parts:
    """A cache over a pool of 30 pages, unless told otherwise; blocks of two tokens."""

    def __init__(self, num_groups: int = 1, num_pages: int = 30) -> None:
        self.now_s = 0.0
        self.num_groups = num_groups
        self.pool = PagePool(num_pages + 1)
        self.evictor = Evictor(self.pool, clock=lambda: self.now_s)
        self.cache = PrefixCache(self.pool, self.evictor, block_s=0.5, clock=lambda: self.now_s)

    def chain(self, *tokens: int, seed: str = "seed") -> TokenChain:
        chain = TokenChain(chain_seed(seed), BLOCK_TOKENS)
        chain.extend(tokens)
        return chain

    def publish(
        self, chain: TokenChain, group: str | None = None, block_s: float = 0.0
    ) -> list[PrefixBlock]:
        """Compute and publish a chain's blocks, each in `block_s` seconds; held by the caller."""
        held: list[PrefixBlock] = []
        for index in range(len(chain.blocks)):
            self.now_s += block_s
            pages = self.pool.allocate(self.num_groups, "kv")
            assert pages is not None
            block = self.cache.publish(chain, index, pages, held[-1] if held else None, group)
            assert block is not None
            if block.pages != pages:
                self.pool.free(pages, 0)
            held.append(block)
        return held


def test_what_was_published_is_found_and_shared() -> None:
    parts = Parts()
    chain = parts.chain(1, 2, 3, 4, 5)
    held = parts.publish(chain)
    assert parts.pool.counts()["prefix"] == 2
    found = parts.cache.find(parts.chain(1, 2, 3, 4, 9, 9), 3)
    assert found == held
    assert parts.cache.find(parts.chain(1, 2, 3, 4), 1) == held[:1]
    assert parts.cache.find(parts.chain(1, 2, 3, 4), 0) == []
    assert parts.cache.find(parts.chain(3, 4), 1) == []
    parts.cache.hold(found)
    parts.cache.check([held, found])


def test_a_name_behind_another_beginning_is_not_trusted() -> None:
    parts = Parts()
    held = parts.publish(parts.chain(1, 2, 3, 4))
    other = parts.publish(parts.chain(7, 8))
    forged = parts.chain(7, 8, 3, 4)
    forged.digests[1] = held[1].digest
    assert parts.cache.find(forged, 2) == other
    pages = parts.pool.allocate(1, "kv")
    assert pages is not None
    assert parts.cache.publish(forged, 1, pages, other[0], None) is None


def test_a_held_block_cannot_be_removed() -> None:
    parts = Parts()
    held = parts.publish(parts.chain(1, 2))
    with pytest.raises(PageAccountingError, match="held"):
        parts.cache.evict(held[0])
    parts.cache.check([held])


@pytest.mark.parametrize("is_read_again", [False, True])
def test_a_chain_goes_from_its_end(is_read_again: bool) -> None:
    """Its blocks were published, and so used, one after the other; yet the first goes last, as others need it."""
    parts = Parts()
    chain = parts.chain(*range(8))
    held = parts.publish(chain, block_s=10.0)
    parts.cache.release(held, 0)
    if is_read_again:
        parts.now_s += 50.0
        again = parts.cache.find(chain, 4)
        parts.cache.hold(again)
        parts.cache.release(again, 0)
    for left in (3, 2, 1, 0):
        assert parts.evictor.make_room(30 - left)
        assert parts.cache.find(chain, 4) == held[:left]


def test_a_clock_that_moves_within_a_call_changes_nothing() -> None:
    parts = Parts()
    seconds = itertools.count(1.0)
    parts.cache = PrefixCache(parts.pool, parts.evictor, block_s=0.5, clock=lambda: next(seconds))
    held = parts.publish(parts.chain(*range(6)))
    parts.cache.release(held, 0)
    found = parts.cache.find(parts.chain(*range(6)), 3)
    parts.cache.hold(found)
    assert len({block.uses.last_s for block in found}) == 1


def test_a_beginning_that_is_used_alone_again_goes_after_all_that_goes_on_from_it() -> None:
    """Its own count has halved many times by then, those of the others were made before."""
    parts = Parts()
    chain = parts.chain(*range(8))
    held = parts.publish(chain)
    parts.cache.hold(held)
    parts.cache.release(held, 0)
    parts.cache.release(held, 0)
    parts.now_s += 3600.0
    parts.cache.hold(held[:1])
    parts.cache.release(held[:1], 0)
    for left in (3, 2, 1, 0):
        assert parts.evictor.make_room(30 - left)
        assert parts.cache.find(chain, 4) == held[:left]


def test_a_chain_of_any_length_goes_with_its_beginning() -> None:
    num_blocks = 2000
    parts = Parts(num_pages=num_blocks)
    chain = parts.chain(*range(2 * num_blocks))
    held = parts.publish(chain)
    parts.cache.release(held, 0)
    parts.evictor.take(held[0])
    assert parts.pool.num_free == num_blocks
    assert parts.evictor.evictions == {"prefix": num_blocks}
    parts.cache.check([])


def test_a_group_goes_with_its_adapter_and_leaves_others() -> None:
    parts = Parts(num_groups=2)
    changed: list[str] = []
    parts.cache.on_group_change = changed.append
    pirate = parts.publish(parts.chain(1, 2, 3, 4, seed="pirate"), "pirate")
    base = parts.publish(parts.chain(1, 2))
    assert parts.cache.groups() == {"pirate": 4, None: 2}
    assert parts.cache.group_reload_cost("pirate") == (1.0, 4)
    assert parts.cache.group_reload_cost("nobody") == (0.0, 0)
    with pytest.raises(PageAccountingError, match="hold"):
        parts.cache.evict_group("pirate")
    parts.cache.release(pirate[1:], 0)
    with pytest.raises(PageAccountingError, match="hold"):
        parts.cache.evict_group("pirate")
    assert parts.cache.groups() == {"pirate": 4, None: 2}
    parts.cache.release(pirate[:1], 0)
    parts.cache.evict_group("pirate")
    assert parts.cache.groups() == {None: 2}
    assert changed == ["pirate", "pirate"]
    parts.cache.check([base])


def test_what_is_not_held_cannot_be_released() -> None:
    parts = Parts()
    held = parts.publish(parts.chain(1, 2))
    parts.cache.release(held, 0)
    with pytest.raises(PageAccountingError, match="more often"):
        parts.cache.release(held, 0)
    parts.cache.check([])


def test_check_finds_what_is_wrong() -> None:
    parts = Parts()
    held = parts.publish(parts.chain(1, 2, 3, 4))
    parts.cache.check([held])
    for holders, said in (
        ([], "references"),
        ([held, held], "references"),
        ([held[1:]], "without those before"),
        ([held[:1]], "references"),
    ):
        with pytest.raises(PageAccountingError, match=said):
            parts.cache.check(holders)
    held[0].children.clear()
    with pytest.raises(PageAccountingError, match="lost the one before"):
        parts.cache.check([held])
    held[0].children[held[1]] = None
    parts.pool.change_kind(held[0].pages, "kv")
    with pytest.raises(PageAccountingError, match="the pool says"):
        parts.cache.check([held])


def test_check_finds_an_idle_block_that_nobody_could_take() -> None:
    parts = Parts()
    held = parts.publish(parts.chain(1, 2))
    parts.cache.release(held, 0)
    parts.evictor.withdraw(held[0])
    with pytest.raises(PageAccountingError, match="offered"):
        parts.cache.check([])
    parts.cache.hold(held)
    parts.evictor.offer(held[0])
    with pytest.raises(PageAccountingError, match="offered"):
        parts.cache.check([held])


def test_fields_are_told_apart_by_their_lengths() -> None:
    fields = [
        ("ab", "c"),
        ("a", "bc"),
        ("a",),
        ("a", ""),
        ("", "a"),
        (),
        ("",),
        ("\0",),
        ("a", "b"),
        ("b", "a"),
    ]
    assert len({chain_seed(*each) for each in fields}) == len(fields)


def test_a_name_is_the_hash_of_all_that_leads_to_it() -> None:
    """The encoding written out once more, by hand: the name before, the count as 8 bytes, each token as 8 bytes."""
    seed = chain_seed("tenant")
    chain = TokenChain(seed, 2)
    chain.extend([1, 2, 3, 258])
    first = hashlib.sha256(
        seed + bytes.fromhex("0200000000000000 0100000000000000 0200000000000000")
    ).digest()
    second = hashlib.sha256(
        first + bytes.fromhex("0200000000000000 0300000000000000 0201000000000000")
    ).digest()
    assert chain.digests == [first, second]
    assert chain.blocks == [(1, 2), (3, 258)]


@given(tokens, st.lists(st.integers(0, 40), max_size=4), st.integers(1, 5))
def test_a_chain_made_piece_by_piece_is_that_of_the_whole(
    token_ids: list[int], cuts: list[int], size: int
) -> None:
    whole, pieces = TokenChain(b"seed", size), TokenChain(b"seed", size)
    whole.extend(token_ids)
    for cut in [*sorted(cuts), len(token_ids)]:
        pieces.extend(token_ids[pieces.num_tokens : max(cut, pieces.num_tokens)])
    assert pieces.digests == whole.digests
    assert (
        pieces.blocks
        == whole.blocks
        == [tuple(token_ids[i : i + size]) for i in range(0, whole.num_tokens, size)]
    )
    assert whole.num_tokens == len(token_ids) // size * size


@given(tokens, tokens)
def test_names_are_equal_only_as_far_as_all_tokens_before_are(
    one: list[int], other: list[int]
) -> None:
    chains = TokenChain(b"seed", 3), TokenChain(b"seed", 3)
    for chain, token_ids in zip(chains, (one, other), strict=True):
        chain.extend(token_ids)
    for index, (left, right) in enumerate(zip(chains[0].digests, chains[1].digests, strict=False)):
        assert (left == right) == (one[: 3 * index + 3] == other[: 3 * index + 3])


NUM_PAGES = 24
SEEDS = [(tenant, group) for tenant in ("ann", "bob") for group in (None, "pirate", "french")]
"""Whose, and with which adapter: nobody else's blocks may ever be found."""


@dataclass(eq=False)
class Reader:
    """A request: a beginning held in the cache, then pages of its own."""

    seed: tuple[str, str | None]
    tokens: list[int]
    chain: TokenChain
    held: list[PrefixBlock]
    own: list[list[int]] = field(default_factory=list)
    is_publishing: bool = True

    @property
    def pages(self) -> list[list[int]]:
        return [block.pages for block in self.held] + self.own


class PrefixCacheMachine(RuleBasedStateMachine):
    @initialize(num_groups=st.integers(1, 2))
    def start(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self.now_s = 0.0
        self.step = 0
        self.pool = PagePool(NUM_PAGES + 1, on_release=self.forget)
        self.evictor = Evictor(self.pool, clock=lambda: self.now_s)
        self.cache = PrefixCache(self.pool, self.evictor, block_s=0.25, clock=lambda: self.now_s)
        self.cache.on_group_change = lambda group: self.changed.append(group)
        self.changed: list[str] = []
        self.readers: list[Reader] = []
        self.content: dict[int, tuple[object, ...]] = {}
        """What was computed into each page: for whom, after which tokens, in which layer group."""

    def forget(self, pages: object) -> None:
        for page in pages:  # type: ignore[attr-defined]
            self.content.pop(page, None)

    @rule(seed=st.sampled_from(SEEDS), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, seed: tuple[str, str | None], tokens: list[int]) -> None:
        chain = TokenChain(chain_seed(seed[0], seed[1] or ""), BLOCK_TOKENS)
        chain.extend(tokens)
        most = (len(tokens) - 1) // BLOCK_TOKENS
        found = self.cache.find(chain, most)
        assert len(found) <= most
        self.cache.hold(found)
        for block in found:
            assert block.group == seed[1]
        self.readers.append(Reader(seed, tokens, chain, found))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), token=st.integers(0, 1))
    def compute(self, data: st.DataObject, token: int) -> None:
        """Compute the next block, with room made for it, and perhaps append a token."""
        reader = data.draw(st.sampled_from(self.readers))
        index = len(reader.held) + len(reader.own)
        if (index + 1) * BLOCK_TOKENS > len(reader.tokens):
            reader.tokens.append(token)
            reader.chain.extend(reader.tokens[reader.chain.num_tokens :])
            return
        available = self.evictor.num_available
        evictions = dict(self.evictor.evictions)
        has_room = self.evictor.make_room(self.num_groups)
        assert has_room or self.evictor.evictions == evictions
        assert not has_room or available >= self.num_groups
        pages = self.pool.allocate(self.num_groups, "kv")
        assert (pages is not None) == has_room
        if pages is not None:
            before = tuple(reader.tokens[: (index + 1) * BLOCK_TOKENS])
            for group, page in enumerate(pages):
                self.content[page] = (reader.seed, before, group)
            reader.own.append(pages)

    @precondition(lambda self: any(reader.own for reader in self.readers))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from([reader for reader in self.readers if reader.own]))
        if not reader.is_publishing:
            return
        index, pages = len(reader.held), reader.own.pop(0)
        parent = reader.held[-1] if reader.held else None
        block = self.cache.publish(reader.chain, index, pages, parent, reader.seed[1])
        assert block is not None
        if block.pages != pages:
            self.pool.free(pages, self.step)
        reader.held.append(block)

    @precondition(lambda self: any(reader.own for reader in self.readers))
    @rule(data=st.data())
    def a_forged_name_gives_nothing(self, data: st.DataObject) -> None:
        """A digest of other tokens: neither found nor published."""
        reader = data.draw(st.sampled_from([reader for reader in self.readers if reader.own]))
        victims = [block for other in self.readers for block in other.held]
        if not victims:
            return
        victim = data.draw(st.sampled_from(victims))
        forged = TokenChain(chain_seed(*SEEDS[0][:1]), BLOCK_TOKENS)
        forged.extend([7] * BLOCK_TOKENS)
        forged.digests[0] = victim.digest
        assert self.cache.find(forged, 1) == []
        assert self.cache.publish(forged, 0, reader.own[0], None, reader.seed[1]) is None

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), in_flight=st.integers(0, 2))
    def end(self, data: st.DataObject, in_flight: int) -> None:
        reader = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        last_step = self.step + in_flight
        self.cache.release(reader.held, last_step)
        self.pool.free([page for pages in reader.own for page in pages], last_step)

    @rule(steps=st.integers(0, 2), seconds=st.sampled_from([0.0, 1.0, 500.0]))
    def go_on(self, steps: int, seconds: float) -> None:
        self.step += steps
        self.now_s += seconds
        self.pool.complete(self.step)

    @rule(num_free=st.integers(0, NUM_PAGES))
    def make_room(self, num_free: int) -> None:
        before = len(self.cache)
        if self.evictor.make_room(num_free):
            assert self.pool.num_free >= num_free
        else:
            assert len(self.cache) == before

    @rule(group=st.sampled_from(["pirate", "french"]))
    def an_adapter_leaves(self, group: str) -> None:
        if any(reader.seed[1] == group and reader.held for reader in self.readers):
            return
        worth = self.cache.group_reload_cost(group)
        assert worth[1] == self.cache.groups().get(group, 0)
        assert worth[0] == worth[1] // self.num_groups * 0.25
        before = len(self.cache)
        self.changed.clear()
        self.cache.evict_group(group)
        assert group not in self.cache.groups()
        assert self.changed == [group] * (before - len(self.cache))

    @invariant()
    def cache_and_pool_are_whole(self) -> None:
        self.pool.check()
        self.evictor.check()
        self.cache.check([reader.held for reader in self.readers])
        counts = self.pool.counts()
        assert counts["kv"] == self.num_groups * sum(len(reader.own) for reader in self.readers)
        idle = counts["prefix"] - len(
            {page for reader in self.readers for b in reader.held for page in b.pages}
        )
        assert self.evictor.num_evictable == idle

    @invariant()
    def every_request_reads_what_was_computed_for_its_tenant_adapter_and_tokens(self) -> None:
        for reader in self.readers:
            for index, pages in enumerate(reader.pages):
                before = tuple(reader.tokens[: (index + 1) * BLOCK_TOKENS])
                for group, page in enumerate(pages):
                    assert self.content[page] == (reader.seed, before, group)

    def teardown(self) -> None:
        for reader in self.readers:
            self.cache.release(reader.held, self.step)
            self.pool.free([page for pages in reader.own for page in pages], self.step)
        self.pool.complete(self.step + 5)
        assert self.evictor.make_room(NUM_PAGES)
        assert (len(self.cache), self.evictor.num_evictable, self.cache.groups()) == (0, 0, {})
        self.cache.check([])
        self.evictor.check()


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
