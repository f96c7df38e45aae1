"""The KV pages of one request: cached blocks first, its own after them, and what of it lies in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.memory.block_table import BlockTable
from weft.memory.prefix_cache import PrefixBlock
from weft.memory.token_chain import TokenChain


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedBlocks:
    """The KV cache of a preempted request, from some block on, in host memory."""

    first_block: int
    """Those before it were shared when it was preempted, and were left to the prefix cache."""
    num_tokens: int
    """Tokens of the request that are in these blocks and those before them."""
    host_pages: list[int]
    """One per layer group of the first block, then of the next, and so on."""
    step: int
    """The step that copies them out."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestPages:
    """What one request has. While it waits: no device pages, and maybe host pages."""

    table: BlockTable
    held: list[PrefixBlock] = field(default_factory=list)
    """The first blocks of the table: of the prefix cache, and never written. All others are the request's own."""
    chain: TokenChain | None = None
    """Names of its full blocks, made as they are needed."""
    found: list[PrefixBlock] = field(default_factory=list)
    """What the last lookup found; nothing keeps these."""
    swapped: SwappedBlocks | None = None
    is_publishing: bool = True
    """Whether its full blocks go to the prefix cache."""

    def own_pages(self) -> list[int]:
        """Its pages but for the cached ones, in no order that matters."""
        return [page for pages in self.table.pages for page in pages[len(self.held) :]]
