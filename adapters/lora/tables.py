"""Where the weights of each resident adapter lie: per adapter slot, static tensors that the kernels read.

Knows which rows are where, not who owns a slot; that is residency's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from weft.adapters.base_shape import BaseShape
from weft.adapters.lora.layout import LoraLayout
from weft.memory.arena import mark
from weft.memory.geometry import GROUP_ROWS, PITCH_BYTES, PageGeometry

MAX_OFFSET = 2**31 - 1
NUM_STAGED = 64
"""More adapters than arrive during a step, so that none waits for one."""


class AdapterTables:
    """One row per adapter slot, in tensors whose addresses never change.

    Args:
        slots: Rows.
        base: Shape of the base model.
        max_rank: Largest rank, a multiple of 8.
        geometry: Sizes of a page.
        device: Where the kernels run.
    """

    def __init__(
        self, slots: int, base: BaseShape, max_rank: int, geometry: PageGeometry, device: torch.device
    ) -> None:
        self.slots = slots
        self.base = base
        self.max_rank = max_rank
        self.geometry = geometry
        per_module = (slots, base.num_layers, len(base.modules))
        host_offsets = torch.zeros((*per_module, 2, max_rank // GROUP_ROWS), dtype=torch.int32)
        host_ranks = torch.zeros(per_module, dtype=torch.int32)
        host_scalings = torch.zeros(per_module, dtype=torch.float32)
        self.offsets = host_offsets.to(device)
        """int32 [slots, layers, modules, 2 (A, B), max_rank / 8]: start of each row group in the arena, in units of
        256 bytes."""
        self.ranks = host_ranks.to(device)
        """int32 [slots, layers, modules], padded to a multiple of 8; 0 where the adapter changes nothing."""
        self.scalings = host_scalings.to(device)
        """float32 [slots, layers, modules]."""
        self.host_offsets: npt.NDArray[np.int32] = host_offsets.numpy()
        """`offsets` on the host, for building batches; the same memory on a CPU."""
        self.host_ranks: npt.NDArray[np.int32] = host_ranks.numpy()
        """`ranks` on the host."""
        self.host_scalings: npt.NDArray[np.float32] = host_scalings.numpy()
        """`scalings` on the host."""
        num_words = sum(table[0].size for table in self._host_tables)
        self._staging = None if device.type == "cpu" else StagingRing(num_words, device)

    def write(
        self,
        slot: int,
        layout: LoraLayout,
        pages: Sequence[int],
        ranks: Mapping[tuple[int, int], int],
        scalings: Mapping[tuple[int, int], float],
    ) -> None:
        """Describe an adapter whose pages are in the arena, to steps that the calling thread launches later.

        No step that uses the slot may run. On a GPU, none is waited for.

        Args:
            slot: The row to overwrite.
            layout: Where the row groups lie among the adapter's pages.
            pages: Arena pages, `layout.num_pages` of them, in the layout's order.
            ranks: True rank by (layer, module index).
            scalings: Scaling by (layer, module index).

        Raises:
            ValueError: If a rank exceeds `max_rank`, the pages do not match the layout, or an offset overflows.
        """
        if len(pages) != layout.num_pages:
            raise ValueError(f"the layout has {layout.num_pages} pages, got {len(pages)}")
        largest = max(ranks.values(), default=0)
        if largest > self.max_rank:
            raise ValueError(f"rank {largest} exceeds the tables' {self.max_rank}")
        for table in self._host_tables:
            table[slot] = 0
        for (layer, module), rank in ranks.items():
            self.host_ranks[slot, layer, module] = -(-rank // GROUP_ROWS) * GROUP_ROWS
            self.host_scalings[slot, layer, module] = scalings[layer, module]
        if layout.groups:
            layer_column, module_column, part, group, page, units = layout.columns
            starts = np.asarray(pages, dtype=np.int64)[page] * (self.geometry.page_bytes // PITCH_BYTES) + units
            if starts.max() > MAX_OFFSET:
                raise ValueError(f"offset {starts.max()} exceeds int32: the arena is larger than 512 GiB")
            self.host_offsets[slot, layer_column, module_column, part, group] = starts
        if self._staging is not None:
            rows = (torch.from_numpy(table[slot]) for table in self._host_tables)
            targets = (self.offsets[slot], self.ranks[slot], self.scalings[slot])
            self._staging.copy(list(zip(targets, rows, strict=True)))

    def touched(self, slots: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Bool [layers, modules]: what any of the adapters in `slots` changes."""
        return np.logical_or.reduce(self.host_ranks[list(slots)] > 0, axis=0)  # type: ignore[no-any-return]

    @property
    def _host_tables(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        return self.host_offsets, self.host_ranks, self.host_scalings


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
        self._rows = torch.empty((NUM_STAGED, num_words), dtype=torch.int32, pin_memory=self._is_gpu)
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_STAGED
        """When the last copy from each row is done."""
        self._next = 0

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Launch copies. Their sources may change as soon as this returns.

        Args:
            pairs: Targets on the device, and for each its source on the host: of the same shape and dtype, contiguous,
                numbers of 4 bytes, all together at most a row.
        """
        index, self._next = self._next, (self._next + 1) % NUM_STAGED
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
