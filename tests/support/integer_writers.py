"""Writers of GPTQ, AWQ, bitsandbytes and Manylora's 3.5 bits, for `make_quantised`."""

from __future__ import annotations

import json

import numpy as np
import torch

from quantised_models import Encode, Encoded, Tensors, rounded, words

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of a word from its lowest bits up."""
NF4 = (
    *(
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
    ),
    *(
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
    ),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = (
    *(
        0.0,
        0.0052083334885537624,
        0.6666666865348816,
        1.0,
        0.3333333432674408,
        0.5,
        0.1666666716337204,
        0.25,
    ),
    *(
        -0.0,
        -0.0052083334885537624,
        -0.6666666865348816,
        -1.0,
        -0.3333333432674408,
        -0.5,
        -0.1666666716337204,
        -0.25,
    ),
)


def gptq(
    bits: int,
    size: int,
    *,
    version: int = 1,
    symmetric: bool = True,
    is_ordered: bool = False,
    has_index: bool = True,
) -> Encode:
    def encode(weight: torch.Tensor) -> Encoded:
        order = (
            torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
            if is_ordered
            else None
        )
        grid = rounded(weight, bits, size, symmetric=symmetric, order=order)
        zero = (grid.zero - 1) % 2**bits if version == 1 else grid.zero
        parts = {
            "qweight": words(grid.q, bits).T,
            "qzeros": words(zero.T, bits),
            "scales": grid.scale.T,
        }
        return {**parts, "g_idx": grid.group.int()} if has_index else parts, grid.weight

    return encode


def with_zero_bias(encode: Encode) -> Encode:
    """As the first versions of AutoGPTQ wrote it, where the model has no bias."""

    def both(weight: torch.Tensor) -> Encoded:
        parts, decoded = encode(weight)
        return {**parts, "bias": torch.zeros(len(weight), dtype=torch.float16)}, decoded

    return both


def awq(size: int) -> Encode:
    def encode(weight: torch.Tensor) -> Encoded:
        grid = rounded(weight, 4, size)
        parts = {
            "qweight": _awq_words(grid.q.T),
            "qzeros": _awq_words(grid.zero.T),
            "scales": grid.scale.T,
        }
        return parts, grid.weight

    return encode


def _awq_words(values: torch.Tensor) -> torch.Tensor:
    rows, columns = values.shape
    return words(
        values.reshape(rows, columns // 8, 8)[..., list(AWQ_ORDER)].reshape(rows, columns), 4
    )


def bnb_4bit(kind: str, *, nested: bool) -> Encode:
    """NF4 or FP4 in blocks of 64; nested scales are rounded to 8 bits in blocks of 256, as bitsandbytes does it."""
    levels = torch.tensor(NF4 if kind == "nf4" else FP4)

    def encode(weight: torch.Tensor) -> Encoded:
        flat = weight.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % 64)).view(-1, 64)
        absmax, parts = blocks.abs().amax(1), Tensors()
        state = {
            "quant_type": kind,
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        if nested:
            absmax = _nest(absmax, parts, state)
        else:
            parts["weight.absmax"] = absmax
        codes = (blocks / absmax[:, None]).unsqueeze(-1).sub(levels).abs().argmin(-1)
        first, second = codes.flatten().view(-1, 2).T
        parts["weight"] = (16 * first + second)[: -(-flat.numel() // 2)].to(torch.uint8).view(-1, 1)
        parts["weight.quant_map"] = levels
        written = json.dumps(state).encode()
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            list(written), dtype=torch.uint8
        )
        return parts, (levels[codes] * absmax[:, None]).flatten()[: flat.numel()].view_as(weight)

    return encode


def _nest(absmax: torch.Tensor, parts: Tensors, state: dict[str, object]) -> torch.Tensor:
    """Write the scales in 8 bits; returns what they are then."""
    levels = torch.linspace(-1, 1, 256)
    offset = float(absmax.mean())
    padded = torch.nn.functional.pad(absmax - offset, (0, -absmax.numel() % 256)).view(-1, 256)
    outer = padded.abs().amax(1)
    codes = (padded / outer[:, None]).unsqueeze(-1).sub(levels).abs().argmin(-1)
    state.update(nested_blocksize=256, nested_offset=offset, nested_dtype="float32")
    parts["weight.absmax"] = codes.flatten()[: absmax.numel()].to(torch.uint8)
    parts["weight.nested_absmax"], parts["weight.nested_quant_map"] = outer, levels
    return (levels[codes] * outer[:, None]).flatten()[: absmax.numel()] + offset


def bnb_int8(weight: torch.Tensor) -> Encoded:
    absmax = weight.abs().amax(1)
    q = (weight / absmax[:, None] * 127).round().to(torch.int8)
    parts = {"weight": q, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, q.float() * absmax[:, None] / 127


def three_half(weight: torch.Tensor) -> Encoded:
    """Inferflow's levels, in Manylora's bytes, one value at a time."""
    num_out, num_in = weight.shape
    blocks = -(-num_in // 64)
    padded = np.concatenate(
        (weight.numpy(), np.repeat(weight.numpy()[:, -1:], blocks * 64 - num_in, 1)), 1
    )
    packed = np.zeros((num_out, blocks, 28), np.uint8)
    minimum, step = np.zeros((num_out, blocks), np.float16), np.zeros((num_out, blocks), np.float16)
    decoded = np.zeros_like(padded)
    for row in range(num_out):
        for block in range(blocks):
            values = padded[row, block * 64 : (block + 1) * 64]
            low = minimum[row, block] = np.float16(values.min())
            unit = step[row, block] = np.float16((values.max() - values.min()) / np.float32(10))
            levels = [
                min(max(int(np.floor((v - np.float32(low)) / np.float32(unit) + 0.5)), 0), 10)
                for v in values
            ]
            decoded[row, block * 64 : (block + 1) * 64] = [
                np.float32(unit) * q + np.float32(low) for q in levels
            ]
            for group in range(4):
                codes = [
                    levels[group * 16 + 2 * i] + 11 * levels[group * 16 + 2 * i + 1]
                    for i in range(8)
                ]
                for i in range(7):
                    packed[row, block, i * 4 + group] = codes[i] | (codes[7] >> i & 1) << 7
    parts = {
        "weight_packed": packed.reshape(num_out, -1),
        "weight_minimum": minimum,
        "weight_step": step,
    }
    return {name: torch.from_numpy(part) for name, part in parts.items()}, torch.from_numpy(
        decoded[:, :num_in].copy()
    )
