"""Host rows through which the tables of adapters reach a GPU while a step runs. Knows nothing of adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.memory.arena import mark

NUM_ROWS = 64
"""More adapters than arrive during a step, so that none waits for one."""


class StagingRing:
    """Page-locked rows that are copied in turn.

    Copies run on the calling thread's stream, which is that of the steps: what it launches later sees them, and it does
    not wait for what it launched before.

    Args:
        num_words: Numbers of 4 bytes in a row.
        device: Where copies go.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._device = device
        self._rows = torch.empty((NUM_ROWS, num_words), dtype=torch.int32, pin_memory=self._is_gpu)
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_ROWS
        """When the last copy from each row is done."""
        self._next = 0

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Launch copies. Their sources may change as soon as this returns.

        Args:
            pairs: Targets on the device, and for each its source on the host: of the same shape and dtype, contiguous,
                numbers of 4 bytes, all together at most a row.
        """
        index, self._next = self._next, (self._next + 1) % NUM_ROWS
        last_copy = self._copied[index]
        if last_copy is not None:
            last_copy.synchronize()  # else a copy that has not begun would read what is staged now
        start = 0
        for target, source in pairs:
            staged = self._rows[index, start : start + source.numel()].view(source.dtype).view(source.shape)
            staged.copy_(source)
            target.copy_(staged, non_blocking=True)
            start += source.numel()
        self._copied[index] = mark(self._device) if self._is_gpu else None
