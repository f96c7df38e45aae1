"""Figures of an H200 that were predicted before Manylora ran on a GPU.

`benchmarks/results/nvidia-h200/NOTES.md` says where they come from.
"""

from __future__ import annotations

from typing import NamedTuple

from manylora.benchmarks.report import Figures


class Prediction(NamedTuple):
    """A figure of one case, between two bounds."""

    low: float
    high: float
    of: str = ""
    """The figure of the same case that the bounds are multiples of; empty where they have the case's unit."""

    def bounds(self, found: Figures) -> tuple[float, float]:
        """The bounds in the unit of the case.

        Args:
            found: What the case found.
        """
        unit = found[self.of] if self.of else 1.0
        return self.low * unit, self.high * unit


PREDICTIONS = {
    ("step", "decode, 32 rows, 0 adapters"): Prediction(5.6, 7.5),
    ("step", "decode, 32 rows, 1 adapters"): Prediction(6.2, 8.8),
    ("step", "decode, 32 rows, 32 adapters"): Prediction(6.8, 9.7),
    ("kernels", "LoRA, 32 rows, 1 of rank 16"): Prediction(4 * 6, 4 * 10),
    ("kernels", "LoRA, 32 rows, 32 of rank 16"): Prediction(1.4, 2.5, of="floor"),
    ("kernels", "LoRA, mixed ranks as one rank"): Prediction(1.0, 1.1, of="even"),
    ("kernels", "attention, 32 rows, context 1,024"): Prediction(47, 60),
    ("memory", "copies of 768 KiB"): Prediction(1.0, 1 / 0.85, of="floor"),
    ("memory", "copies of 2048 KiB"): Prediction(1.0, 1 / 0.85, of="floor"),
}
"""By verb and case, in the unit of the case."""
