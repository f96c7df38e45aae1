"""Writers of compressed-tensors' formats and of float8, for `make_quantised`; each with its `quantization_config`."""

from __future__ import annotations

from typing import Any

import torch

from quantised_models import Encode, Encoded, rounded, words

F8 = torch.float8_e4m3fn
F8_MOST = 448.0


def compressed(
    storage: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A config as llm-compressor writes it."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"group_0": {**group, "format": storage}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "transform_config": {},
        "version": "0.20.0",
    }


def int_weights(bits: int, size: int | None, **more: Any) -> dict[str, Any]:
    strategy = "channel" if size is None else "group"
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "group_size": size,
        **more,
    }


TOKEN_INPUTS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}


def pack_quantized(
    bits: int, size: int | None, *, symmetric: bool = True, is_ordered: bool = False
) -> Encode:
    def encode(weight: torch.Tensor) -> Encoded:
        num_out, num_in = weight.shape
        order = (
            torch.randperm(num_in, generator=torch.Generator().manual_seed(3))
            if is_ordered
            else None
        )
        grid = rounded(
            weight, bits, size or num_in, symmetric=symmetric, order=order, dtype=torch.bfloat16
        )
        parts = {
            "weight_packed": words(grid.q, bits),
            "weight_scale": grid.scale,
            "weight_shape": torch.tensor([num_out, num_in]),
        }
        if not symmetric:
            parts["weight_zero_point"] = words(grid.zero.T, bits).T
        if is_ordered:
            parts["weight_g_idx"] = grid.group.int()
        return parts, grid.weight

    return encode


def int_quantized(weight: torch.Tensor) -> Encoded:
    """W8A8 with inputs that were calibrated, whose scales are of no use here."""
    grid = rounded(weight, 8, weight.shape[1], symmetric=True, dtype=torch.float32)
    parts = {
        "weight": (grid.q - 128).to(torch.int8),
        "weight_scale": grid.scale,
        "input_scale": torch.ones(1),
    }
    return parts, grid.weight


def int_quantized_asymmetric(weight: torch.Tensor) -> Encoded:
    grid = rounded(weight, 8, 16, dtype=torch.bfloat16)
    zero = (grid.zero - 128).to(torch.int8)
    return {
        "weight": (grid.q - 128).to(torch.int8),
        "weight_scale": grid.scale,
        "weight_zero_point": zero,
    }, grid.weight


def float8(
    rows: int,
    columns: int,
    *,
    scale_name: str = "weight_scale",
    scale_dtype: torch.dtype = torch.float32,
) -> Encode:
    """Float8 with a scale per block of `rows` and `columns`; 0 rows are all, with a scale that has no shape."""

    def encode(weight: torch.Tensor) -> Encoded:
        num_out, num_in = weight.shape
        height, width = rows or num_out, columns or num_in
        stored, decoded = torch.empty_like(weight, dtype=F8), torch.empty_like(weight)
        scales = torch.empty(-(-num_out // height), -(-num_in // width), dtype=torch.float32)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                where = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
                most = weight[where].abs().max() / F8_MOST
                if scale_dtype == torch.float8_e8m0fnu:
                    most = 2.0 ** most.log2().ceil()
                scales[i, j] = most = most.to(scale_dtype).float()
                stored[where] = (weight[where] / most).clamp(-F8_MOST, F8_MOST).to(F8)
                decoded[where] = stored[where].float() * most
        scale = scales.to(scale_dtype)
        return {"weight": stored, scale_name: scale if rows else scale.reshape(())}, decoded

    return encode


def with_input_scale(encode: Encode, name: str = "input_scale") -> Encode:
    def both(weight: torch.Tensor) -> Encoded:
        parts, decoded = encode(weight)
        return {**parts, name: torch.tensor(0.5)}, decoded

    return both
