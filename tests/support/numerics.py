"""How close results must come to what they are compared with, by dtype."""

from __future__ import annotations

import torch

TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 3e-2, "atol": 2e-2},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}
ROW_TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2.0**-7}
"""Of a kernel and its oracle; bfloat16 allows for the truncating stores of Triton's interpreter."""


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """Compare within the tolerance of `dtype` (default: that of `actual`)."""
    tolerance = TOLERANCES[dtype or actual.dtype]
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=tolerance["rtol"], atol=tolerance["atol"]
    )


def assert_rows_close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    """Compare along the last dimension, relative to each row's largest magnitude; nothing may be NaN or infinite."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    actual, expected, dtype = actual.double().cpu(), expected.double().cpu(), actual.dtype
    assert bool(torch.isfinite(expected).all())
    assert bool(torch.isfinite(actual).all()), (
        f"{int((~torch.isfinite(actual)).sum())} values are not finite"
    )
    magnitude = expected.abs().amax(-1, keepdim=True).clamp(min=1e-3)
    error = ((actual - expected).abs() / magnitude).max().item() if actual.numel() else 0.0
    assert error <= scale * ROW_TOLERANCES[dtype], f"relative error {error:.2e}"


def assert_rows_match(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare where `expected` is finite; NaN and infinities must be in the same places."""
    finite = torch.isfinite(expected)
    torch.testing.assert_close(actual[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True)
    assert_rows_close(actual.where(finite, 0), expected.where(finite, 0))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of its elements as integers, which compare NaN as well."""
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, elements of the last dimension apart."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
