"""Checks every value of a LoRA file: NaN, infinities and absurd magnitudes would spoil a batch.

It works on bit patterns in bounded windows, so it needs little memory and no float type that numpy lacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import BufferedReader
from typing import Any

import numpy as np

from manylora.adapters.checkpoint.findings import Findings
from manylora.adapters.checkpoint.safetensors_header import TensorEntry
from manylora.errors import AdapterFormatError

WINDOW_BYTES = 4 << 20
MAX_MAGNITUDE = 1e4
_DIVERGED = "The training has probably diverged: take an earlier checkpoint"


_FLOAT32_LIMIT = int(np.float32(MAX_MAGNITUDE).view(np.uint32))
_FORMATS: dict[str, tuple[np.dtype[Any], int, int]] = {
    "F32": (np.dtype("<u4"), _FLOAT32_LIMIT, 0x7F800000),
    "BF16": (np.dtype("<u2"), _FLOAT32_LIMIT >> 16, 0x7F80),
    "F16": (np.dtype("<u2"), int(np.float16(MAX_MAGNITUDE).view(np.uint16)), 0x7C00),
}
"""Unsigned integers of its size, bit pattern of the largest allowed magnitude, and that of infinity, by dtype. Without
the sign bit, larger bit patterns are larger numbers, then infinity, then NaN."""


def scan_values(
    file: BufferedReader, tensors: Iterable[TensorEntry], findings: Findings
) -> frozenset[str]:
    """Read the tensors' bytes once and check each value, in each tensor up to the first wrong one.

    It notes values that are NaN or infinite (weights.non_finite) or beyond 1e4 (weights.value_too_large), and a file
    that ends early (weights.truncated).

    Returns:
        Names of the tensors with zeros only.
    """
    window = memoryview(bytearray(WINDOW_BYTES))
    return frozenset(
        tensor.name
        for tensor in tensors
        if findings.attempt(_scan_tensor, file, tensor, window) == 0
    )


def _scan_tensor(file: BufferedReader, tensor: TensorEntry, window: memoryview) -> int:
    """Check a tensor and return the bit pattern of its largest magnitude."""
    file.seek(tensor.start)
    largest = 0
    for done in range(0, tensor.end - tensor.start, WINDOW_BYTES):
        piece = window[: min(WINDOW_BYTES, tensor.end - tensor.start - done)]
        if file.readinto(piece) != len(piece):  # fewer only at the end of the file
            message = f"The file ends inside {tensor.name}."
            raise AdapterFormatError(message, code="weights.truncated", hint="Upload it again.")
        largest = max(largest, _check_window(tensor, piece, done))
    return largest


def _check_window(tensor: TensorEntry, piece: memoryview, done: int) -> int:
    """Check a window and return the bit pattern of its largest magnitude; 0 if all values are zero."""
    dtype, limit_bits, infinity_bits = _FORMATS[tensor.dtype]
    magnitudes = np.frombuffer(piece, dtype) & (np.iinfo(dtype).max >> 1)
    largest = int(magnitudes.max())
    if largest <= limit_bits:
        return largest
    first = int(np.argmax(magnitudes > limit_bits))
    element = done // dtype.itemsize + first
    index = [int(i) for i in np.unravel_index(element, tensor.shape)]
    if int(magnitudes[first]) >= infinity_bits:
        message = f"Tensor {tensor.name} holds NaN or infinity at {index}; expected finite numbers."
        raise AdapterFormatError(
            message, code="weights.non_finite", param=tensor.name, hint=f"{_DIVERGED}."
        )
    message = (
        f"Tensor {tensor.name} holds a number beyond {MAX_MAGNITUDE:g} in magnitude at {index}."
    )
    hint = f"{_DIVERGED}, or move the factor into lora_alpha."
    raise AdapterFormatError(message, code="weights.value_too_large", param=tensor.name, hint=hint)
