"""Rotary embedding on the CPU, computed in float32."""

from __future__ import annotations

import torch

from weft.kernels.checks import expect
from weft.kernels.views import distance_within_storage


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate queries and keys by their positions, first half of a head against the second (RoFormer, arXiv:2104.09864).

    Semantics:
        for x in (q, k), i in range(D), with the other half's element j = (i + D / 2) % D:
            x[t, h, i] = x[t, h, i] * cos[t, i] + x[t, h, j] * sin[t, i]

    Args:
        q: [T, Hq, D]. Mutated.
        k: [T, Hkv, D], dtype of q. Mutated.
        cos: [T, D], float32, from `both_halves`: at each token's position, with the model's attention scaling
            multiplied in.
        sin: Like cos.

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


def check_operands(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Check what a call to `rope` was given.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    num_tokens, _, head_dim = q.shape
    expect("k", k, (num_tokens, None, head_dim), q.dtype, q.device)
    expect("cos", cos, (num_tokens, head_dim), torch.float32, q.device)
    expect("sin", sin, cos.shape, torch.float32, q.device)


def both_halves(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of D / 2 pairs, [T, D / 2], as factors of the D elements that they turn, [T, D]."""
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
