"""The check of operands that all launchers share. It knows shapes, dtypes and devices, not their meaning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def expect(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Check one operand.

    Args:
        name: Name of the operand in the message.
        tensor: The operand.
        shape: Extent of each dimension; None fits any.
        dtype: The dtype it must have; None fits any.
        device: The device it must be on; None fits any.

    Raises:
        ValueError: Something does not fit; the message says what was expected and what came.
    """
    if not _fits(tensor.shape, shape):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")


def expect_that(name: str, holds: bool, expected: str, got: object) -> None:
    """Check a condition that no shape can state.

    Raises:
        ValueError: It does not hold.
    """
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def _fits(got: Sequence[int], shape: Sequence[int | None]) -> bool:
    if got == shape:
        return True
    if len(got) != len(shape):
        return False
    for want, have in zip(shape, got, strict=True):  # noqa: SIM110 - a generator costs a microsecond per call
        if want is not None and want != have:
            return False
    return True
