"""The oracle of rotary embedding, in float64."""

from __future__ import annotations

import torch

from weft.kernels.plain.rows import check_rope


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """`weft.kernels.plain.rows.rope` states what it computes."""
    check_rope(q, k, cos, sin)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    for x in (q, k):
        wide = x.double()
        x.copy_(wide * cos + wide.roll(x.shape[2] // 2, -1) * sin)
