"""Gates of every size, each with the same values to let through."""

from __future__ import annotations

import torch

GATES = (0.0, -0.0, 1.0, -1.0, 20.0, -20.0, 88.0, -88.0, 104.0, -104.0, 200.0, -200.0, 3e38, -3e38)
NOT_FINITE = (float("inf"), float("-inf"), float("nan"))


def extreme_gates(dtype: torch.dtype) -> torch.Tensor:
    """One row for each gate; some of what the gates let through is not finite either."""
    gates = torch.tensor([*GATES, *NOT_FINITE])[:, None].expand(-1, 21)
    values = torch.cat((torch.linspace(-3, 3, 20), torch.tensor([float("nan")])))
    return torch.cat((gates, values.expand(len(gates), -1)), 1).to(dtype)
