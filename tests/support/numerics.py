"""Tolerances by dtype, in one table."""

from __future__ import annotations

import torch

TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 3e-2, "atol": 2e-2},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare within the tolerance of `dtype` (default: that of `actual`)."""
    tolerance = TOLERANCES[dtype or actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance["rtol"], atol=tolerance["atol"])
