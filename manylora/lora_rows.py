"""Numbers of the rows of LoRA weights in pages, which memory, adapters and all kernels share.

The C++ kernels have the same constants; a test compares them.
"""

from __future__ import annotations

GROUP_ROWS = 8
"""Rank rows in a row group, the unit packed into pages."""
PITCH_BYTES = 256
"""Rows inside a page start at multiples of this; table offsets count in it."""
MAX_RANK = 256
"""Largest rank for which the kernels have room."""


def row_pitch_bytes(features: int, dtype_bytes: int) -> int:
    """Bytes from one LoRA row of `features` elements to the next: padded to `PITCH_BYTES`."""
    return -(-features * dtype_bytes // PITCH_BYTES) * PITCH_BYTES
