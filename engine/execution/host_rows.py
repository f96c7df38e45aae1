"""A packed step as tensors for kernels on a CPU."""

from __future__ import annotations

import numpy as np
import torch

from manylora.engine.execution.packed_step import PackedStep
from manylora.engine.model.decoder import StepRows
from manylora.engine.model.linear import padded_rows
from manylora.kernels.attention_batch import AttentionBatch


def host_rows(
    step: PackedStep, page_tokens: int, device: torch.device, sampled: torch.Tensor | None = None
) -> StepRows:
    """Make the rows of a step, and padding.

    On a CPU a step has at least two rows: a matrix product of one row rounds differently from one of several, and a
    token must not depend on the rest of the batch. Large steps are padded to a number of rows for which packed weights
    need no padding of their own (`padded_rows`). Padding rows attend to nothing and are not stored.

    Args:
        step: The rows.
        page_tokens: Tokens of a page.
        device: Where the decoder runs.
        sampled: Tokens of the step before, which rows may name; None if there was none.
    """
    num_rows = step.num_rows
    if device.type == "cpu":
        num_rows = max(padded_rows(num_rows), 2)
    rows = np.zeros((2 + len(step.kv_slots), num_rows), dtype=np.int64)
    rows[2:, step.num_rows :] = -1
    rows[:, : step.num_rows] = np.stack((step.tokens, step.positions, *step.kv_slots))
    tensor = torch.from_numpy(rows).to(device)
    return StepRows(
        tokens=tensor[0],
        positions=tensor[1],
        slot_mapping=tuple(tensor[2:]),
        attention=tuple(
            AttentionBatch.build(table, step.runs, page_tokens, device) for table in step.tables
        ),
        sampled=sampled if step.tokens.min() < 0 else None,
    )


def host_slots(step: PackedStep, rows: StepRows) -> list[int]:
    """Adapter slot of each row, ascending; -1 is the base model. Padding belongs to the last chunk's adapter."""
    padding = len(rows.tokens) - step.num_rows
    slots: list[int] = np.pad(step.row_slots, (0, padding), mode="edge").tolist()
    return slots
