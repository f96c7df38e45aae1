"""Measurements at the start of the engine: seconds to load, copy or compute a page again, and the costs of a step.

The figures decide the order of eviction, whether a preempted request is swapped, and how service is counted among
tenants. An error of a factor of two does no harm; each figure is the best of a few short runs.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt
import torch

from manylora.engine.execution.packed_step import host_rows, pack_step
from manylora.engine.fairness.service import Prices
from manylora.engine.model.decoder import Decoder, KvViews
from manylora.engine.scheduling.plan import Chunk, StepPlan
from manylora.engine.scheduling.request_pages import BlockTable
from manylora.kernels.weight_format import WeightFormat
from manylora.memory.arena import Arena, HostSlab, PageCopier
from manylora.memory.eviction import PageCosts
from manylora.memory.pool import PagePool

logger = logging.getLogger(__name__)

NUM_RUNS = 3
WARM_UP_TOKENS = 16
MAX_TOKENS = 128
TOKENS_BUDGET_S = 0.3
"""Longest time of the measured chunk, by the time of the warm-up."""
DECODE_ROWS = 16
# The difference of two decode steps with these tokens of context is the price of context.
SHORT_CONTEXT = 16
LONG_CONTEXT = 256


SLOW_STEP_S = 0.5
"""A decode step that takes longer is told at the start: nobody reads so slowly."""
SLOW_PROMPT_S = 30.0
"""A prompt of `PROMPT_TOKENS` that takes longer is told, too."""
PROMPT_TOKENS = 1000
FASTER: dict[WeightFormat, str] = {
    "bf16": "model.weights int8 or int4 reads and computes less",
    "int8": "model.weights int4 reads less",
    "int4": "a smaller model or more cores would help",
}
"""Advice for a slow CPU, by the format of weights."""


def slowness(costs: PageCosts, prices: Prices, weights: WeightFormat) -> str | None:
    """Sentence for a log if people would wait for this CPU; None if it is fast enough.

    Args:
        costs: Measured at the start.
        prices: Measured at the start.
        weights: Format of the layers.
    """
    step_s = prices.output * costs.token_s * DECODE_ROWS
    prompt_s = PROMPT_TOKENS * costs.token_s
    if step_s <= SLOW_STEP_S and prompt_s <= SLOW_PROMPT_S:
        return None
    return (
        f"this model is slow on this CPU: {step_s:.1f} s for a token of each of {DECODE_ROWS} requests, "
        f"{prompt_s:.0f} s for a prompt of {PROMPT_TOKENS:,} tokens; {FASTER[weights]} "
        f"(manylora doctor --model measures each)"
    )


@dataclass(eq=False)
class StartMeasures:
    """Times the base model and its pages before the first request."""

    decoder: Decoder
    """The base model."""
    arena: Arena
    """Its pages. None is in use yet."""
    pool: PagePool
    """Pool of these pages. Every measurement gives its pages back."""
    _: KW_ONLY
    max_tokens: int
    """Longest prompt that the model takes."""
    clock: Callable[[], float] = time.perf_counter
    """Monotonic seconds."""

    def costs(self, slab: HostSlab, copier: PageCopier) -> PageCosts:
        """Copy pages, hash and pack one, and compute a chunk of a prompt.

        Args:
            slab: Host pages, from which copies are made.
            copier: Copies to the device.
        """
        page_bytes = self.arena.geometry.page_bytes
        # A slab page is pinned if the device needs it, and the slab is not used yet.
        source = (
            slab.pages[0].zero_() if slab.num_pages else torch.zeros(page_bytes, dtype=torch.uint8)
        )
        costs = PageCosts(
            copy_s=self._copy_s(source, copier),
            load_s=self._load_s(source),
            token_s=self._token_s(min(self.max_tokens, MAX_TOKENS)),
        )
        logger.info(
            "measured for pages of %d bytes, and tokens of prompts, in seconds: %s",
            page_bytes,
            costs,
        )
        return costs

    def prices(
        self, costs: PageCosts, *, lora_bytes_per_rank: int, prompt_context: float
    ) -> Prices:
        """Time decode steps of a short and a long context. The costs of a page and a token give the other prices.

        Args:
            costs: Result of `costs`.
            lora_bytes_per_rank: Bytes of one rank of an adapter on all linear layers. A step reads them once for each
                distinct adapter, at the speed of copies of pages.
            prompt_context: Operations of attention for one token of context, relative to all products for one token.
        """
        geometry = self.arena.geometry
        blocks_per_row = self.pool.num_free // (DECODE_ROWS * geometry.num_groups)
        long_context = min(
            LONG_CONTEXT, self.max_tokens - 1, blocks_per_row * geometry.page_tokens - 1
        )
        if long_context < 1:
            return Prices(prompt_context=prompt_context)  # a pool of a few pages
        short_s = self._decode_s(min(SHORT_CONTEXT, long_context)) / DECODE_ROWS
        long_s = self._decode_s(long_context) / DECODE_ROWS
        context_s = max(long_s - short_s, 0.0) / max(long_context - SHORT_CONTEXT, 1)
        rank_s = costs.copy_s * lora_bytes_per_rank / geometry.page_bytes
        prices = Prices(
            output=max(short_s / costs.token_s, 1.0),
            context=context_s / costs.token_s,
            prompt_context=prompt_context,
            rank=rank_s / costs.token_s,
            page_load=costs.copy_s / costs.token_s,
        )
        logger.info("measured in units of a prompt token: %s", prices)
        return prices

    def _copy_s(self, source: torch.Tensor, copier: PageCopier) -> float:
        with self._pages(min(4, self.pool.num_free)) as pages:
            sources = [source] * len(pages)
            return self._best(lambda: copier.copy(sources, pages, copier.fence())) / max(
                len(pages), 1
            )

    def _load_s(self, source: torch.Tensor) -> float:
        """Time the hashing of a page, the check of every value, and a transposed copy."""
        rows = source.view(torch.float32).view(8, -1)
        packed = torch.empty_like(rows.t())

        def load() -> None:
            hashlib.sha256(source.numpy().tobytes())
            torch.isfinite(rows).all()
            packed.copy_(rows.t())

        return self._best(load)

    @torch.inference_mode()
    def _token_s(self, max_tokens: int) -> float:
        """Time a token of a prompt in the base model. The first run of a length is a warm-up."""
        geometry = self.arena.geometry
        longest = min(max_tokens, self.pool.num_free // geometry.num_groups * geometry.page_tokens)
        with self._pages(geometry.pages(longest)) as pages:
            table = self._table(pages)

            def token_s(count: int) -> float:
                chunk = Chunk(request_id="", token_ids=[0] * count, start=0, block_table=table)
                started_s = self.clock()
                self._forward([chunk])[0, 0].item()  # waits for the device
                return (self.clock() - started_s) / count

            short = min(WARM_UP_TOKENS, longest)
            token_s(short)
            first_s = token_s(short)
            count = min(longest, int(TOKENS_BUDGET_S / max(first_s, 1e-9)))
            if count <= WARM_UP_TOKENS:
                return first_s
            return max(min(token_s(count), token_s(count)), 1e-9)

    @torch.inference_mode()
    def _decode_s(self, context: int) -> float:
        """Seconds of a step with one token of each of `DECODE_ROWS` requests with `context` tokens of context."""
        per_row = self.arena.geometry.pages(context + 1)
        with self._pages(DECODE_ROWS * per_row) as pages:
            chunks = [
                Chunk(
                    request_id="",
                    token_ids=[0],
                    start=context,
                    block_table=self._table(pages[row * per_row : (row + 1) * per_row]),
                )
                for row in range(DECODE_ROWS)
            ]

            def compute() -> None:
                self.decoder.logits(self._forward(chunks))[0, 0].item()  # waits for the device

            compute()
            return self._best(compute)

    @contextmanager
    def _pages(self, count: int) -> Iterator[list[int]]:
        """Take zeroed pages for a measurement, and give them back after it."""
        pages = self.pool.allocate(count, "kv") or []
        try:
            self.arena.zero(pages)
            yield pages
        finally:
            self.pool.free(pages, 0)

    def _table(self, pages: Sequence[int]) -> list[npt.NDArray[np.int32]]:
        table = BlockTable(self.arena.geometry)
        table.append(pages)
        return table.pages

    def _forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        arena = self.arena
        plan = StepPlan(step=0, chunks=list(chunks))
        step = pack_step(plan, arena.geometry, arena.num_pages)
        return self.decoder.forward(
            host_rows(step, arena.geometry.page_tokens, arena.device),
            KvViews.of(arena, self.decoder.spec.sliding_windows),
        )

    def _best(self, run: Callable[[], object]) -> float:
        seconds = []
        for _ in range(NUM_RUNS):
            started_s = self.clock()
            run()
            seconds.append(self.clock() - started_s)
        return max(min(seconds), 1e-9)  # a coarse clock may show no time at all
