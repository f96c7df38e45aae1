"""Operations on single rows, on the CPU in torch operators. Their docstrings define the operations for all kernels.

The `check_*` functions check operands for every implementation. Norm and rotation compute in float32 for any dtype,
with fewer operations than torch's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manylora.kernels.checks import expect, expect_that
from manylora.kernels.kv_layer import KvLayer, quantise


def embed(tokens: Tensor, sampled: Tensor | None, table: Tensor) -> Tensor:
    """Look up the embeddings of tokens. The step before may have sampled some of them.

    Semantics:
        token = tokens[t] if tokens[t] >= 0 else max(sampled[-1 - tokens[t]], 0)
        out[t] = table[token]

    Args:
        tokens: [T], int32 or int64, consecutive elements: a token, or -1 - the row of `sampled` that holds it.
        sampled: [R], int32, consecutive elements: tokens, below 0 where none was chosen. None if all tokens are known.
        table: [vocab_size, N], consecutive elements in a row.

    Returns:
        [T, N], dtype of table.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    check_embed(tokens, sampled, table)
    if sampled is not None:
        known = sampled.index_select(0, (-1 - tokens).clamp_(min=0)).clamp_(min=0)
        tokens = torch.where(tokens < 0, known, tokens)
    return torch.nn.functional.embedding(tokens, table)


def check_embed(tokens: Tensor, sampled: Tensor | None, table: Tensor) -> None:
    """Check the operands of `embed`.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    expect("table", table, (None, None))
    expect_that("table", table.stride(1) == 1, "consecutive elements", table.stride())
    check_indices("tokens", tokens, None, table.device)
    if sampled is not None:
        expect("sampled", sampled, (None,), torch.int32, table.device)
        expect_that("sampled", sampled.is_contiguous(), "consecutive elements", sampled.stride())


def check_indices(name: str, indices: Tensor, count: int | None, device: torch.device) -> None:
    """Check a tensor of indices, [count], or of any length.

    Raises:
        ValueError: Its shape, dtype, device or stride does not fit.
    """
    expect(name, indices, (count,), None, device)
    expect_that(
        name, indices.dtype in (torch.int32, torch.int64), "dtype int32 or int64", indices.dtype
    )
    expect_that(name, indices.is_contiguous(), "consecutive elements", indices.stride())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale every vector of the last dimension to unit root mean square, then by `weight` (arXiv:1910.07467).

    Semantics:
        y[..., n] = x[..., n] / sqrt(mean(x[..., :] ** 2) + eps) * weight[n]

    Args:
        x: [T, N] or [T, H, N]; rows and heads may be strided (a slice of a fused projection), vectors may not.
        weight: [N], dtype of x.
        eps: Added to the mean square.

    Returns:
        Normed vectors, of the shape and dtype of x, contiguous, rounded once.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    check_norm(x, weight)
    wide = x.float()
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scales = torch.addcmul(torch.full((1,), eps), norms, norms, value=1 / x.shape[-1]).rsqrt_()
    normed = torch.mul(wide, scales) if wide is x else wide.mul_(scales)
    return normed.mul_(weight).to(x.dtype)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise.

    Semantics:
        new_residual = x + residual                      # rounded to the dtype of x
        normed = rms_norm(new_residual, weight, eps)

    Args:
        x: [T, N], contiguous.
        residual: Like x.
        weight: [N], dtype of x.
        eps: Added to the mean square.

    Returns:
        (normed, new_residual), both like x. Neither input is changed.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    check_add_norm(x, residual, weight)
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual


def check_norm(x: Tensor, weight: Tensor) -> None:
    """Check the operands of `rms_norm`.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    expect_that("x", x.dim() in (2, 3), "two or three dimensions", list(x.shape))
    expect("weight", weight, (x.shape[-1],), x.dtype, x.device)
    expect_that("weight", weight.stride(0) == 1, "consecutive elements", weight.stride())
    expect_that("x", x.stride(-1) == 1, "consecutive elements", x.stride())


def check_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Check the operands of `fused_add_rms_norm`.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    expect("x", x, (None, weight.shape[0]), weight.dtype, weight.device)
    expect("residual", residual, x.shape, x.dtype, x.device)
    expect_that("weight", weight.stride(0) == 1, "consecutive elements", weight.stride())
    expect_that("x", x.is_contiguous(), "contiguous rows", x.stride())
    expect_that("residual", residual.is_contiguous(), "contiguous rows", residual.stride())


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate queries and keys by their positions, first half of a head against the second (RoFormer, arXiv:2104.09864).

    Semantics:
        for x in (q, k), i in range(D), with the other half's element j = (i + D / 2) % D:
            x[t, h, i] = x[t, h, i] * cos[t, i] + x[t, h, j] * sin[t, i]

    Args:
        q: [T, Hq, D], any strides of tokens and heads. Mutated.
        k: [T, Hkv, D], dtype of q. Mutated.
        cos: [T, D], float32, contiguous, from `both_halves`: cosines of each token's position, times the model's
            attention scaling.
        sin: Like cos.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    check_rope(q, k, cos, sin)
    cosines = cos.unsqueeze(1)  # [T, 1, D]
    sines = sin.unsqueeze(1)
    for x in (q, k):
        wide = x if x.dtype == torch.float32 else x.float()
        swapped = wide.roll(x.shape[-1] // 2, -1)  # the halves of each head change places
        wide.mul_(cosines).addcmul_(swapped, sines)
        if wide is not x:
            x.copy_(wide)


def check_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Check the operands of `rope`.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    num_tokens, _, head_dim = q.shape
    expect("k", k, (num_tokens, None, head_dim), q.dtype, q.device)
    expect("cos", cos, (num_tokens, head_dim), torch.float32, q.device)
    expect("sin", sin, cos.shape, torch.float32, q.device)
    expect_that("q", q.stride(2) == 1 == k.stride(2), "consecutive elements", q.stride())
    expect_that("cos", cos.is_contiguous() and sin.is_contiguous(), "contiguous rows", cos.stride())


def both_halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of D / 2 pairs, [T, D / 2], as factors of the D elements that they turn, [T, D]."""
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Multiply each element by the SiLU of its gate.

    Semantics:
        out[t, n] = silu(gate_up[t, n]) * gate_up[t, N + n], silu(x) = x / (1 + exp(-x))

    Args:
        gate_up: [T, 2 * N], contiguous: the gates, then the values.

    Returns:
        [T, N], dtype of gate_up, rounded once; in this implementation the gate is rounded before the product, too.

    Raises:
        ValueError: The shape or stride does not fit.
    """
    check_silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return torch.nn.functional.silu(gate).mul_(up)


def check_silu_and_mul(gate_up: Tensor) -> None:
    """Check the operands of `silu_and_mul`.

    Raises:
        ValueError: The shape or stride does not fit.
    """
    fits = gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0
    expect_that("gate_up", fits, "two dimensions, the second even", list(gate_up.shape))
    expect_that("gate_up", gate_up.is_contiguous(), "contiguous rows", gate_up.stride())


def kv_write(k: Tensor, v: Tensor, kv: KvLayer, slot_mapping: Tensor) -> None:
    """Store the keys and values of a step's tokens in their pages.

    Semantics:
        for t in range(T), slot_mapping[t] >= 0:
            page, offset = divmod(slot_mapping[t], page_tokens)
            if kv.scales is None:
                kv.k[page, :, offset], kv.v[page, :, offset] = k[t], v[t]
            else:
                kv.k[page, :, offset], kv.scales[0][page, :, offset] = quantise(k[t])
                kv.v[page, :, offset], kv.scales[1][page, :, offset] = quantise(v[t])

    Args:
        k: [T, Hkv, D].
        v: Like k.
        kv: The layer's keys and values in the arena, int8 or of the dtype of k. Mutated.
        slot_mapping: [T], int32 or int64, consecutive elements: page * page_tokens + offset of each token. A token
            with -1 is not stored. No slot stands there twice.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    check_kv_write(k, v, kv, slot_mapping)
    rows = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[rows]
    page_tokens = kv.k.shape[2]
    places = slots // page_tokens, slice(None), slots % page_tokens
    for part, (pages, x) in enumerate(((kv.k, k), (kv.v, v))):
        stored = x[rows]  # [S, Hkv, D]
        if kv.scales is not None:
            stored, kv.scales[part][places] = quantise(stored)
        pages[places] = stored


def check_kv_write(k: Tensor, v: Tensor, kv: KvLayer, slot_mapping: Tensor) -> None:
    """Check the operands of `kv_write`.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    num_tokens, heads, head_dim = k.shape
    expect("v", v, k.shape, k.dtype, k.device)
    check_indices("slot_mapping", slot_mapping, num_tokens, k.device)
    expect_that("k", k.stride(2) == 1 == v.stride(2), "consecutive elements", k.stride())
    kv.check((None, heads, None, head_dim), k.dtype, k.device)
