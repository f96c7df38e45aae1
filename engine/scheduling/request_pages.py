"""KV pages of one request, and how far its keys and values are computed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from manylora.memory.block_table import BlockTable
from manylora.memory.geometry import PageGeometry
from manylora.memory.prefix_cache import PrefixBlock, TokenChain


class SwappedBlocks(NamedTuple):
    """KV cache of a preempted request, from some block on, in host memory."""

    first_block: int
    """Blocks before it were shared when the request was preempted, and were left to the prefix cache."""
    num_tokens: int
    """Tokens of the request that are in these blocks and those before them."""
    host_pages: list[int]
    """One per layer group of the first block, then of the next, and so on."""
    step: int
    """The step that copies them out."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestPages:
    """Pages of one request. While it waits, it has no device pages, and maybe host pages."""

    geometry: PageGeometry
    chain: TokenChain | None = None
    """Names of its full blocks, made as they are needed."""
    table: BlockTable = field(init=False)
    held: list[PrefixBlock] = field(default_factory=list, init=False)
    """First blocks of the table: of the prefix cache, and never written. All others are the request's own."""
    found: list[PrefixBlock] = field(default_factory=list, init=False)
    """Blocks that the last lookup found; nothing keeps these."""
    swapped: SwappedBlocks | None = field(default=None, init=False)
    is_publishing: bool = field(default=True, init=False)
    """True if its full blocks go to the prefix cache."""
    num_computed: int = field(default=0, init=False)
    """Tokens whose keys and values are in its pages once the steps in flight are complete; while it waits, in its host
    pages."""
    last_step: int = field(default=0, init=False)
    """Last step that reads or writes its pages."""
    num_preemptions: int = field(default=0, init=False)
    progress_mark: int = field(default=0, init=False)
    """Number of computed tokens from which on it may be preempted again."""

    def __post_init__(self) -> None:
        self.table = BlockTable(self.geometry)

    @property
    def is_protected(self) -> bool:
        """True if the request was preempted and has not made a page of progress since."""
        return self.num_computed < self.progress_mark

    def own_pages(self) -> list[int]:
        """Pages that are not cached ones, in no order that matters."""
        return self.table.by_block(len(self.held))

    def give_up(self, swapped: SwappedBlocks | None) -> None:
        """Go on without device pages after a preemption; the KV cache is computed again unless it was swapped out."""
        self.table = BlockTable(self.geometry)
        self.held = []
        self.found = []
        self.swapped = swapped
        self.num_preemptions += 1
        self.progress_mark = self.num_computed + self.geometry.page_tokens

    def fork(self) -> RequestPages:
        """Pages of a request that goes on from this one: none yet, with the names of its blocks."""
        return replace(self, chain=None if self.chain is None else self.chain.copy())
