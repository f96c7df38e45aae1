"""A model with pages and adapters but no scheduler: plans are made by hand, pages handed out as they are needed.

In a process that interprets Triton, all steps are those of step programs with interpreted kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch

from adapters_factory import packed
from implementations import INTERPRETS
from manylora.adapters.lora.step import AdapterTables, PagedLora
from manylora.adapters.residency.entry import SlotLease
from manylora.engine.execution.packed_step import host_rows, host_slots, pack_step
from manylora.engine.execution.runner import ModelRunner
from manylora.engine.execution.sampler import Sampler
from manylora.engine.execution.step_program import StepDevice
from manylora.engine.execution.step_programs import StepPrograms
from manylora.engine.model.checkpoint import weights as model_weights
from manylora.engine.model.checkpoint.weights import load_decoder
from manylora.engine.model.decoder import KvViews
from manylora.engine.model.spec import base_shape, read_spec
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.scheduling.plan import Chunk, ChunkResult, SampleSpec, StepPlan
from manylora.engine.scheduling.request_pages import BlockTable
from manylora.errors import StaleSlotError
from manylora.kernels.dispatch import kernels_for, triton_kernels
from manylora.kernels.weight_format import WeightFormat
from manylora.lora_rows import PITCH_BYTES
from manylora.memory.arena import Arena, HostSlab
from manylora.memory.geometry import PageGeometry, page_geometry
from manylora.memory.pool import PagePool

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)


@dataclass
class DrivenRequest:
    """One sequence: its tokens so far, and how many of them are in the KV cache."""

    request_id: str
    token_ids: list[int]
    table: BlockTable
    adapter: SlotLease | None
    params: SamplingParams
    num_prompt: int
    num_computed: int = 0
    new_pages: list[int] = field(default_factory=list)


class StepDriver:
    """Everything below the scheduler, on the CPU."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        weights: WeightFormat = "bf16",
        num_pages: int = 400,
        max_rank: int = 64,
        slots: int = 8,
        geometry: PageGeometry | None = None,
        is_kv_int8: bool = False,
    ) -> None:
        self.spec = read_spec(folder)
        self.base = base_shape(self.spec, "sha256:" + "0" * 64)
        self.geometry = geometry or page_geometry(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype_bytes=dtype.itemsize,
            largest_row_features=self.base.largest_row_features,
            is_kv_int8=is_kv_int8,
        )
        self.kernels = triton_kernels() if INTERPRETS else kernels_for(CPU, dtype)
        with patch.object(model_weights, "kernels_for", lambda *_: self.kernels):
            self.decoder = load_decoder(folder, self.spec, dtype, CPU, weights=weights)
        self.arena = Arena(self.geometry, num_pages, CPU, dtype)
        self.pool = PagePool(num_pages)
        self.slab = HostSlab(8, self.geometry.page_bytes, pinned=False)
        self.tables = AdapterTables(slots, self.base, max_rank, self.geometry, CPU)
        self.lora = PagedLora(self.arena, self.tables, self.base, self.kernels)
        self.max_rank = max_rank
        self.slots: list[SlotLease] = []
        self.arena.poison(range(1, num_pages))
        self.sampler = Sampler(self.kernels if INTERPRETS else kernels_for(CPU, torch.float32))
        self.runner = ModelRunner(
            decoder=self.decoder,
            arena=self.arena,
            slab=self.slab,
            lora=self.lora,
            check_lease=self.check_lease,
            sampler=self.sampler,
            programs=StepPrograms(self.step_device(), max_running=16, capture=None)
            if INTERPRETS
            else None,
        )
        self._num_steps = 0
        self._num_requests = 0

    def step_device(self) -> StepDevice:
        """What step programs share."""
        return StepDevice(
            decoder=self.decoder,
            arena=self.arena,
            lora=self.lora,
            sampler=self.sampler,
            max_samples=16,
            max_rows=512,
            max_model_len=512,
        )

    def check_lease(self, lease: SlotLease) -> None:
        """As the residency does it."""
        if self.slots[lease.slot] != lease:
            raise StaleSlotError(f"slot {lease.slot} is now {self.slots[lease.slot]}")

    def load_adapter(self, folder: Path) -> SlotLease:
        """Read a PEFT checkpoint and put it into the pages and the next slot."""
        slot = SlotLease(slot=len(self.slots), generation=1, digest=str(folder))
        self._write_adapter(slot, folder)
        self.slots.append(slot)
        return slot

    def move_adapter(self, lease: SlotLease, folder: Path) -> None:
        """Let an adapter lose its pages, which then hold NaN, and come back to others."""
        offsets = self.tables.host_offsets[lease.slot]
        units = self.geometry.page_bytes // PITCH_BYTES
        lost = sorted(set((offsets[offsets > 0] // units).tolist()))
        self._write_adapter(lease, folder)
        self.arena.poison(lost)

    def _write_adapter(self, lease: SlotLease, folder: Path) -> None:
        checkpoint, layout, images = packed(
            folder, self.base, self.geometry, self.arena.dtype, self.max_rank
        )
        pages = self._pages(layout.num_pages, "adapter")
        self.arena.bytes[pages] = images
        self.tables.write(lease.slot, layout, pages, checkpoint.ranks, checkpoint.scalings)

    def request(
        self,
        token_ids: Sequence[int],
        adapter: SlotLease | None = None,
        params: SamplingParams = GREEDY,
    ) -> DrivenRequest:
        """A new sequence that begins with `token_ids`."""
        self._num_requests += 1
        table = BlockTable(self.geometry)
        return DrivenRequest(
            f"r{self._num_requests}", list(token_ids), table, adapter, params, len(token_ids)
        )

    def chunk(
        self,
        request: DrivenRequest,
        num_tokens: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> Chunk:
        """The next tokens of a request that are not computed yet; samples when they are its last."""
        start = request.num_computed
        end = len(request.token_ids) if num_tokens is None else start + num_tokens
        new_pages = self._pages(request.table.blocks_needed(end) * self.geometry.num_groups, "kv")
        request.table.append(new_pages)
        request.new_pages += new_pages
        request.num_computed = end
        return Chunk(
            request_id=request.request_id,
            token_ids=request.token_ids[start:end],
            start=start,
            block_table=request.table.pages,
            adapter=request.adapter,
            sample=self._sample_spec(request) if end == len(request.token_ids) else None,
            prompt_targets=None
            if prompt_logprobs is None
            else request.token_ids[start + 1 : end + 1],
            num_prompt_logprobs=prompt_logprobs or 0,
        )

    def plan(self, chunks: Sequence[Chunk], zero_pages: Sequence[int]) -> StepPlan:
        """The next step."""
        self._num_steps += 1
        return StepPlan(step=self._num_steps, chunks=list(chunks), zero_pages=list(zero_pages))

    def run(
        self, requests: Sequence[DrivenRequest], num_tokens: int | None = None
    ) -> list[ChunkResult]:
        """One step of the runner over the next tokens of each request; sampled tokens are appended."""
        plan = self.plan_of(requests, num_tokens)
        results = self.execute(plan)
        for request, result in zip(requests, results, strict=True):
            if result.token_id is not None:
                request.token_ids.append(result.token_id)
        return results

    def execute(self, plan: StepPlan) -> list[ChunkResult]:
        """Launch a step and wait for it."""
        return self.runner.collect(self.runner.launch(plan))

    def generate(self, requests: Sequence[DrivenRequest], num_tokens: int) -> list[list[int]]:
        """Prefill and decode together; the new tokens of each request."""
        for _ in range(num_tokens):
            self.run(requests)
        return [request.token_ids[request.num_prompt :] for request in requests]

    def logits(
        self, requests: Sequence[DrivenRequest], num_tokens: int | None = None
    ) -> list[torch.Tensor]:
        """One step of the decoder alone: scores [chunk tokens, vocab_size] at every token of each request's chunk."""
        plan = self.plan_of(requests, num_tokens)
        with torch.inference_mode():
            step = pack_step(plan, self.geometry, self.arena.num_pages)
            rows = host_rows(step, self.geometry.page_tokens, CPU)
            self.arena.zero(plan.zero_pages)
            lora = self.lora.prepare(host_slots(step, rows)) if step.adapters else None
            kv = KvViews.of(self.arena, self.decoder.spec.sliding_windows)
            scores = self.decoder.logits(self.decoder.forward(rows, kv, lora))
        return [
            scores[first : first + len(chunk.token_ids)]
            for first, chunk in zip(step.chunk_rows, plan.chunks, strict=True)
        ]

    def logits_alone(
        self, token_ids: Sequence[int], adapter: SlotLease | None = None
    ) -> torch.Tensor:
        """Scores [len(token_ids), vocab_size] of one sequence in one chunk."""
        return self.logits([self.request(token_ids, adapter)])[0]

    def plan_of(self, requests: Sequence[DrivenRequest], num_tokens: int | None = None) -> StepPlan:
        """The next step over the next tokens of each request."""
        chunks = [self.chunk(request, num_tokens) for request in requests]
        zero_pages = [page for request in requests for page in request.new_pages]
        for request in requests:
            request.new_pages.clear()
        return self.plan(chunks, zero_pages)

    def _sample_spec(self, request: DrivenRequest) -> SampleSpec:
        history = request.params.needs_history
        output = request.token_ids[request.num_prompt :]
        return SampleSpec(
            params=request.params,
            seed=request.params.seed or 0,
            choice_index=0,
            output_index=len(output),
            prompt_token_ids=request.token_ids[: request.num_prompt] if history else [],
            output_token_ids=output if history else [],
        )

    def _pages(self, count: int, kind: str) -> list[int]:
        pages = self.pool.allocate(count, "adapter" if kind == "adapter" else "kv")
        if pages is None:
            raise MemoryError(f"the driver's pool has no {count} pages left")
        return pages
