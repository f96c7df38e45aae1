"""What rotary embedding is: the check of its operands, and the oracle in float64 for tests."""

from __future__ import annotations

import torch

from weft.kernels.checks import expect


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
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    for x in (q, k):
        wide = x.double()
        x.copy_(wide * cos + wide.roll(x.shape[2] // 2, -1) * sin)


def both_halves(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of D / 2 pairs, [T, D / 2], as factors of the D elements that they turn, [T, D]."""
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def check_operands(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Check what a call to `rope` was given.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    num_tokens, _, head_dim = q.shape
    expect("k", k, (num_tokens, None, head_dim), q.dtype, q.device)
    expect("cos", cos, (num_tokens, head_dim), torch.float32, q.device)
    expect("sin", sin, cos.shape, torch.float32, q.device)
