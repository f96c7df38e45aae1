"""Where the keys and values of one step's tokens go, worked out once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False)
class KvSlots:
    """The slot mapping of a step with its division into pages done. Valid for every layer of one layer group."""

    mapping: torch.Tensor
    """[T], int64: page * page_tokens + offset of each token; -1 is not stored."""
    rows: torch.Tensor | None
    """[S], int64: tokens that are stored; None where all are."""
    pages: torch.Tensor
    """[S], int64: page of each stored token."""
    offsets: torch.Tensor
    """[S], int64: its place in the page."""

    @classmethod
    def build(cls, slot_mapping: Sequence[int] | np.ndarray, page_tokens: int, device: torch.device) -> KvSlots:
        """Work out pages and offsets on the host and move them to `device`.

        Args:
            slot_mapping: [T]: page * page_tokens + offset, or -1.
            page_tokens: Tokens per page.
            device: Where the kernels run.
        """
        mapping = np.asarray(slot_mapping, dtype=np.int64)
        rows = np.flatnonzero(mapping >= 0)
        stored = mapping[rows]
        pages, offsets = np.divmod(stored, page_tokens)
        return cls(
            mapping=torch.from_numpy(mapping).to(device),
            rows=None if rows.size == mapping.size else torch.from_numpy(rows).to(device),
            pages=torch.from_numpy(pages).to(device),
            offsets=torch.from_numpy(offsets).to(device),
        )
