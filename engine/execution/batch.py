"""A step plan as tensors: rows in order of their adapter slots, base first, with positions, KV slots and attention.

All pages and slots are in the plan. Its numbers are checked here, before a kernel reads or writes by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from weft.adapters.residency.slots import SlotLease
from weft.engine.model.decoder import StepRows
from weft.engine.model.linear import padded_rows
from weft.engine.scheduling.plan import Chunk, StepPlan
from weft.errors import EngineError, PageAccountingError
from weft.kernels.attention_batch import AttentionBatch
from weft.memory.geometry import PageGeometry

BASE_SLOT = -1
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step on the device, and where each chunk of the plan went."""

    rows: StepRows
    row_slots: list[int]
    """Adapter slot of each row, ascending; -1 is the base model."""
    adapters: dict[int, SlotLease]
    """The adapters of the step by slot."""
    first_rows: list[int]
    """First row of each chunk, in the order of the plan."""

    def last_row(self, chunk_index: int, chunk: Chunk) -> int:
        """The row of a chunk's last token."""
        return self.first_rows[chunk_index] + len(chunk.token_ids) - 1


def build_batch(plan: StepPlan, geometry: PageGeometry, num_pages: int, device: torch.device) -> Batch:
    """Build the tensors of one step.

    On a CPU a step has at least two rows: a matrix product of one row rounds differently from one of several, and a
    token must not depend on who else is in the batch. Large steps have a number of rows that packed weights are
    multiplied with as it is (`padded_rows`). Padding rows belong to the last chunk's adapter, attend to nothing and are
    not stored.

    Args:
        plan: At least one chunk, each with at least one token.
        geometry: Of the arena's pages.
        num_pages: Pages of the arena, the zero page included.
        device: Where the decoder runs.

    Raises:
        EngineError: The plan has no chunk or an empty one, or two digests in one adapter slot.
        PageAccountingError: A block table is too short, or names a page that does not exist.
    """
    if not plan.chunks or not all(chunk.token_ids for chunk in plan.chunks):
        raise EngineError(f"step {plan.step} has no chunk, or one without tokens")
    order = sorted(range(len(plan.chunks)), key=lambda index: _slot(plan.chunks[index]))
    chunks = [plan.chunks[index] for index in order]
    lengths = [len(chunk.token_ids) for chunk in chunks]
    num_rows = sum(lengths)
    if device.type == "cpu":
        num_rows = max(padded_rows(num_rows), 2)
    # An even width keeps every row on a multiple of 16 bytes: Triton compiles a kernel again for other alignments.
    rows, first_rows = _rows(chunks, lengths, num_rows + num_rows % 2, geometry)
    tensor = torch.from_numpy(rows).to(device)[:, :num_rows]
    return Batch(
        rows=StepRows(
            tokens=tensor[0],
            positions=tensor[1],
            slot_mapping=tuple(tensor[2:]),
            attention=_attention(chunks, lengths, geometry, num_pages, device),
        ),
        row_slots=_row_slots(chunks, lengths, num_rows),
        adapters=_adapters(chunks),
        first_rows=[first_rows[place] for place in np.argsort(order).tolist()],
    )


def _slot(chunk: Chunk) -> int:
    return BASE_SLOT if chunk.adapter is None else chunk.adapter.slot


def _rows(
    chunks: Sequence[Chunk], lengths: list[int], num_rows: int, geometry: PageGeometry
) -> tuple[IntArray, list[int]]:
    """Tokens, positions and KV slots as one array [2 + num_groups, num_rows], and the first row of each chunk."""
    page_tokens, num_tokens = geometry.page_tokens, sum(lengths)
    ends = np.cumsum(lengths)
    firsts = ends - lengths
    starts = np.array([chunk.start for chunk in chunks])
    first_blocks = starts // page_tokens
    last_blocks = (starts + lengths - 1) // page_tokens
    num_blocks = last_blocks - first_blocks + 1

    rows = np.zeros((2 + geometry.num_groups, num_rows), dtype=np.int64)
    rows[2:, num_tokens:] = -1
    real = rows[:, :num_tokens]
    real[0] = np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, num_tokens)
    real[1] = np.arange(num_tokens) + np.repeat(starts - firsts, lengths)
    block_places = real[1] // page_tokens + np.repeat(np.cumsum(num_blocks) - num_blocks - first_blocks, lengths)
    offsets = real[1] % page_tokens
    spans = list(zip(chunks, first_blocks.tolist(), (last_blocks + 1).tolist(), strict=True))
    for group in range(geometry.num_groups):
        pages = np.concatenate([c.block_table[group][first:end] for c, first, end in spans])
        if len(pages) != num_blocks.sum() or pages.min() < 1:
            raise PageAccountingError("a block table is too short for its chunk, or would write to the zero page")
        real[2 + group] = pages[block_places] * page_tokens + offsets
    return rows, firsts.tolist()


def _attention(
    chunks: Sequence[Chunk], lengths: list[int], geometry: PageGeometry, num_pages: int, device: torch.device
) -> tuple[AttentionBatch, ...]:
    context_lens = [chunk.start + length for chunk, length in zip(chunks, lengths, strict=True)]
    batches = tuple(
        AttentionBatch.build(
            [chunk.block_table[group] for chunk in chunks], lengths, context_lens, device, geometry.page_tokens
        )
        for group in range(geometry.num_groups)
    )
    if any(batch.block_table_host.min() < 0 or batch.block_table_host.max() >= num_pages for batch in batches):
        raise PageAccountingError(f"a block table names a page outside 0 to {num_pages - 1}")
    return batches


def _row_slots(chunks: Sequence[Chunk], lengths: list[int], num_rows: int) -> list[int]:
    slots = [_slot(chunk) for chunk, length in zip(chunks, lengths, strict=True) for _ in range(length)]
    return slots + slots[-1:] * (num_rows - len(slots))


def _adapters(chunks: Sequence[Chunk]) -> dict[int, SlotLease]:
    adapters: dict[int, SlotLease] = {}
    for chunk in chunks:
        if chunk.adapter is not None:
            known = adapters.setdefault(chunk.adapter.slot, chunk.adapter)
            if known != chunk.adapter:
                raise EngineError(f"adapter slot {known.slot} has two owners in one step: {known} and {chunk.adapter}")
    return adapters
