"""Executes a step plan: builds the batch, moves pages, runs the decoder, samples. Asks neither scheduler nor pool.

`launch` starts a step, and `collect` waits for it and returns its results. A step may be launched before the previous
step is collected. Steps run one after another, in the order of their launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from manylora.adapters.lora.step import PagedLora
from manylora.adapters.residency.entry import SlotLease
from manylora.engine.execution.memory_plan import LOGPROB_ROWS
from manylora.engine.execution.packed_step import PackedStep, host_rows, host_slots, pack_step
from manylora.engine.execution.sampler import RowMasks, Sampled, Sampler
from manylora.engine.execution.step_programs import StepPrograms
from manylora.engine.grammar.masks import StepMasks
from manylora.engine.model.decoder import Decoder, KvViews
from manylora.engine.request import GRAMMAR_DEAD_END, ErrorInfo, TokenLogprobs
from manylora.engine.scheduling.plan import Chunk, ChunkResult, SampleSpec, StepPlan
from manylora.errors import EngineError, PageAccountingError
from manylora.kernels.sampling import NON_FINITE, NOTHING_LEFT
from manylora.memory.arena import Arena, HostSlab, mark


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """A step that was launched."""

    results: Callable[[], list[ChunkResult]]
    """Function that waits for the results, one per chunk, in the order of the plan."""
    moved: torch.cuda.Event | None
    """Event after which the host pages that the step copies are free for others; None if they are free at once."""


@dataclass(eq=False, kw_only=True)
class ModelRunner:
    """The one place where a step touches the device."""

    decoder: Decoder
    """The base model."""
    arena: Arena
    """Its pages."""
    slab: HostSlab
    """Host pages for KV that is swapped out."""
    lora: PagedLora
    """The adapters."""
    check_lease: Callable[[SlotLease], None]
    """Called for every adapter of a step before it runs; raises StaleSlotError for a stale slot."""
    sampler: Sampler
    """Chooses tokens."""
    programs: StepPrograms | None = None
    """Programs for the steps of a GPU, which runs beside the host; None computes each step in `launch`."""

    def __post_init__(self) -> None:
        self._is_gpu = self.arena.device.type == "cuda"
        self._kv = KvViews.of(self.arena, self.decoder.spec.sliding_windows)
        self._sampled: list[int | None] = []
        """Place of the token of each chunk of the last launched step; None for a chunk without a token."""
        self._codes: torch.Tensor | None = None
        """Tokens of the last step that was computed without a program, by place."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan, masks: Future[StepMasks] | None = None) -> LaunchedStep:
        """Start a step. A CPU computes the whole step here.

        Args:
            plan: The step.
            masks: Masks of the chunks with a grammar. They are awaited after the forward pass.

        Returns:
            The step for `collect`. If this raises, nothing of the step runs on.

        Raises:
            StaleSlotError: An adapter slot was reused after the plan was made.
            EngineError: The plan contradicts itself; nothing was moved or computed.
        """
        if plan.is_empty:
            raise EngineError(f"step {plan.step} has nothing to do")
        self._check_pages(plan)
        if not plan.chunks:
            return LaunchedStep(results=list, moved=self.move_pages(plan))
        arena = self.arena
        step = pack_step(plan, arena.geometry, arena.num_pages, self._sampled)
        for adapter in step.adapters.values():
            self.check_lease(adapter)
        wanted = [step.order[index] for index in step.samples]
        specs = [spec for place in wanted if (spec := plan.chunks[place].sample) is not None]
        row_masks = None if masks is None else partial(_row_masks, masks, wanted)
        if self.programs is None:
            moved = self.move_pages(plan)
            with _waiting_if_it_fails(moved):
                hidden, collect = self._compute(step, specs, row_masks)
        else:
            program = self.programs.program(step)
            program.load(step, specs, row_masks, plan.zero_pages)
            moved = self.move_pages(plan, program.zero_pages)
            with _waiting_if_it_fails(moved):
                program.run()
            hidden = program.hidden
            collect = program.collect
        row_of = {place: row for row, place in enumerate(wanted)}
        self._sampled = [row_of.get(place) for place in range(len(plan.chunks))]

        @torch.inference_mode()
        def results() -> list[ChunkResult]:
            sampled = dict(zip(wanted, collect(), strict=True))
            failures = {} if masks is None else _failures(masks.result(), sampled)
            return self._results(plan.chunks, step, sampled, failures, hidden)

        return LaunchedStep(results=results, moved=moved)

    def collect(self, launched: LaunchedStep) -> list[ChunkResult]:
        """Wait until a step is complete. Call this once for each step, in the order of their launches.

        Returns:
            One result per chunk, in the order of the plan.
        """
        if launched.moved is not None:
            launched.moved.synchronize()
        return launched.results()

    def close(self) -> None:
        """Free the device memory of the runner. It must not be used afterwards."""
        self._kv = KvViews((), ())
        self.programs = None
        self.slab.close()

    def _compute(
        self,
        step: PackedStep,
        specs: Sequence[SampleSpec],
        masks: Callable[[], RowMasks] | None,
    ) -> tuple[torch.Tensor, Callable[[], list[Sampled]]]:
        """Compute a step on a CPU; returns its hidden rows, and a function as `StepProgram.collect`."""
        device = self.decoder.device
        rows = host_rows(step, self.arena.geometry.page_tokens, device, self._codes)
        lora = self.lora.prepare(host_slots(step, rows)) if step.adapters else None
        hidden = self.decoder.forward(rows, self._kv, lora)
        codes = torch.empty(len(specs), dtype=torch.int32, device=device)
        results: list[Sampled] = []
        if specs:
            logits = self._logits(hidden, step.last_rows().tolist())
            row_masks = masks() if masks is not None else None
            results = self.sampler.sample(logits, specs, row_masks, codes)
        self._codes = codes
        return hidden, lambda: results

    def _results(
        self,
        chunks: Sequence[Chunk],
        step: PackedStep,
        sampled: Mapping[int, Sampled],
        failures: Mapping[int, ErrorInfo],
        hidden: torch.Tensor,
    ) -> list[ChunkResult]:
        results = []
        for index, (chunk, first_row) in enumerate(zip(chunks, step.chunk_rows, strict=True)):
            code, logprobs = sampled.get(index, (NON_FINITE, None))
            prompt_logprobs = self._prompt_logprobs(chunk, first_row, hidden)
            failure = failures.get(index)
            is_non_finite = code < 0 and chunk.sample is not None and failure is None
            results.append(
                ChunkResult(
                    request_id=chunk.request_id,
                    token_id=code if code >= 0 else None,
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    failure=failure,
                    is_non_finite=is_non_finite
                    or not all(math.isfinite(entry.logprob) for entry in prompt_logprobs),
                )
            )
        return results

    def _prompt_logprobs(
        self, chunk: Chunk, first_row: int, hidden: torch.Tensor
    ) -> list[TokenLogprobs]:
        targets = chunk.prompt_targets or []
        found: list[TokenLogprobs] = []
        for start in range(0, len(targets), LOGPROB_ROWS):
            part = targets[start : start + LOGPROB_ROWS]
            rows = list(range(first_row + start, first_row + start + len(part)))
            found += self.sampler.logprobs(
                self._logits(hidden, rows), part, chunk.num_prompt_logprobs
            )
        return found

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        # On the CPU, a lone row is always computed as two, so that it rounds as in a larger batch.
        padded = rows * 2 if len(rows) == 1 else rows
        if padded != list(range(len(hidden))):
            hidden = hidden.index_select(0, torch.tensor(padded, device=hidden.device))
        return self.decoder.logits(hidden)[: len(rows)]

    def _check_pages(self, plan: StepPlan) -> None:
        """Verify that the plan's pages exist.

        Raises:
            PageAccountingError: A page does not exist, or the zero page would be written.
        """
        moves = plan.swap_out + plan.swap_in
        device_pages = [move.device_page for move in moves]
        device_pages += [page for copy in plan.copies for page in (copy.source, copy.target)]
        _check(plan.zero_pages + device_pages, 1, self.arena.num_pages, "page")
        _check((move.host_page for move in moves), 0, self.slab.num_pages, "host page")

    def move_pages(
        self, plan: StepPlan, zero: Callable[[], None] | None = None
    ) -> torch.cuda.Event | None:
        """Move the pages.

        Args:
            plan: Plan with the pages.
            zero: Function that zeroes its `zero_pages`; None lets the arena do it.

        Returns:
            Event after which the host pages are free for others; None if they are free at once.
        """
        device = self.arena.bytes
        host = self.slab.pages
        for move in plan.swap_out:
            host[move.host_page].copy_(device[move.device_page], non_blocking=self._is_gpu)
        if zero is None:
            self.arena.zero(plan.zero_pages)
        else:
            zero()
        for move in plan.swap_in:
            device[move.device_page].copy_(host[move.host_page], non_blocking=self._is_gpu)
        for copy in plan.copies:
            device[copy.target].copy_(device[copy.source])
        if not self._is_gpu or not (plan.swap_out or plan.swap_in):
            return None
        return mark(self.arena.device)


@contextmanager
def _waiting_if_it_fails(moved: torch.cuda.Event | None) -> Iterator[None]:
    """Wait for the copies of a failed step, because its host pages may go to others at once."""
    try:
        yield
    except BaseException:
        if moved is not None:
            moved.synchronize()
        raise


def _row_masks(masks: Future[StepMasks], wanted: Sequence[int]) -> RowMasks:
    """Wait for the masks of a step, and assign them to the rows of logits of the chunks `wanted`."""
    filled = masks.result()
    row_of = {place: row for row, place in enumerate(wanted)}
    return RowMasks([row_of[place] for place in filled.chunks], filled.bits)


def _failures(filled: StepMasks, sampled: Mapping[int, Sampled]) -> dict[int, ErrorInfo]:
    """Errors of grammars that allow no token, by place in the plan."""
    dead = (place for place in filled.chunks if sampled[place][0] == NOTHING_LEFT)
    return dict.fromkeys(dead, GRAMMAR_DEAD_END) | filled.failures


def _check(pages: Iterable[int], first: int, end: int, name: str) -> None:
    wrong = [page for page in pages if not first <= page < end]
    if wrong:
        raise PageAccountingError(
            f"a plan names {name} {wrong[0]}, which is not one of {first} to {end - 1}"
        )
