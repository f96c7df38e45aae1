"""Rotary embedding on the CPU, computed in float32."""

from __future__ import annotations

import torch

from weft.kernels.rope_reference import check_operands
from weft.kernels.views import distance_within_storage


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate queries and keys by their positions, in place.

    Semantics and arguments: `weft.kernels.rope_reference.rope`.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    check_operands(q, k, cos, sin)
    cosines, sines = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, D]
    joined = _joined(q, k)
    for x in (q, k) if joined is None else (joined,):
        wide = x if x.dtype == torch.float32 else x.float()
        swapped = wide.roll(x.shape[-1] // 2, -1)  # the halves of each head change places
        wide.mul_(cosines).addcmul_(swapped, sines)
        if wide is not x:
            x.copy_(wide)


def _joined(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    # Queries and keys that are neighbours in a fused projection are rotated as one tensor, with half the calls.
    if distance_within_storage(q, k) != q.shape[1] * q.stride(1):
        return None
    return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())
