"""KV pages of one request, and how far it is computed: the chunks whose results are not known, and the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from manylora.engine.scheduling.plan import Chunk, StepPlan
from manylora.memory.geometry import PageGeometry
from manylora.memory.prefix_cache import PrefixBlock, TokenChain

FIRST_BLOCKS = 8
"""Blocks that a new table has room for; a full table doubles its room."""


class BlockTable:
    """Pages by layer group and block; it only grows.

    Args:
        geometry: Sizes of the pages.
    """

    def __init__(self, geometry: PageGeometry) -> None:
        self._geometry = geometry
        self._room = np.zeros((geometry.num_groups, FIRST_BLOCKS), dtype=np.int32)
        self.pages: list[npt.NDArray[np.int32]] = [row[:0] for row in self._room]
        """Page numbers: a list of num_groups arrays [num_blocks], int32. The list stays, its arrays are replaced."""

    @property
    def num_blocks(self) -> int:
        """KV blocks in the table."""
        return len(self.pages[0])

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks to append until `num_tokens` tokens in all fit; 0 if they fit already."""
        return max(0, self._geometry.blocks(num_tokens) - self.num_blocks)

    def append(self, pages: Sequence[int]) -> None:
        """Add whole blocks.

        Args:
            pages: Pages of each new block in turn, one per layer group.

        Raises:
            ValueError: If the pages are not whole blocks.
        """
        num_groups = self._geometry.num_groups
        if len(pages) % num_groups:
            raise ValueError(f"a block is {num_groups} pages, got {len(pages)} pages")
        first = self.num_blocks
        end = self.num_blocks + len(pages) // num_groups
        if end > self._room.shape[1]:
            room = np.zeros((num_groups, max(end, 2 * self._room.shape[1])), dtype=np.int32)
            room[:, :first] = self._room[:, :first]
            self._room = room
        self._room[:, first:end] = np.asarray(pages, dtype=np.int32).reshape(-1, num_groups).T
        self.pages[:] = [row[:end] for row in self._room]

    def by_block(self, first: int = 0, end: int | None = None) -> list[int]:
        """Pages of each block from `first` up to `end` in turn, one per layer group."""
        pages: list[int] = (
            self._room[:, first : self.num_blocks if end is None else end].T.reshape(-1).tolist()
        )
        return pages


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


@dataclass(slots=True, kw_only=True, eq=False)
class StepCursor:
    """Follows the chunks of one request from plan to result."""

    pages: RequestPages
    num_prompt: int
    """Tokens in the prompt."""
    max_tokens: int
    """Most tokens to generate."""
    in_flight: list[Chunk] = field(default_factory=list)
    """Chunks whose results are not known, oldest first: of one step, and of two until the first is committed."""
    num_coming: int = 0
    """Tokens that these sample and that are to be computed next. The one that ends the request by its length is not."""
    index: int = 0
    """Index of its last chunk in the plan of its step."""
    next_chunk: Chunk | None = None
    """Its next chunk, if that is one token and its pages have room for it; None if the next plan must find out."""

    @property
    def num_complete(self) -> int:
        """Tokens whose keys and values were computed by steps that are complete, from the first one on."""
        return self.in_flight[0].start if self.in_flight else self.pages.num_computed

    def begin(self, chunk: Chunk, plan: StepPlan) -> None:
        """Add a chunk to a plan. From now on its tokens count as computed, and the token that it samples is coming."""
        num_coming = self.num_coming
        chunk.token_source = self.index if num_coming else None
        self.index = len(plan.chunks)
        self.next_chunk = None
        plan.chunks.append(chunk)
        self.in_flight.append(chunk)
        pages = self.pages
        pages.last_step = plan.step
        pages.num_computed = chunk.start + len(chunk.token_ids)
        sample = chunk.sample
        # Prompt and `max_tokens` are never longer than the model takes, so its length need not be looked at.
        if sample is not None and sample.output_index + 1 < self.max_tokens:
            self.num_coming = num_coming + 1

    def end(self, chunk: Chunk, token_id: int | None) -> None:
        """Take out the oldest chunk in flight, and turn it into the next chunk if that is one token in the same page.

        To make hundreds of chunks in each step takes longer than all other decisions of a plan, and has the garbage
        collector look at each.

        Args:
            chunk: The oldest chunk in flight; its results are known.
            token_id: The sampled token, if the request keeps its pages and goes on with this token.
        """
        del self.in_flight[0]
        self.next_chunk = None
        sample = chunk.sample
        if sample is None:
            return
        num_coming = self.num_coming
        if num_coming:
            num_coming -= 1
            self.num_coming = num_coming
        pages = self.pages
        num_computed = pages.num_computed
        if (
            token_id is not None
            and num_computed % pages.geometry.page_tokens
            and (num_coming or not self.in_flight)
            and chunk.start >= self.num_prompt
            and len(chunk.token_ids) == 1
        ):
            chunk.token_ids[0] = 0 if num_coming else token_id
            chunk.start = num_computed
            sample.output_index += 1 + num_coming
            self.next_chunk = chunk
