"""Cached KV pages of token sequences, found by the tokens that they were computed from.

A block is cached once it is full and the step that wrote it is complete. From then on it is never written. It belongs
to the cache; requests hold references. A request that holds a block holds all blocks before it. Blocks without
references are offered to the evictor.

Blocks form groups, one per adapter and one for the base model. Keys and values of an evicted adapter are useless, so a
group is evicted with its adapter. Knows neither tenants nor adapters: a chain's seed decides what is shared.
"""

from __future__ import annotations

import hashlib
import struct
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from manylora.errors import PageAccountingError
from manylora.memory.eviction import Evictable, Evictor, UseCount
from manylora.memory.pool import PageKind, PagePool


def chain_seed(*fields: str) -> bytes:
    """Name of the empty sequence, with which a chain starts: SHA-256 over the fields, each preceded by its length.

    Two sequences share a block only if all their fields are equal. So the fields must name everything that changes keys
    and values, or that decides who may see them.
    """
    digest = hashlib.sha256()
    for text in fields:
        content = text.encode()
        digest.update(struct.pack("<Q", len(content)))
        digest.update(content)
    return digest.digest()


class TokenChain:
    """Names of the full blocks of one sequence, made as the sequence grows.

    Args:
        seed: From `chain_seed`.
        block_tokens: Tokens of a block.
    """

    def __init__(self, seed: bytes, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._last = seed
        self.digests: list[bytes] = []
        """Name of each full block: SHA-256 over the name before it, the number of tokens, the tokens."""
        self.blocks: list[tuple[int, ...]] = []
        """Tokens of each full block."""

    @property
    def num_tokens(self) -> int:
        """Tokens in full blocks so far; the next `extend` starts here."""
        return len(self.blocks) * self._block_tokens

    def copy(self) -> TokenChain:
        """Copy the chain, so that the copy can be extended by other tokens."""
        chain = TokenChain(self._last, self._block_tokens)
        chain.digests = list(self.digests)
        chain.blocks = list(self.blocks)
        return chain

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the tokens that follow `num_tokens`. Tokens that do not fill a block are left for the next call."""
        for start in range(0, len(token_ids) - self._block_tokens + 1, self._block_tokens):
            block = tuple(token_ids[start : start + self._block_tokens])
            content = struct.pack("<Q", len(block)) + array("q", block).tobytes()
            self._last = hashlib.sha256(self._last + content).digest()
            self.digests.append(self._last)
            self.blocks.append(block)


@dataclass(eq=False, slots=True, kw_only=True)
class PrefixBlock(Evictable):
    """One cached block: a page per layer group. Its depth counts the blocks before it. Only the cache changes it."""

    kind: PageKind = "prefix"
    digest: bytes
    tokens: tuple[int, ...]
    parent: PrefixBlock | None
    group: str | None
    children: dict[PrefixBlock, None] = field(default_factory=dict)
    """Cached blocks that follow it, in the order in which they came. A fixed order makes runs repeatable."""
    refs: int = 0
    """Requests that hold it."""


class PrefixCache:
    """Cached blocks by name. Not thread-safe: it belongs to the engine's thread.

    Args:
        pool: Pool whose pages of kind `prefix` the cache holds.
        evictor: Evicts blocks without references.
        block_s: Seconds to compute one block again.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        pool: PagePool,
        evictor: Evictor,
        block_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._evictor = evictor
        self._clock = clock
        self._block_s = block_s
        self._blocks: dict[bytes, PrefixBlock] = {}
        self._groups: dict[str | None, dict[PrefixBlock, None]] = {}
        self.on_group_change: Callable[[str], None] | None = None
        """Called with an adapter after an eviction has changed its group, to renew its score in the evictor."""
        self.num_queries = 0
        """Tokens looked up for requests that were then admitted. The caller that admits them counts."""
        self.num_hits = 0
        """Tokens among `num_queries` that were found."""

    def __len__(self) -> int:
        return len(self._blocks)

    def find(
        self, chain: TokenChain, max_blocks: int, known: Sequence[PrefixBlock] = ()
    ) -> list[PrefixBlock]:
        """Find the longest cached beginning of a chain, at most `max_blocks` blocks. Takes no reference.

        A block counts only if its tokens are equal, not just its name.

        Args:
            chain: Names the blocks.
            max_blocks: Largest number of blocks to find.
            known: Result of an earlier call for this chain; it is not compared again.
        """
        found = list(known[:max_blocks])
        while found and self._blocks.get(found[-1].digest) is not found[-1]:
            found.pop()  # a cached block has all blocks before it
        for index in range(len(found), min(max_blocks, len(chain.digests))):
            block = self._blocks.get(chain.digests[index])
            parent = found[-1] if found else None
            if block is None or block.tokens != chain.blocks[index] or block.parent is not parent:
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[PrefixBlock]) -> None:
        """Take a reference to each of a chain's first blocks. It counts as a use."""
        now_s = self._clock()
        for block in blocks:
            block.refs += 1
            self._evictor.withdraw(block)
            # The scores of the blocks that follow did not decay since then, so this block is scored above them.
            block.uses.note(now_s, at_least=block.uses.value if block.children else 0.0)

    def release(self, blocks: Sequence[PrefixBlock], last_step: int) -> None:
        """Give references back; blocks without references can be evicted.

        Args:
            blocks: Blocks that the caller holds.
            last_step: The last step in which the caller read them.

        Raises:
            PageAccountingError: A block is not held.
        """
        after: UseCount | None = None
        for block in reversed(blocks):
            if block.refs <= 0:
                raise PageAccountingError("a cached block was released more often than held")
            block.refs -= 1
            block.last_step = max(block.last_step, last_step)
            if after is not None:
                block.uses.lift(after)
            after = block.uses
            if block.refs == 0:
                self._evictor.offer(block)

    def publish(
        self,
        chain: TokenChain,
        index: int,
        pages: Sequence[int],
        parent: PrefixBlock | None,
        group: str | None,
    ) -> PrefixBlock | None:
        """Cache a full block, so that others can find it. The caller holds the result, which counts as a use.

        Args:
            chain: Names the block.
            index: Place of the block in the chain.
            pages: Its pages, of kind kv, one per layer group; no step will write them again.
            parent: The block before it, held by the caller; None for the first.
            group: The adapter; None is the base model.

        Returns:
            The cached block. If its pages are not those given, the same content was cached before, and the caller keeps
            the pages. None if another content has that name: nothing was cached.
        """
        digest = chain.digests[index]
        tokens = chain.blocks[index]
        block = self._blocks.get(digest)
        if block is None:
            depth = 0 if parent is None else parent.depth + 1
            block = PrefixBlock(
                owner=self,
                digest=digest,
                tokens=tokens,
                pages=list(pages),
                parent=parent,
                group=group,
                depth=depth,
            )
            self._pool.change_kind(pages, "prefix")
            self._blocks[digest] = block
            self._groups.setdefault(group, {})[block] = None
            if parent is not None:
                parent.children[block] = None
        elif block.tokens != tokens or block.parent is not parent:
            return None
        self.hold([block])
        return block

    def group_reload_cost(self, group: str) -> tuple[float, int]:
        """Seconds to compute a group again, and its pages."""
        blocks = self._groups.get(group, {})
        num_pages = next(iter(blocks)).num_pages if blocks else 0
        return self._block_s * len(blocks), num_pages * len(blocks)

    def evict_group(self, group: str) -> None:
        """Evict all blocks of an adapter that leaves the device.

        Raises:
            PageAccountingError: A request holds one of them; nothing was evicted.
        """
        blocks = self._groups.get(group, {})
        if any(block.refs for block in blocks):
            raise PageAccountingError(
                "an adapter leaves the device while requests hold its cached blocks"
            )
        for block in sorted(blocks, key=lambda block: -block.depth):
            self._evictor.take(block)

    def evict_unused(self) -> None:
        """Evict all blocks without references."""
        for block in sorted(self._blocks.values(), key=lambda block: -block.depth):
            if not block.refs:
                self._evictor.take(block)

    def reload_cost(self, block: PrefixBlock) -> tuple[float, int]:
        """Seconds to compute a block again, and its pages."""
        return self._block_s, block.num_pages

    def evict(self, block: PrefixBlock) -> None:
        """Free the pages of a block and of all blocks that follow it. The evictor calls this.

        Raises:
            PageAccountingError: A request holds one of them.
        """
        if block.refs:
            raise PageAccountingError("a cached block was evicted while held")
        if block.children:
            for later in reversed(_blocks_after(block)):
                self._evictor.take(later)
        del self._blocks[block.digest]
        if block.parent is not None:
            block.parent.children.pop(block, None)
        members = self._groups[block.group]
        members.pop(block, None)
        if not members:
            del self._groups[block.group]
        self._pool.free(block.pages, block.last_step)
        if self.on_group_change is not None and block.group is not None:
            self.on_group_change(block.group)

    def groups(self) -> dict[str | None, int]:
        """Cached pages by group."""
        return {
            group: sum(block.num_pages for block in blocks)
            for group, blocks in self._groups.items()
        }

    def check(self, holders: Iterable[Sequence[PrefixBlock]]) -> None:
        """Verify that references are those of the holders, and pages those of the pool.

        Args:
            holders: The blocks that each request holds.

        Raises:
            PageAccountingError: They disagree.
        """
        refs: Counter[PrefixBlock] = Counter()
        for blocks in holders:
            if [block.parent for block in blocks] != [None, *blocks][: len(blocks)]:
                raise PageAccountingError("a request holds a cached block without those before it")
            refs.update(blocks)
        cached = set(self._blocks.values())
        if sum(len(blocks) for blocks in self._groups.values()) != len(cached):
            raise PageAccountingError("a group has a block that is not cached")
        if not refs.keys() <= cached:
            raise PageAccountingError("a request holds a block that is not cached")
        for block in cached:
            self._check_block(block, refs[block])
        pages = [page for block in cached for page in block.pages]
        if len(set(pages)) != len(pages) or len(pages) != self._pool.counts()["prefix"]:
            raise PageAccountingError(
                f"cached blocks have {len(pages)} pages, the pool says {self._pool.counts()}"
            )

    def _check_block(self, block: PrefixBlock, num_holders: int) -> None:
        if block.refs != num_holders:
            raise PageAccountingError(
                f"a cached block has {block.refs} references and {num_holders} holders"
            )
        if block.parent is not None and (
            self._blocks.get(block.parent.digest) is not block.parent
            or block not in block.parent.children
        ):
            raise PageAccountingError("a cached block has lost the one before it")
        if any(
            child.parent is not block or self._blocks.get(child.digest) is not child
            for child in block.children
        ):
            raise PageAccountingError("a cached block is followed by one that is not cached")
        if block not in self._groups.get(block.group, ()):
            raise PageAccountingError("a cached block is not in its group")
        if (block.refs == 0) != (block in self._evictor):
            raise PageAccountingError(
                f"a cached block with {block.refs} holders is offered, or one with none is not"
            )


def _blocks_after(block: PrefixBlock) -> list[PrefixBlock]:
    """All blocks that follow a block, each after its parent."""
    blocks = list(block.children)
    for later in blocks:
        blocks += later.children
    return blocks
