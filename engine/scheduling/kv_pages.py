"""KV pages of all requests: how a request gets, shares and gives back pages. The scheduler decides who gets them.

A running request begins with cached blocks, which it only reads, and goes on in blocks of its own. As soon as one of
its own is full and the step that wrote it is complete, it is offered to the prefix cache and is never written again. A
request that waits has no device pages. One that was preempted may have its KV cache in host memory, from the first
block on that nobody shared; what stood before that is looked up again when it returns, and where it is gone, the
request is computed again from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, NamedTuple

from manylora.engine.request import GenerationRequest
from manylora.engine.scheduling.plan import PageCopy, PageMove, PlanBuilder
from manylora.engine.scheduling.request_pages import SwappedBlocks
from manylora.engine.scheduling.request_state import RequestState, kv_tokens
from manylora.errors import EngineError, NeverFitsError, PageAccountingError
from manylora.memory.arena import SwapSpace
from manylora.memory.eviction import Evictor, PageCosts
from manylora.memory.geometry import PageGeometry
from manylora.memory.pool import NO_OWNER, PagePool
from manylora.memory.prefix_cache import PrefixBlock, PrefixCache, TokenChain, chain_seed


def prefix_seed(request: GenerationRequest) -> bytes:
    """Seed of a request's chain of blocks: all that its blocks depend on besides tokens, and the tenant.

    The cache lives as long as its engine, so base, formats of numbers and rotary embedding are the same for all blocks.
    An adapter's digest is of its weights and of its config.
    """
    adapter = request.adapter
    return chain_seed(request.flow.tenant, "" if adapter is None else adapter.digest)


Preemption = Literal["swap", "recompute"]
PREEMPTIONS: tuple[Preemption, ...] = ("swap", "recompute")
MAX_NAMED_TOKENS = 32_768
"""Tokens whose blocks are named in one plan for requests that wait, some 20 ms; one request may have more."""


class PrefixHit(NamedTuple):
    """Part of a waiting request's KV cache that need not be computed."""

    blocks: Sequence[PrefixBlock]
    """Cached blocks that it shares."""
    num_tokens: int
    """Tokens whose keys and values are there when it starts."""
    swapped: SwappedBlocks | None = None
    """Host pages that go on where the cached blocks end."""
    leader: RequestState | None = None
    """Request that has the blocks after the cached ones; their pages are copied."""


@dataclass(eq=False)
class KvPages:
    """Pages by request."""

    geometry: PageGeometry
    pool: PagePool
    """Hands out the pages."""
    evictor: Evictor
    """Makes room in the pool."""
    _: KW_ONLY
    prefixes: PrefixCache
    """Shares full blocks."""
    swap: SwapSpace
    """Host memory of preempted requests."""
    costs: PageCosts
    """Decide between swapping and computing again."""
    is_sharing: bool = True
    """False publishes nothing and finds nothing."""
    _num_named: int = field(default=0, init=False)
    """Tokens named in this plan."""

    def begin_plan(self) -> None:
        """Note that a plan is begun."""
        self._num_named = 0

    def may_look_up(self, state: RequestState) -> bool:
        """True if this plan has time left to name the blocks of a waiting request."""
        return not self._num_named or self._num_named + self._num_unnamed(state) <= MAX_NAMED_TOKENS

    def check_fits(self, request: GenerationRequest, adapter_pages: int | None) -> None:
        """Refuse what even the empty pool could not hold; `adapter_pages` is None while unknown.

        The beams of a beam search share the full blocks of its prompt, if blocks are shared.

        Raises:
            NeverFitsError: With the numbers.
        """
        width = 1 if request.beam is None else request.beam.width
        num_tokens = kv_tokens(request)
        num_shared = (
            (len(request.prompt_token_ids) - 1) // self.geometry.page_tokens
            if self.is_sharing
            else 0
        )
        num_blocks = num_shared + width * (self.geometry.blocks(num_tokens) - num_shared)
        num_pages = num_blocks * self.geometry.num_groups
        if num_pages + (adapter_pages or 0) <= self.pool.capacity:
            return
        adapter_part = f" and {adapter_pages} pages for its adapter" if adapter_pages else ""
        beam_part = f" in {width} beams" if request.beam is not None else ""
        raise NeverFitsError(
            f"The request needs {num_pages} pages for {num_tokens} tokens{beam_part}{adapter_part}, but the pool has "
            f"{self.pool.capacity} pages in all. Shorten the prompt, lower max_tokens, or give the server a larger "
            "memory.gib.",
            param="max_tokens",
        )

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted, now or when the steps under way are complete."""
        return self.evictor.num_available + self.pool.num_quarantined

    def lacking(self, state: RequestState, num_tokens: int) -> int:
        """Pages that a running request lacks for `num_tokens` tokens."""
        return state.pages.table.blocks_needed(num_tokens) * self.geometry.num_groups

    def grow(self, state: RequestState, count: int, draft: PlanBuilder) -> bool:
        """Give a running request `count` more pages from what is free or idle; False, and nothing taken, otherwise."""
        pages = self._take(state, count)
        if pages is None:
            return False
        state.pages.table.append(pages)
        state.pages.last_step = draft.plan.step
        draft.plan.zero_pages += pages
        return True

    def may_fork(self, leader: RequestState, state: RequestState) -> bool:
        """True if a request that just arrived may wait for the prompt of `leader` to be computed, and share it."""
        return (
            self.is_sharing
            and leader.place.key.lane == state.place.key.lane
            and not state.output_token_ids
            and not state.first_output.keeps_prompt_logprobs
            and leader.request.prompt_token_ids == state.request.prompt_token_ids
            and prefix_seed(leader.request) == prefix_seed(state.request)
        )

    def prefix_hit(self, state: RequestState) -> PrefixHit:
        """KV cache that a waiting request could start with now. Takes nothing."""
        page_tokens = self.geometry.page_tokens
        source = state.source
        if source is not None:
            held = source.leader.pages.held[: source.num_tokens // page_tokens]
            return PrefixHit(blocks=held, num_tokens=source.num_tokens, leader=source.leader)
        blocks = self._find(state)
        num_tokens = len(blocks) * page_tokens
        swapped = state.pages.swapped
        if (
            swapped is not None
            and swapped.first_block <= len(blocks)
            and swapped.num_tokens > num_tokens
        ):
            return PrefixHit(blocks=blocks, num_tokens=swapped.num_tokens, swapped=swapped)
        return PrefixHit(blocks=blocks, num_tokens=num_tokens)

    def start(
        self, state: RequestState, hit: PrefixHit, num_tokens: int, room: int, draft: PlanBuilder
    ) -> bool:
        """Give a waiting request pages for `num_tokens` tokens, and have those of the hit filled.

        Args:
            state: The request.
            hit: From `prefix_hit`, in the same plan.
            num_tokens: More than `hit.num_tokens`.
            room: Pages that must be left, free or evictable.
            draft: The plan.

        Returns:
            True if it has them; if not, nothing was taken or evicted.
        """
        blocks = hit.blocks
        pages = state.pages
        if self.evictor.num_available < self.num_lacking(hit, num_tokens) + room:
            return False
        count = (self.geometry.blocks(num_tokens) - len(blocks)) * self.geometry.num_groups
        self.prefixes.hold(blocks)
        own = self._take(state, count)
        if own is None:
            self.prefixes.release(blocks, 0)
            return False
        pages.held = list(blocks)
        pages.found = []
        for block in blocks:
            pages.table.append(block.pages)
        pages.table.append(own)
        filled = self._fill(hit, own, draft)
        draft.plan.zero_pages += own[filled:]
        if pages.swapped is not None:
            # Its host pages are read in this step, or of no use any more.
            self.swap.slab.free(pages.swapped.host_pages, draft.plan.step)
            pages.swapped = None
        pages.num_computed = hit.num_tokens
        pages.last_step = draft.plan.step
        return True

    def num_lacking(self, hit: PrefixHit, num_tokens: int) -> int:
        """Pages that `start` takes from what is free or idle, cached blocks that nobody holds among them."""
        blocks = hit.blocks
        count = (self.geometry.blocks(num_tokens) - len(blocks)) * self.geometry.num_groups
        return count + sum(block.num_pages for block in blocks if block.refs == 0)

    def num_alone(self, state: RequestState) -> int:
        """Pages of a running request that nobody else has: those that its preemption makes available."""
        pages = state.pages
        own = (pages.table.num_blocks - len(pages.held)) * self.geometry.num_groups
        return own + sum(block.num_pages for block in pages.held if block.refs == 1)

    def note_lookup(self, num_queried: int, num_found: int) -> None:
        """Count the prompt tokens of a request that starts for the first time."""
        if self.is_sharing:
            self.prefixes.num_queries += num_queried
            self.prefixes.num_hits += num_found

    def publish(self, state: RequestState, num_full: int) -> None:
        """Offer a running request's first `num_full` blocks to others; the steps that wrote them are complete."""
        pages = state.pages
        if not (self.is_sharing and pages.is_publishing):
            return
        chain = self._chain(state, num_full)
        for index in range(len(pages.held), num_full):
            own = pages.table.by_block(index, index + 1)
            parent = pages.held[-1] if pages.held else None
            block = self.prefixes.publish(chain, index, own, parent, state.adapter.digest)
            if block is None:
                pages.is_publishing = False
                return
            pages.held.append(block)
            if block.pages != own:  # another request computed the same
                for table, page in zip(pages.table.pages, block.pages, strict=True):
                    table[index] = page
                self.pool.free(own, pages.last_step)

    def preempt(self, state: RequestState, draft: PlanBuilder | None) -> Preemption:
        """Take all device pages from a running request, and say how it gets its KV cache back."""
        swapped = None if draft is None else self._swap_out(state, draft)
        self.free(state, state.pages.last_step if swapped is None else swapped.step)
        state.pages.give_up(swapped)
        return "recompute" if swapped is None else "swap"

    def free(self, state: RequestState, last_step: int) -> None:
        """Free a running request's pages, which `last_step` is the last to read."""
        pages = state.pages
        self.pool.free(pages.own_pages(), last_step)
        self.prefixes.release(pages.held, last_step)

    def forget_swapped(self, state: RequestState) -> None:
        """Free a waiting request's host pages, if it has some."""
        swapped = state.pages.swapped
        if swapped is not None:
            state.pages.swapped = None
            self.swap.slab.free(swapped.host_pages, swapped.step)

    def complete(self, step: int) -> None:
        """Note that a step is complete; pages of device and host that it read may be used again."""
        self.pool.complete(step)
        self.swap.slab.complete(step)

    def check(self, running: Iterable[RequestState], waiting: Iterable[RequestState]) -> None:
        """Verify that pages, references and host pages are those of the requests.

        Raises:
            EngineError: A waiting request has device pages, or a running one has host pages.
            PageAccountingError: Pages were lost or are held twice.
        """
        holders = [state.pages.held for state in running]
        pages = [page for state in running for page in state.pages.own_pages()]
        host_pages: list[int] = []
        for state in waiting:
            if state.pages.held or state.pages.table.num_blocks:
                raise EngineError("a waiting request holds device pages")
            if state.pages.swapped is not None:
                host_pages += state.pages.swapped.host_pages
        for state in running:
            if state.pages.swapped is not None:
                raise EngineError("a running request holds host pages")
            begins = state.pages.table.by_block(0, len(state.pages.held))
            if begins != [page for block in state.pages.held for page in block.pages]:
                raise PageAccountingError(
                    "a request's first blocks are not the cached ones that it holds"
                )
        if len(set(pages)) != len(pages) or len(pages) != self.pool.counts()["kv"]:
            raise PageAccountingError(
                f"requests hold {len(pages)} KV pages, the pool says {self.pool.counts()}"
            )
        num_swapped = self.swap.slab.counts()["kv"]
        if len(set(host_pages)) != len(host_pages) or len(host_pages) != num_swapped:
            raise PageAccountingError(
                f"requests hold {len(host_pages)} host pages, the swap space says {num_swapped}"
            )
        self.prefixes.check(holders)
        self.evictor.check()

    def _take(self, state: RequestState, count: int) -> list[int] | None:
        if not self.evictor.make_room(count):
            return None
        return self.pool.allocate(
            count, "kv", NO_OWNER if state.adapter.lease is None else state.adapter.lease.slot
        )

    def _find(self, state: RequestState) -> list[PrefixBlock]:
        """Cached blocks that a waiting request begins with, but never all of its tokens: the last is to be computed."""
        pages = state.pages
        max_blocks = (state.num_tokens - 1) // self.geometry.page_tokens
        if not self.is_sharing or state.first_output.keeps_prompt_logprobs or not max_blocks:
            return []
        self._num_named += self._num_unnamed(state)
        pages.found = self.prefixes.find(self._chain(state, max_blocks), max_blocks, pages.found)
        return pages.found

    def _num_unnamed(self, state: RequestState) -> int:
        """Tokens of a waiting request that a lookup has to name."""
        if not self.is_sharing or state.first_output.keeps_prompt_logprobs:
            return 0
        page_tokens = self.geometry.page_tokens
        chain = state.pages.chain
        return (state.num_tokens - 1) // page_tokens * page_tokens - (
            chain.num_tokens if chain is not None else 0
        )

    def _chain(self, state: RequestState, num_blocks: int) -> TokenChain:
        """Names of a request's first `num_blocks` blocks, at least."""
        pages = state.pages
        page_tokens = self.geometry.page_tokens
        if pages.chain is None:
            pages.chain = TokenChain(prefix_seed(state.request), page_tokens)
        if num_blocks > len(pages.chain.blocks):
            pages.chain.extend(state.tokens(pages.chain.num_tokens, num_blocks * page_tokens))
        return pages.chain

    def _fill(self, hit: PrefixHit, own: list[int], draft: PlanBuilder) -> int:
        """Have a starting request's first own pages filled; returns their number."""
        num_blocks = len(hit.blocks)
        if hit.leader is not None:
            leader = hit.leader
            num_full = self.geometry.blocks(hit.num_tokens)
            sources = leader.pages.table.by_block(num_blocks, num_full)
            draft.plan.copies += [
                PageCopy(source=s, target=t) for s, t in zip(sources, own, strict=False)
            ]
            leader.pages.last_step = max(leader.pages.last_step, draft.plan.step)
            return len(sources)
        if hit.swapped is not None:
            swapped = hit.swapped
            host_pages = swapped.host_pages[
                (num_blocks - swapped.first_block) * self.geometry.num_groups :
            ]
            moves = zip(own, host_pages, strict=False)
            draft.plan.swap_in += [
                PageMove(device_page=page, host_page=host_page) for page, host_page in moves
            ]
            return len(host_pages)
        return 0

    def _swap_out(self, state: RequestState, draft: PlanBuilder) -> SwappedBlocks | None:
        """Have a running request's KV cache copied to host pages, if there are some and computing it takes longer."""
        pages = state.pages
        geometry = self.geometry
        shared = next(
            (index for index, block in enumerate(pages.held) if block.refs == 1), len(pages.held)
        )
        first = 0 if state.first_output.keeps_prompt_logprobs else shared
        num_blocks = geometry.blocks(pages.num_computed)
        count = (num_blocks - first) * geometry.num_groups
        recompute_s = (pages.num_computed - first * geometry.page_tokens) * self.costs.token_s
        if count == 0 or 2 * count * self.costs.copy_s >= recompute_s:
            return None
        host_pages = self.swap.take(count)
        if host_pages is None:
            return None
        moved = pages.table.by_block(first, num_blocks)
        draft.plan.swap_out += [
            PageMove(device_page=page, host_page=host_page)
            for page, host_page in zip(moved, host_pages, strict=True)
        ]
        step = draft.plan.step
        return SwappedBlocks(
            first_block=first, num_tokens=pages.num_computed, host_pages=host_pages, step=step
        )
