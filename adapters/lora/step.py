"""What the decoder and the runner see of adapters: one object per step that adds the deltas at each site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class LoraStep(Protocol):
    """The adapters of one step's rows."""

    def apply(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' deltas at one site, in place.

        Args:
            layer: Decoder layer.
            site: Index into `SITES`.
            x: [T, in_features], the input of the base's linear layer.
            y: [T, sum of the site's widths], its output; rows of the base model stay as they are.
        """


class LoraBatcher(Protocol):
    """Prepares steps."""

    def prepare(self, row_slots: Sequence[int], /) -> LoraStep | None:
        """Prepare the adapters of a step, once for all layers.

        Args:
            row_slots: Adapter slot of each row, ascending, -1 (the base model) first.

        Returns:
            None when no row's adapter changes anything.
        """
