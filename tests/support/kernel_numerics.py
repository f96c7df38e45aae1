"""How close a kernel must come to its oracle: error relative to the largest magnitude of each row."""

from __future__ import annotations

import torch

ROW_TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2.0**-7}
"""bfloat16 allows for the truncating stores of Triton's interpreter."""


def assert_rows_close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    """Compare along the last dimension; nothing may be NaN or infinite."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    actual, expected, dtype = actual.double().cpu(), expected.double().cpu(), actual.dtype
    assert bool(torch.isfinite(expected).all())
    assert bool(torch.isfinite(actual).all()), f"{int((~torch.isfinite(actual)).sum())} values are not finite"
    magnitude = expected.abs().amax(-1, keepdim=True).clamp(min=1e-3)
    error = ((actual - expected).abs() / magnitude).max().item() if actual.numel() else 0.0
    assert error <= scale * ROW_TOLERANCES[dtype], f"relative error {error:.2e}"


def assert_rows_match(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare where `expected` is finite; NaN and infinities must be in the same places."""
    finite = torch.isfinite(expected)
    torch.testing.assert_close(actual[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True)
    assert_rows_close(actual.where(finite, 0), expected.where(finite, 0))
