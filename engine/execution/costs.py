"""Measures when the engine starts: seconds to load, copy or compute a page again, and the costs of a step's work.

The figures decide what is evicted first, whether a preempted request is swapped, and how service is counted among
tenants. They need to be right only within a factor of two or so; each is the best of a few short runs.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from weft.engine.execution.batch import build_batch
from weft.engine.fairness.prices import Prices
from weft.engine.model.decoder import Decoder, KvViews
from weft.engine.scheduling.plan import Chunk, StepPlan
from weft.memory.arena import Arena, PageCopier
from weft.memory.block_table import BlockTable
from weft.memory.eviction import PageCosts
from weft.memory.host_slab import HostSlab
from weft.memory.pool import PagePool

logger = logging.getLogger(__name__)

NUM_RUNS = 3
WARM_UP_TOKENS = 16
MAX_TOKENS = 128
TOKENS_BUDGET_S = 0.3
"""The measured chunk is as long as this allows, by the time of the warm-up."""


def measure_costs(
    decoder: Decoder,
    arena: Arena,
    pool: PagePool,
    slab: HostSlab,
    copier: PageCopier,
    *,
    max_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> PageCosts:
    """Copy pages, hash and pack one, and compute a chunk of a prompt.

    Args:
        decoder: The base model.
        arena: Its pages, none of them in use yet.
        pool: Whose pages these are; all are given back.
        slab: Host pages, as the copies will read them.
        copier: Copies to the device.
        max_tokens: The longest prompt that the model takes.
        clock: Monotonic seconds.
    """
    page_bytes = arena.geometry.page_bytes
    # A slab page is pinned where that matters, and nothing else is in it yet.
    source = slab.pages[0].zero_() if slab.num_pages else torch.zeros(page_bytes, dtype=torch.uint8)
    costs = PageCosts(
        copy_s=_copy_s(source, pool, copier, clock),
        load_s=_load_s(source, clock),
        token_s=_token_s(decoder, arena, pool, min(max_tokens, MAX_TOKENS), clock),
    )
    logger.info(
        "a page of %d bytes takes %.0f us to copy and %.0f us to load; a token of a prompt takes %.0f us",
        page_bytes,
        costs.copy_s * 1e6,
        costs.load_s * 1e6,
        costs.token_s * 1e6,
    )
    return costs


DECODE_ROWS = 16
SHORT_CONTEXT, LONG_CONTEXT = 16, 256
"""Tokens of context in the two decode steps whose difference is the price of context."""


def measure_prices(  # noqa: PLR0913 - all that a price follows from
    decoder: Decoder,
    arena: Arena,
    pool: PagePool,
    costs: PageCosts,
    *,
    lora_bytes_per_rank: int,
    prompt_context: float,
    max_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Prices:
    """Time decode steps of a short and a long context; the rest follows from what a page and a token cost.

    Args:
        decoder: The base model.
        arena: Its pages, which nobody uses yet.
        pool: Whose pages these are; all are given back.
        costs: From `measure_costs`.
        lora_bytes_per_rank: Bytes of one rank of an adapter on all linear layers. A step reads them once for each
            distinct adapter, at the speed at which pages are copied.
        prompt_context: Operations of attention for one token of context, over those of all products for one token.
        max_tokens: The longest prompt that the model takes.
        clock: Monotonic seconds.
    """
    blocks_per_row = pool.num_free // (DECODE_ROWS * arena.geometry.num_groups)
    long_context = min(LONG_CONTEXT, max_tokens - 1, blocks_per_row * arena.geometry.page_tokens - 1)
    if long_context < 1:
        return Prices(prompt_context=prompt_context)  # a pool of a few pages
    short_s = _decode_s(decoder, arena, pool, min(SHORT_CONTEXT, long_context), clock) / DECODE_ROWS
    long_s = _decode_s(decoder, arena, pool, long_context, clock) / DECODE_ROWS
    context_s = max(long_s - short_s, 0.0) / max(long_context - SHORT_CONTEXT, 1)
    rank_s = costs.copy_s * lora_bytes_per_rank / arena.geometry.page_bytes
    prices = Prices(
        output=max(short_s / costs.token_s, 1.0),
        context=context_s / costs.token_s,
        prompt_context=prompt_context,
        rank=rank_s / costs.token_s,
        page_load=costs.copy_s / costs.token_s,
    )
    logger.info(
        "in units of a prompt token: an output token costs %.2f and %.5f for each token before it, an adapter in a "
        "step %.4f for each rank, a page of an adapter that is loaded %.2f",
        prices.output,
        prices.context,
        prices.rank,
        prices.page_load,
    )
    return prices


@contextmanager
def _taken(pool: PagePool, count: int) -> Iterator[list[int]]:
    """Pages for a measurement, given back after it."""
    pages = pool.allocate(count, "kv") or []
    try:
        yield pages
    finally:
        pool.free(pages, 0)


def _forward(decoder: Decoder, arena: Arena, chunks: Sequence[Chunk]) -> torch.Tensor:
    batch = build_batch(StepPlan(step=0, chunks=list(chunks)), arena.geometry, arena.num_pages, decoder.device)
    return decoder.forward(batch.rows, KvViews.of(arena), None)


@torch.inference_mode()
def _decode_s(decoder: Decoder, arena: Arena, pool: PagePool, context: int, clock: Callable[[], float]) -> float:
    """Seconds of a step in which `DECODE_ROWS` requests of so much context have one token each."""
    geometry = arena.geometry
    with _taken(pool, DECODE_ROWS * geometry.pages(context + 1)) as pages:
        arena.zero(pages)
        per_row = len(pages) // DECODE_ROWS
        chunks = []
        for row in range(DECODE_ROWS):
            table = BlockTable(geometry)
            table.append(pages[row * per_row : (row + 1) * per_row])
            chunks.append(Chunk(request_id=str(row), token_ids=[0], start=context, block_table=table.pages))

        def compute() -> None:
            decoder.logits(_forward(decoder, arena, chunks))[0, 0].item()  # waits for the device

        compute()
        return _best(compute, clock)


def _best(run: Callable[[], object], clock: Callable[[], float]) -> float:
    seconds = []
    for _ in range(NUM_RUNS):
        started_s = clock()
        run()
        seconds.append(clock() - started_s)
    return max(min(seconds), 1e-9)  # a clock may stand still for so short a time


def _copy_s(source: torch.Tensor, pool: PagePool, copier: PageCopier, clock: Callable[[], float]) -> float:
    with _taken(pool, min(4, pool.num_free)) as pages:
        sources = [source] * len(pages)
        return _best(lambda: copier.copy(sources, pages, copier.fence()), clock) / max(len(pages), 1)


def _load_s(source: torch.Tensor, clock: Callable[[], float]) -> float:
    """Hash a page, look at every value, and write it transposed."""
    rows = source.view(torch.float32).view(8, -1)
    packed = torch.empty_like(rows.t())

    def load() -> None:
        hashlib.sha256(source.numpy().tobytes())
        torch.isfinite(rows).all()
        packed.copy_(rows.t())

    return _best(load, clock)


@torch.inference_mode()
def _token_s(decoder: Decoder, arena: Arena, pool: PagePool, max_tokens: int, clock: Callable[[], float]) -> float:
    """The base model over a chunk of a prompt; a length's first run pays for what is set up for it."""
    geometry = arena.geometry
    longest = min(max_tokens, pool.num_free // geometry.num_groups * geometry.page_tokens)
    with _taken(pool, geometry.pages(longest)) as pages:
        table = BlockTable(geometry)
        table.append(pages)
        arena.zero(pages)

        def compute(num_tokens: int) -> float:
            blocks = [group[: geometry.blocks(num_tokens)] for group in table.pages]
            chunk = Chunk(request_id="", token_ids=[0] * num_tokens, start=0, block_table=blocks)
            started_s = clock()
            _forward(decoder, arena, [chunk])[0, 0].item()  # waits for the device
            return clock() - started_s

        compute(min(WARM_UP_TOKENS, longest))
        first_s = compute(min(WARM_UP_TOKENS, longest)) / min(WARM_UP_TOKENS, longest)
        count = min(longest, int(TOKENS_BUDGET_S / max(first_s, 1e-9)))
        return first_s if count <= WARM_UP_TOKENS else max(min(compute(count), compute(count)) / count, 1e-9)
