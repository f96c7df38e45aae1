"""A step plan as arrays on the host: a row for each token, in the order of adapter slots, the base first.

A row has everything that a kernel needs: token, position, and the places of key and value. The plan has all pages and
slots; they are checked here, before a kernel reads or writes with them. `host_rows` makes tensors of the arrays for a
step that is not a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from manylora.adapters.residency.entry import SlotLease
from manylora.engine.model.decoder import StepRows
from manylora.engine.model.linear import padded_rows
from manylora.engine.scheduling.plan import Chunk, StepPlan
from manylora.errors import EngineError, PageAccountingError
from manylora.kernels.attention_batch import AttentionBatch
from manylora.memory.geometry import PageGeometry

BASE_SLOT = -1
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedStep:
    """T rows of R chunks. All arrays are int32."""

    order: list[int]
    """Place in the plan of each chunk, in the order of the rows. The arrays [R] have this order too."""
    runs: Int32Array
    """[4, R]: the rows of each chunk, as `kernels.attention_batch` has them; their pages are in `tables`."""
    slots: Int32Array
    """[R]: adapter slot of each chunk, ascending; -1 is the base model."""
    adapters: dict[int, SlotLease]
    """The adapters of the step by slot."""
    samples: list[int]
    """Chunks that yield a token, as places in `order`."""
    tokens: Int32Array
    """[T]: token ids; -1 - p stands for the token that the step before put at place p."""
    positions: Int32Array
    """[T]: position of each row."""
    kv_slots: Int32Array
    """[groups, T]: page * page_tokens + offset of each row's key and value."""
    tables: Int32Array
    """[groups, N]: pages of all chunks, one after another."""

    @classmethod
    def nothing(cls, num_groups: int) -> PackedStep:
        """Make a step without chunks. A program that computes it computes only padding."""
        none = np.zeros(0, dtype=np.int32)
        return cls(
            order=[],
            runs=np.zeros((4, 0), dtype=np.int32),
            slots=none,
            tokens=none,
            positions=none,
            adapters={},
            samples=[],
            kv_slots=np.zeros((num_groups, 0), dtype=np.int32),
            tables=np.zeros((num_groups, 1), dtype=np.int32),
        )

    @property
    def num_rows(self) -> int:
        """Number T of rows."""
        return len(self.tokens)

    @property
    def is_decode(self) -> bool:
        """True if each row is a chunk of its own that yields a token."""
        return len(self.samples) == self.num_rows

    @property
    def row_slots(self) -> Int32Array:
        """[T]: adapter slot of each row."""
        return np.repeat(self.slots, self.runs[1])

    @property
    def chunk_rows(self) -> list[int]:
        """First row of each chunk, in the order of the plan."""
        rows: list[int] = self.runs[0, np.argsort(self.order)].tolist()
        return rows

    def last_rows(self) -> Int32Array:
        """Row of the last token of each chunk in `samples`."""
        rows: Int32Array = (self.runs[0] + self.runs[1] - 1)[self.samples]
        return rows


def pack_step(
    plan: StepPlan,
    geometry: PageGeometry,
    num_pages: int,
    sampled_places: Sequence[int | None] = (),
) -> PackedStep:
    """Lay out a step.

    Args:
        plan: At least one chunk, each with at least one token.
        geometry: Geometry of the arena's pages.
        num_pages: Pages of the arena, the zero page included.
        sampled_places: Place of the token of each chunk of the step before; None for a chunk without a token.

    Raises:
        EngineError: The plan has no chunk or an empty one, two digests in one adapter slot, or a token that the step
            before did not yield.
        PageAccountingError: A block table is too short, or names a page that does not exist.
    """
    if not plan.chunks or not all(chunk.token_ids for chunk in plan.chunks):
        raise EngineError(f"step {plan.step} has no chunk, or one without tokens")
    slots = [BASE_SLOT if chunk.adapter is None else chunk.adapter.slot for chunk in plan.chunks]
    order = sorted(range(len(slots)), key=slots.__getitem__)
    chunks = [plan.chunks[place] for place in order]
    lengths = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    first_rows = ends - lengths
    num_blocks = -(-(starts + lengths) // np.int32(geometry.page_tokens))
    block_ends = np.cumsum(num_blocks, dtype=np.int32)
    first_blocks = block_ends - num_blocks
    tables = _tables(chunks, num_blocks.tolist(), num_pages)
    positions = np.arange(ends[-1], dtype=np.int32) + np.repeat(starts - first_rows, lengths)
    written = tables[:, np.repeat(first_blocks, lengths) + positions // geometry.page_tokens]
    if written.min() < 1:
        raise PageAccountingError(f"step {plan.step} would write to the zero page")
    return PackedStep(
        order=order,
        runs=np.stack((first_rows, lengths, starts, first_blocks)),
        slots=np.array([slots[place] for place in order], dtype=np.int32),
        adapters=_adapters(chunks),
        samples=[index for index, chunk in enumerate(chunks) if chunk.sample is not None],
        tokens=_tokens(chunks, int(ends[-1]), sampled_places),
        positions=positions,
        kv_slots=written * np.int32(geometry.page_tokens)
        + positions % np.int32(geometry.page_tokens),
        tables=tables,
    )


def _tokens(
    chunks: Sequence[Chunk], num_rows: int, sampled_places: Sequence[int | None]
) -> Int32Array:
    tokens = np.fromiter(
        chain.from_iterable(chunk.token_ids for chunk in chunks), np.int32, num_rows
    )
    if all(chunk.token_source is None for chunk in chunks):
        return tokens
    row = 0
    for chunk in chunks:
        source = chunk.token_source
        if source is not None:
            place = sampled_places[source] if 0 <= source < len(sampled_places) else None
            if place is None or len(chunk.token_ids) != 1:
                raise EngineError(
                    f"a chunk takes the token of chunk {source} of a step with {len(sampled_places)} chunks, which "
                    "does not yield it"
                )
            tokens[row] = -1 - place
        row += len(chunk.token_ids)
    return tokens


def _tables(chunks: Sequence[Chunk], num_blocks: Sequence[int], num_pages: int) -> Int32Array:
    """Pages of all chunks by layer group, [groups, N]."""
    tables = [
        np.concatenate(
            [
                chunk.block_table[group][:count]
                for chunk, count in zip(chunks, num_blocks, strict=True)
            ]
        )
        for group in range(len(chunks[0].block_table))
    ]
    if any(len(table) != sum(num_blocks) for table in tables):
        raise PageAccountingError("a block table is too short for its chunk")
    joined = np.stack(tables).astype(np.int32, copy=False)
    if joined.min() < 0 or joined.max() >= num_pages:
        raise PageAccountingError(f"a block table names a page outside 0 to {num_pages - 1}")
    return joined


def _adapters(chunks: Sequence[Chunk]) -> dict[int, SlotLease]:
    adapters: dict[int, SlotLease] = {}
    for chunk in chunks:
        if chunk.adapter is not None:
            known = adapters.setdefault(chunk.adapter.slot, chunk.adapter)
            if known != chunk.adapter:
                raise EngineError(
                    f"adapter slot {known.slot} has two owners in one step: {known} and {chunk.adapter}"
                )
    return adapters


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
