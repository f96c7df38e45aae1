from __future__ import annotations

import hashlib
import itertools
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import PageAccountingError
from weft.memory.eviction import Evictor, eviction_policy
from weft.memory.pool import PagePool
from weft.memory.prefix_cache import PrefixBlock, PrefixCache, TokenChain, chain_seed

BLOCK_TOKENS = 2
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


class Parts:
    """A cache over a pool of 30 pages, unless told otherwise; blocks of two tokens."""

    def __init__(self, policy: Literal["lru", "gdsf"] = "lru", num_groups: int = 1, num_pages: int = 30) -> None:
        self.now_s = 0.0
        self.num_groups = num_groups
        self.pool = PagePool(num_pages + 1)
        self.evictor = Evictor(self.pool, eviction_policy(policy), clock=lambda: self.now_s)
        self.cache = PrefixCache(self.pool, self.evictor, block_s=0.5, clock=lambda: self.now_s)

    def chain(self, *tokens: int, seed: str = "seed") -> TokenChain:
        chain = TokenChain(chain_seed(seed), BLOCK_TOKENS)
        chain.extend(tokens)
        return chain

    def publish(self, chain: TokenChain, group: str | None = None, first: int = 0) -> list[PrefixBlock]:
        """Compute and publish a chain's blocks from the first on; held by the caller with those before."""
        held = self.cache.find(chain, first)
        self.cache.hold(held)
        for index in range(first, len(chain.blocks)):
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


def test_the_same_content_is_kept_once() -> None:
    parts = Parts(num_groups=2)
    chain = parts.chain(1, 2)
    first = parts.publish(chain)
    pages = parts.pool.allocate(2, "kv")
    assert pages is not None
    block = parts.cache.publish(chain, 0, pages, None, None)
    assert block is first[0]
    assert block.pages != pages
    assert block.refs == 2
    assert parts.pool.counts()["kv"] == 2, "the caller's pages are still the caller's"
    parts.cache.check([first, [block]])


def test_a_name_is_trusted_only_as_far_as_the_tokens_are_the_same() -> None:
    """Two contents with one name, which SHA-256 does not give us: forced here."""
    parts = Parts()
    held = parts.publish(parts.chain(1, 2, 3, 4))
    forged = parts.chain(7, 8, 3, 4)
    forged.digests[:] = [block.digest for block in held]
    assert parts.cache.find(forged, 2) == []
    pages = parts.pool.allocate(1, "kv")
    assert pages is not None
    assert parts.cache.publish(forged, 0, pages, None, None) is None
    assert parts.pool.counts()["kv"] == 1
    assert parts.cache.find(parts.chain(1, 2, 3, 4), 2) == held
    parts.cache.check([held])


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


def test_a_held_block_is_never_evicted() -> None:
    parts = Parts()
    held = parts.publish(parts.chain(1, 2, 3, 4))
    assert not parts.evictor.make_room(29)
    parts.cache.release(held, 0)
    parts.cache.hold(held[:1])
    assert not parts.evictor.make_room(30)
    assert parts.evictor.make_room(29)
    assert parts.cache.find(parts.chain(1, 2, 3, 4), 2) == held[:1]
    with pytest.raises(PageAccountingError, match="held"):
        parts.cache.remove(held[0])
    parts.cache.check([held[:1]])


@pytest.mark.parametrize("is_read_again", [False, True])
@pytest.mark.parametrize("policy", ["lru", "gdsf"])
def test_a_chain_goes_from_its_end(policy: Literal["lru", "gdsf"], is_read_again: bool) -> None:
    """Its blocks were published, and so used, one after the other; yet the first goes last, as others need it."""
    parts = Parts(policy)
    chain = parts.chain(*range(8))
    held: list[PrefixBlock] = []
    for index in range(4):
        parts.now_s += 10.0
        pages = parts.pool.allocate(1, "kv")
        assert pages is not None
        block = parts.cache.publish(chain, index, pages, held[-1] if held else None, None)
        assert block is not None
        held.append(block)
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
    parts = Parts("gdsf")
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


def test_pages_of_an_evicted_block_wait_for_the_step_that_reads_them() -> None:
    parts = Parts()
    held = parts.publish(parts.chain(1, 2, 3, 4))
    parts.cache.release(held, 7)
    assert not parts.evictor.make_room(30)
    parts.cache.evict_group("no such group")
    parts.evictor.take(held[0])
    assert parts.pool.num_quarantined == 2
    parts.pool.complete(7)
    assert parts.pool.num_free == 30


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


def test_lookups_are_counted() -> None:
    parts = Parts()
    parts.cache.note_lookup(10, 4)
    parts.cache.note_lookup(5, 0)
    assert (parts.cache.num_queries, parts.cache.num_hits) == (15, 4)


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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (("a",), ("a", "")),
        (("", "a"), ("a", "")),
        ((), ("",)),
        (("\0",), ("",)),
        (("a", "b"), ("b", "a")),
    ],
)
def test_fields_are_told_apart_by_their_lengths(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert chain_seed(*one) != chain_seed(*other)
    assert chain_seed(*one) == chain_seed(*one)


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_seeds_are_equal_only_for_equal_fields(one: list[str], other: list[str]) -> None:
    assert (chain_seed(*one) == chain_seed(*other)) == (one == other)


def test_a_name_is_the_hash_of_all_that_leads_to_it() -> None:
    """The encoding written out once more, by hand: the name before, the count as 8 bytes, each token as 8 bytes."""
    seed = chain_seed("tenant")
    chain = TokenChain(seed, 2)
    chain.extend([1, 2, 3, 258])
    first = hashlib.sha256(seed + bytes.fromhex("0200000000000000 0100000000000000 0200000000000000")).digest()
    second = hashlib.sha256(first + bytes.fromhex("0200000000000000 0300000000000000 0201000000000000")).digest()
    assert chain.digests == [first, second]
    assert chain.blocks == [(1, 2), (3, 258)]


@given(tokens, st.lists(st.integers(0, 40), max_size=4), st.integers(1, 5))
def test_a_chain_made_piece_by_piece_is_that_of_the_whole(token_ids: list[int], cuts: list[int], size: int) -> None:
    whole, pieces = TokenChain(b"seed", size), TokenChain(b"seed", size)
    whole.extend(token_ids)
    for cut in [*sorted(cuts), len(token_ids)]:
        pieces.extend(token_ids[pieces.num_tokens : max(cut, pieces.num_tokens)])
    assert pieces.digests == whole.digests
    assert pieces.blocks == whole.blocks == [tuple(token_ids[i : i + size]) for i in range(0, whole.num_tokens, size)]
    assert whole.num_tokens == len(token_ids) // size * size


@given(tokens, tokens)
def test_names_are_equal_only_as_far_as_all_tokens_before_are(one: list[int], other: list[int]) -> None:
    chains = TokenChain(b"seed", 3), TokenChain(b"seed", 3)
    for chain, token_ids in zip(chains, (one, other), strict=True):
        chain.extend(token_ids)
    for index, (left, right) in enumerate(zip(chains[0].digests, chains[1].digests, strict=False)):
        assert (left == right) == (one[: 3 * index + 3] == other[: 3 * index + 3])


def test_another_seed_gives_other_names() -> None:
    chains = TokenChain(chain_seed("a"), 2), TokenChain(chain_seed("b"), 2)
    for chain in chains:
        chain.extend([1, 2, 3, 4])
    assert not set(chains[0].digests) & set(chains[1].digests)
