"""Small arrays go to a device in one copy."""

import numpy as np
import torch

from implementations import CPU
from manylora.kernels.packed_copy import ALIGNMENT, copy_in_one


def test_arrays_keep_their_shapes_dtypes_and_numbers() -> None:
    arrays: list[np.ndarray] = [
        np.arange(7, dtype=np.int32),
        np.empty(0, dtype=np.int64),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.empty((0, 5), dtype=np.int32),
        np.array([-(2**40), 5], dtype=np.int64),
    ]
    tensors = copy_in_one(arrays, CPU)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.is_contiguous()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    starts = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
    assert [start % ALIGNMENT for start in starts] == [0] * 5


def test_they_get_to_another_device() -> None:
    first, second = copy_in_one(
        [np.zeros(3, dtype=np.int32), np.zeros((2, 2), dtype=np.int64)], torch.device("meta")
    )
    assert (first.shape, first.dtype, first.device.type) == ((3,), torch.int32, "meta")
    assert (second.shape, second.dtype) == ((2, 2), torch.int64)
