"""Uninitialised memory made harmful, so that a read of it shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """While it lasts, memory that torch hands out uninitialised holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.zeros(1).new_empty(100).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)
