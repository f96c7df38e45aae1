"""Any order of lookups, growth, publishing, releases and evictions keeps the cache whole and its accounts right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.memory.eviction import Evictor, eviction_policy
from weft.memory.pool import PagePool
from weft.memory.prefix_cache import PrefixBlock, PrefixCache, TokenChain, chain_seed

BLOCK_TOKENS = 2
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
    @initialize(num_groups=st.integers(1, 2), policy=st.sampled_from(["lru", "gdsf"]))
    def start(self, num_groups: int, policy: Literal["lru", "gdsf"]) -> None:
        self.num_groups = num_groups
        self.now_s = 0.0
        self.step = 0
        self.pool = PagePool(NUM_PAGES + 1, on_release=self.forget)
        self.evictor = Evictor(self.pool, eviction_policy(policy), clock=lambda: self.now_s)
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
        idle = counts["prefix"] - len({page for reader in self.readers for b in reader.held for page in b.pages})
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
TestPrefixCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
