"""Tensors that are views of one storage, and so may be seen as one."""

from __future__ import annotations

import torch


def distance_within_storage(first: torch.Tensor, second: torch.Tensor) -> int | None:
    """Elements from the start of `first` to that of `second`; None unless they share storage and strides.

    Equal distances of addresses and of offsets mean that two tensors are views of one storage.
    """
    distance = second.storage_offset() - first.storage_offset()
    if first.stride() != second.stride() or second.data_ptr() - first.data_ptr() != distance * first.element_size():
        return None
    return int(distance)
