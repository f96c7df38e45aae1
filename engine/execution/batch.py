"""A packed step as the tensors that kernels on a CPU read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.adapters.residency.slots import SlotLease
from weft.engine.execution.packed_step import PackedStep, pack_step
from weft.engine.model.decoder import StepRows
from weft.engine.model.linear import padded_rows
from weft.engine.scheduling.plan import Chunk, StepPlan
from weft.kernels.attention_batch import AttentionBatch
from weft.memory.geometry import PageGeometry


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
    step = pack_step(plan, geometry, num_pages)
    num_rows = step.num_rows
    if device.type == "cpu":
        num_rows = max(padded_rows(num_rows), 2)
    rows = np.zeros((2 + len(step.kv_slots), num_rows), dtype=np.int64)
    rows[2:, step.num_rows :] = -1
    rows[:, : step.num_rows] = np.stack((step.tokens, step.positions, *step.kv_slots))
    tensor = torch.from_numpy(rows).to(device)
    chunks = [plan.chunks[place] for place in step.order]
    slots = step.row_slots.tolist()
    return Batch(
        rows=StepRows(
            tokens=tensor[0],
            positions=tensor[1],
            slot_mapping=tuple(tensor[2:]),
            attention=_attention(step, chunks, geometry, device),
        ),
        row_slots=slots + slots[-1:] * (num_rows - len(slots)),
        adapters=step.adapters,
        first_rows=step.first_rows[np.argsort(step.order)].tolist(),
    )


def _attention(
    step: PackedStep, chunks: Sequence[Chunk], geometry: PageGeometry, device: torch.device
) -> tuple[AttentionBatch, ...]:
    lengths, contexts = step.lengths.tolist(), (step.starts + step.lengths).tolist()
    return tuple(
        AttentionBatch.build(
            [chunk.block_table[group] for chunk in chunks], lengths, contexts, device, geometry.page_tokens
        )
        for group in range(geometry.num_groups)
    )
