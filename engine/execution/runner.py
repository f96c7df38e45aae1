"""Carries out a step plan: build the batch, move pages, run the decoder, sample. Asks neither scheduler nor pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch

from weft.adapters.lora.step import PagedLora
from weft.adapters.residency.slots import SlotLease
from weft.engine.execution.batch import Batch, build_batch
from weft.engine.execution.memory_plan import LOGPROB_ROWS
from weft.engine.execution.sampler import RowMasks, Sampler
from weft.engine.grammar.masks import StepMasks
from weft.engine.model.decoder import Decoder, KvViews
from weft.engine.request import GRAMMAR_DEAD_END, RequestError, TokenLogprobs
from weft.engine.scheduling.plan import Chunk, ChunkResult, StepPlan
from weft.errors import EngineError, PageAccountingError
from weft.memory.arena import Arena, mark
from weft.memory.host_slab import HostSlab


class ModelRunner:
    """The one place where a step touches the device.

    Args:
        decoder: The base model.
        arena: Its pages.
        slab: Host pages, for KV that is swapped out.
        lora: The adapters.
        check_lease: Called for every adapter of a step before it runs; raises StaleSlotError for a stale slot.
        sampler: Chooses tokens.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        arena: Arena,
        slab: HostSlab,
        lora: PagedLora,
        check_lease: Callable[[SlotLease], None],
        sampler: Sampler,
    ) -> None:
        self._decoder = decoder
        self._arena = arena
        self._slab = slab
        self._is_gpu = arena.device.type == "cuda"
        self._kv = KvViews.of(arena)
        self._lora = lora
        self._check_lease = check_lease
        self._sampler = sampler

    @torch.inference_mode()
    def execute(self, plan: StepPlan, masks: Future[StepMasks] | None = None) -> list[ChunkResult]:
        """Run one step.

        Args:
            plan: The step.
            masks: Of the chunks that have a grammar; awaited after the forward pass.

        Returns:
            One result per chunk, in the order of the plan.

        Raises:
            StaleSlotError: An adapter slot has been reused since the plan was made.
            EngineError: The plan contradicts itself; nothing was moved or computed.
        """
        if plan.is_empty:
            raise EngineError(f"step {plan.step} has nothing to do")
        self._check_pages(plan)
        batch = (
            build_batch(plan, self._arena.geometry, self._arena.num_pages, self._decoder.device)
            if plan.chunks
            else None
        )
        for adapter in batch.adapters.values() if batch is not None else ():
            self._check_lease(adapter)
        moved = self.move_pages(plan)
        try:
            return self._compute(plan, batch, masks) if batch is not None else []
        finally:
            # Also where the step fails: its host pages then go to others, who do not know of these copies.
            if moved is not None:
                moved.synchronize()

    def close(self) -> None:
        """Let go of what the runner holds of the device; it must not be used afterwards."""
        self._kv = KvViews((), (), ())
        self._slab.close()

    def _compute(self, plan: StepPlan, batch: Batch, masks: Future[StepMasks] | None) -> list[ChunkResult]:
        lora = self._lora.prepare(batch.row_slots) if batch.adapters else None
        hidden = self._decoder.forward(batch.rows, self._kv, lora)
        sampled, failures = self._sample(plan.chunks, batch, hidden, masks)
        results = []
        for index, chunk in enumerate(plan.chunks):
            token_id, logprobs = sampled.get(index, (None, None))
            prompt_logprobs = self._prompt_logprobs(chunk, batch.first_rows[index], hidden)
            failure = failures.get(index)
            is_non_finite = token_id is None and chunk.sample is not None and failure is None
            results.append(
                ChunkResult(
                    request_id=chunk.request_id,
                    token_id=token_id,
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    failure=failure,
                    is_non_finite=is_non_finite or not all(math.isfinite(entry.logprob) for entry in prompt_logprobs),
                )
            )
        return results

    def _sample(
        self, chunks: Sequence[Chunk], batch: Batch, hidden: torch.Tensor, masks: Future[StepMasks] | None
    ) -> tuple[dict[int, tuple[int | None, TokenLogprobs | None]], dict[int, RequestError]]:
        """By places in the plan: the sampled token of each chunk that wants one, and why its grammar leaves none."""
        wanted = [(index, chunk.sample) for index, chunk in enumerate(chunks) if chunk.sample is not None]
        if not wanted:
            return {}, {}
        rows = [batch.last_row(index, chunks[index]) for index, _ in wanted]
        specs, logits = [spec for _, spec in wanted], self._logits(hidden, rows)
        if masks is None:
            tokens = self._sampler.sample(logits, specs)
            return {index: token for (index, _), token in zip(wanted, tokens, strict=True)}, {}
        filled = masks.result()
        row_of = {index: row for row, (index, _) in enumerate(wanted)}
        row_masks = RowMasks([row_of[index] for index in filled.chunks], filled.bits)
        tokens = self._sampler.sample(logits, specs, row_masks)
        dead = {wanted[row][0]: GRAMMAR_DEAD_END for row in row_masks.dead}
        return {index: token for (index, _), token in zip(wanted, tokens, strict=True)}, dead | filled.failures

    def _prompt_logprobs(self, chunk: Chunk, first_row: int, hidden: torch.Tensor) -> list[TokenLogprobs]:
        targets = chunk.prompt_targets or []
        found: list[TokenLogprobs] = []
        for start in range(0, len(targets), LOGPROB_ROWS):
            part = targets[start : start + LOGPROB_ROWS]
            rows = list(range(first_row + start, first_row + start + len(part)))
            found += self._sampler.logprobs(self._logits(hidden, rows), part, chunk.num_prompt_logprobs)
        return found

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        # As everywhere on the CPU, a lone row is computed as two, so that it rounds as it does in a larger batch.
        padded = rows * 2 if len(rows) == 1 else rows
        if padded != list(range(len(hidden))):
            hidden = hidden.index_select(0, torch.tensor(padded, device=hidden.device))
        return self._decoder.logits(hidden)[: len(rows)]

    def _check_pages(self, plan: StepPlan) -> None:
        """Verify that the plan's pages exist.

        Raises:
            PageAccountingError: One does not, or the zero page would be written.
        """
        moves = plan.swap_out + plan.swap_in
        device_pages = [move.device_page for move in moves]
        device_pages += [page for copy in plan.copies for page in (copy.source, copy.target)]
        _check(plan.zero_pages + device_pages, 1, self._arena.num_pages, "page")
        _check((move.host_page for move in moves), 0, self._slab.num_pages, "host page")

    def move_pages(self, plan: StepPlan) -> torch.cuda.Event | None:
        """Move the pages.

        Returns:
            What to wait for before host pages are used by anybody else; None when they can be at once.
        """
        device, host = self._arena.bytes, self._slab.pages
        for move in plan.swap_out:
            host[move.host_page].copy_(device[move.device_page], non_blocking=self._is_gpu)
        self._arena.zero(plan.zero_pages)
        for move in plan.swap_in:
            device[move.device_page].copy_(host[move.host_page], non_blocking=self._is_gpu)
        for copy in plan.copies:
            device[copy.target].copy_(device[copy.source])
        if not self._is_gpu or not (plan.swap_out or plan.swap_in):
            return None
        return mark(self._arena.device)


def _check(pages: Iterable[int], first: int, end: int, name: str) -> None:
    wrong = [page for page in pages if not first <= page < end]
    if wrong:
        raise PageAccountingError(f"a plan names {name} {wrong[0]}, which is not one of {first} to {end - 1}")
