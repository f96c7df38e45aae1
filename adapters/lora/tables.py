"""Places of the weights of each resident adapter: static tensors by adapter slot, which the kernels read.

Knows the places of rows, not the owners of slots, which residency knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from manylora.adapters.base_shape import BaseShape
from manylora.adapters.lora.layout import LoraLayout
from manylora.lora_rows import GROUP_ROWS, PITCH_BYTES
from manylora.memory.geometry import PageGeometry

MAX_OFFSET = 2**31 - 1


class AdapterTables:
    """One row per adapter slot, in tensors whose addresses never change.

    Args:
        slots: Number of rows.
        base: Shape of the base model.
        max_rank: Largest rank, a multiple of 8.
        geometry: Sizes of a page.
        device: Where the kernels run.
    """

    def __init__(
        self,
        slots: int,
        base: BaseShape,
        max_rank: int,
        geometry: PageGeometry,
        device: torch.device,
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
        """int32 [slots, layers, modules]: ranks, padded to a multiple of 8; 0 where the adapter changes nothing."""
        self.scalings = host_scalings.to(device)
        """float32 [slots, layers, modules]: factors of B @ A."""
        self.host_offsets: npt.NDArray[np.int32] = host_offsets.numpy()
        """`offsets` on the host, for building batches; the same memory on a CPU."""
        self.host_ranks: npt.NDArray[np.int32] = host_ranks.numpy()
        """`ranks` on the host."""
        self.host_scalings: npt.NDArray[np.float32] = host_scalings.numpy()
        """`scalings` on the host."""

    def write(
        self,
        slot: int,
        layout: LoraLayout,
        pages: Sequence[int],
        ranks: Mapping[tuple[int, int], int],
        scalings: Mapping[tuple[int, int], float],
    ) -> None:
        """Write the row of an adapter whose pages are in the arena, for steps that the calling thread launches later.

        No step that uses the slot may run. On a GPU, this waits for no step.

        Args:
            slot: Row to overwrite.
            layout: Places of the row groups in the adapter's pages.
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
        for table in (self.host_offsets, self.host_ranks, self.host_scalings):
            table[slot] = 0
        for (layer, module), rank in ranks.items():
            self.host_ranks[slot, layer, module] = -(-rank // GROUP_ROWS) * GROUP_ROWS
            self.host_scalings[slot, layer, module] = scalings[layer, module]
        if layout.runs:
            layer_column, module_column, part, group, page, units = layout.groups
            starts = (
                np.asarray(pages, dtype=np.int64)[page] * (self.geometry.page_bytes // PITCH_BYTES)
                + units
            )
            if starts.max() > MAX_OFFSET:
                raise ValueError(
                    f"offset {starts.max()} exceeds int32: the arena is larger than 512 GiB"
                )
            self.host_offsets[slot, layer_column, module_column, part, group] = starts
        self._publish(slot)

    def touched(self, slots: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Bool [layers, modules]: true if any of the adapters in `slots` changes the module."""
        return np.logical_or.reduce(self.host_ranks[list(slots)] > 0, axis=0)  # type: ignore[no-any-return]

    def _publish(self, slot: int) -> None:
        """Launch the copies of a row on the calling thread's stream, which is that of the steps.

        Later launches see the row, and no earlier launch is waited for: torch reuses pinned memory only after its copy
        has ended.
        """
        if self.ranks.device.type == "cpu":
            return
        hosts = (self.host_offsets, self.host_ranks, self.host_scalings)
        for table, host in zip((self.offsets, self.ranks, self.scalings), hosts, strict=True):
            row = torch.from_numpy(host[slot])
            staged = torch.empty(
                row.shape, dtype=row.dtype, pin_memory=table.device.type == "cuda"
            ).copy_(row)
            table[slot].copy_(staged, non_blocking=True)
