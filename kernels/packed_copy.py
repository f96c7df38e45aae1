"""Copy of several small arrays to a device at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
"""Each array starts at a multiple of this many bytes, so that a kernel may read it in wide loads."""


def copy_in_one(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on `device`, of the same shapes and dtypes, in memory that they share.

    A GPU gets them in one copy, and the host does not wait for it.
    """
    ends = np.cumsum(
        [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays], dtype=np.int64
    ).tolist()
    starts = [0, *ends[:-1]]
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    packed = host.numpy()
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.nbytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
    moved = host.to(device, non_blocking=True)
    return [
        moved[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]
