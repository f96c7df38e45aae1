"""What rotary embedding is: the check of its operands, and the oracle in float64 for tests."""

from __future__ import annotations

import torch

from weft.kernels.checks import expect


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate queries and keys by their positions, first half of a head against the second (RoFormer, arXiv:2104.09864).

    Semantics:
        for x in (q, k), i in range(D / 2), with c, s = cos[t, i], sin[t, i]:
            x[t, h, i], x[t, h, i + D/2] = x[t, h, i] * c - x[t, h, i + D/2] * s, x[t, h, i + D/2] * c + x[t, h, i] * s

    Args:
        q: [T, Hq, D]. Mutated.
        k: [T, Hkv, D], dtype of q. Mutated.
        cos: [T, D / 2], float32: at each token's position, with the model's attention scaling multiplied in.
        sin: Like cos.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    check_operands(q, k, cos, sin)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    for x in (q, k):
        first, second = x.double().chunk(2, dim=-1)
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def check_operands(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Check what a call to `rope` was given.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    num_tokens, _, head_dim = q.shape
    expect("k", k, (num_tokens, None, head_dim), q.dtype, q.device)
    expect("cos", cos, (num_tokens, head_dim // 2), torch.float32, q.device)
    expect("sin", sin, cos.shape, torch.float32, q.device)
