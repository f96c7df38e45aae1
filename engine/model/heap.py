"""Keeps the memory that a step frees for the next one. For glibc; an old one does as it did.

A step over a prompt allocates and frees large blocks in each layer. The C library gives blocks above 32 MiB back to the
operating system at once, which hands them out again page by page, zeroed. On a virtual machine that takes longer than
filling them; a step over 2,000 tokens of a 0.5B model spent a third of its time so. Steps of 512 tokens of such a model
need no block so large; those of a larger model do.
"""

from __future__ import annotations

import ctypes
import platform

MMAP_THRESHOLD_BYTES = 256 << 20
"""Blocks up to this size come from the heap."""
TRIM_THRESHOLD_BYTES = 1 << 30
"""The heap shrinks when so much of its end is free."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Have freed blocks stay with this process; returns whether the C library knows how."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    is_kept = bool(libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES))  # an older one refuses more than 32 MiB
    return is_kept and bool(libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
