"""A packed step as tensors for kernels on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manylora.engine.execution.packed_step import PackedStep, pack_step
from manylora.engine.model.decoder import StepRows
from manylora.engine.model.linear import padded_rows
from manylora.engine.scheduling.plan import Chunk, StepPlan
from manylora.kernels.attention_batch import AttentionBatch
from manylora.memory.geometry import PageGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step on the device."""

    step: PackedStep
    rows: StepRows
    """Rows of `step`, and padding."""
    row_slots: list[int]
    """Adapter slot of each row, ascending; -1 is the base model."""


def build_batch(
    plan: StepPlan,
    geometry: PageGeometry,
    num_pages: int,
    device: torch.device,
    sampled: Sequence[int | None] = (),
) -> Batch:
    """Build the tensors of one step.

    On a CPU a step has at least two rows: a matrix product of one row rounds differently from one of several, and a
    token must not depend on the rest of the batch. Large steps are padded to a number of rows for which packed weights
    need no padding of their own (`padded_rows`). Padding rows belong to the last chunk's adapter, attend to nothing and
    are not stored.

    Args:
        plan: At least one chunk, each with at least one token.
        geometry: Geometry of the arena's pages.
        num_pages: Pages of the arena, the zero page included.
        device: Where the decoder runs.
        sampled: Token of each chunk of the step before; None for a chunk without a token.

    Raises:
        EngineError: The plan has no chunk or an empty one, two digests in one adapter slot, or a token of a chunk that
            the step before did not have.
        PageAccountingError: A block table is too short, or names a page that does not exist.
    """
    step = pack_step(plan, geometry, num_pages, range(len(sampled)))
    num_rows = step.num_rows
    if device.type == "cpu":
        num_rows = max(padded_rows(num_rows), 2)
    rows = np.zeros((2 + len(step.kv_slots), num_rows), dtype=np.int64)
    rows[2:, step.num_rows :] = -1
    rows[:, : step.num_rows] = np.stack((step.tokens, step.positions, *step.kv_slots))
    tensor = torch.from_numpy(rows).to(device)
    chunks = [plan.chunks[place] for place in step.order]
    slots = step.row_slots.tolist()
    before = None
    if step.tokens.min() < 0:
        # A row without a token ends its request, and its results in this step are dropped.
        before = torch.tensor(
            [-1 if token is None else token for token in sampled], dtype=torch.int32, device=device
        )
    return Batch(
        step=step,
        rows=StepRows(
            tokens=tensor[0],
            positions=tensor[1],
            slot_mapping=tuple(tensor[2:]),
            attention=_attention(step, chunks, geometry, device),
            sampled=before,
        ),
        row_slots=slots + slots[-1:] * (num_rows - len(slots)),
    )


def _attention(
    step: PackedStep, chunks: Sequence[Chunk], geometry: PageGeometry, device: torch.device
) -> tuple[AttentionBatch, ...]:
    lengths = step.lengths.tolist()
    contexts = (step.starts + step.lengths).tolist()
    return tuple(
        AttentionBatch.build(
            [chunk.block_table[group] for chunk in chunks],
            lengths,
            contexts,
            device,
            geometry.page_tokens,
        )
        for group in range(geometry.num_groups)
    )
